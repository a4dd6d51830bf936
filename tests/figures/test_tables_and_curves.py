"""Rows of a summary, and speed-up curves."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import stretto.figures
from stretto.figures import CurvePoint, speedup_curve, summary_rows
from stretto.figures.describe import regret_percent
from stretto.figures.style import long_number
from stretto.schedules.language import InvalidInput


def test_public_names() -> None:
    assert stretto.figures.__all__ == [
        "CurvePoint",
        "Detail",
        "check_figure_path",
        "check_trace_path",
        "draw_timeline",
        "speedup_curve",
        "summary_rows",
        "write_trace",
    ]
    assert all(hasattr(stretto.figures, name) for name in stretto.figures.__all__)


def test_summary_of_a_small_run(ring: Any) -> None:
    timeline = ring(2, put_us=60.0, notes=("A note.",))
    rows = dict(summary_rows(timeline))
    assert rows == {
        "schedule": "ag-gemm/ring, TP2, simulated",
        "conditions": "m 2048, n 2048, k 7168, bf16, copy_engine, h200-sxm, validity: interpolated",
        "makespan": "112.0 µs",
        "roof": "100.0 µs",
        "regret": "12.0 %",
        "exposed communication": "10.00 µs",
        "rank 0": "compute 100.0 µs (89.3 %), exposed 10.00 µs (8.9 %), idle 2.00 µs (1.8 %)",
        "rank 1": "compute 100.0 µs (89.3 %), exposed 10.00 µs (8.9 %), idle 2.00 µs (1.8 %)",
        "note": "A note.",
    }


def test_summary_without_a_roof(ring: Any) -> None:
    timeline = dataclasses.replace(ring(2), roof_us=None)
    rows = dict(summary_rows(timeline))
    assert (rows["roof"], rows["regret"]) == ("not known", "not known")
    assert regret_percent(timeline) is None


def test_regret_may_be_below_zero(ring: Any) -> None:
    timeline = dataclasses.replace(ring(2), roof_us=125.0)
    assert regret_percent(timeline) == pytest.approx(100.0 * (100.0 / 125.0 - 1.0))


def test_of_many_ranks_three_are_listed(ring: Any) -> None:
    timeline = ring(72, gemm_us=6.0, put_us=7.0, skew_us=40.0)
    ranked = [label for label, _ in summary_rows(timeline) if ", rank " in label]
    exposed = [share.exposed_comm_us for share in timeline.shares]
    order = sorted(range(72), key=lambda rank: (exposed[rank], rank))
    assert ranked == [
        f"least exposed, rank {order[0]}",
        f"median exposed, rank {order[36]}",
        f"most exposed, rank {order[-1]}",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.42, "0.42"),
        (0.12345, "0.1235"),
        (9.876, "9.88"),
        (123.44, "123.4"),
        (14548.2, "14548"),
    ],
)
def test_numbers_keep_the_digits_that_count(value: float, text: str) -> None:
    assert long_number(value) == text


ROWS = [
    CurvePoint("ring", 1024, 1.2, 1.1, 1.3),
    CurvePoint("ring", 16, 0.8, 0.7, 0.9),
    CurvePoint("ring", 1, None),
    CurvePoint("fused", 16, 1.1),
    CurvePoint("fused", 1024, 1.4),
]


def by_gid(figure: Any, gid: str) -> list[Any]:
    (axes,) = figure.axes
    return [artist for artist in axes.get_children() if artist.get_gid() == gid]


def test_one_line_a_method_over_log2_of_m() -> None:
    figure = speedup_curve(ROWS, baseline="NCCL")
    (axes,) = figure.axes
    (ring,), (fused,) = by_gid(figure, "method-ring"), by_gid(figure, "method-fused")
    assert ring.get_xydata().tolist() == [[16, 0.8], [1024, 1.2]]
    assert fused.get_xydata().tolist() == [[16, 1.1], [1024, 1.4]]
    assert ring.get_color() != fused.get_color()
    assert ring.get_marker() != fused.get_marker()
    assert axes.get_xscale() == "log"
    assert axes.xaxis.get_transform().base == 2
    assert axes.get_ylabel() == "speed-up over NCCL"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ring", "fused"]


def test_intervals_and_skipped_cases_are_shown() -> None:
    figure = speedup_curve(ROWS)
    (band,) = by_gid(figure, "interval-ring")
    (path,) = band.get_paths()
    assert {0.7, 0.9, 1.1, 1.3} <= {round(float(y), 6) for y in path.vertices[:, 1]}
    assert not by_gid(figure, "interval-fused")
    (crosses,) = by_gid(figure, "skipped-ring")
    assert crosses.get_xydata().tolist() == [[1, 0]]


def test_labels_of_m_do_not_touch() -> None:
    rows = [CurvePoint("a", m, 1.0) for m in [1, 2, 4, 8, 4096, 4608, 5120, 8192, 16384]]
    figure = speedup_curve(rows, width=4.0)
    (axes,) = figure.axes
    renderer = figure.canvas.get_renderer()
    figure.draw_without_rendering()
    boxes = [label.get_window_extent(renderer) for label in axes.get_xticklabels()]
    assert len(boxes) >= 6
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


def test_curves_are_written_the_same_every_time(tmp_path: Path) -> None:
    for name in ("one.svg", "other.svg"):
        speedup_curve(ROWS, tmp_path / name, title="A title")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no ratio"),
        ([CurvePoint("a", 1, None)], "no ratio"),
        ([CurvePoint("a", 0, 1.0)], "above zero"),
        ([CurvePoint("a", 1, float("nan"))], "above zero"),
        ([CurvePoint("a", 1, 1.0, low=-1.0)], "above zero"),
        ([CurvePoint(f"method {number}", 1, 1.0) for number in range(20)], "at most"),
    ],
)
def test_what_cannot_be_drawn_is_refused(rows: list[CurvePoint], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        speedup_curve(rows)


def test_a_bad_path_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"\.png, \.svg or \.pdf"):
        speedup_curve([], tmp_path / "curve.jpg")
