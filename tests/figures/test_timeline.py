"""What a timeline figure shows, read back from the artists that were drawn."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.figures import draw_timeline
from stretto.figures.style import EXPOSED_HATCH, GROUPS, group_of
from stretto.schedules.language import InvalidInput, Span, Timeline, exposed_intervals


def artists(axes: Any, gid: str) -> list[Any]:
    return [artist for artist in axes.get_children() if artist.get_gid() == gid]


def spans_drawn(axes: Any, panel: int = 0) -> Counter[str]:
    """Number of shapes by group, however they were drawn."""
    found: Counter[str] = Counter()
    for group in GROUPS:
        for what in ("bars", "slivers", "ticks"):
            for collection in artists(axes, f"panel{panel}-{group}-{what}"):
                found[group] += len(collection.get_paths())
    return found


def boxes(collection: Any) -> list[tuple[float, float, float, float]]:
    """Left, right, top and bottom of every shape."""
    found = []
    for path in collection.get_paths():
        x, y = path.vertices[:, 0], path.vertices[:, 1]
        found.append((x.min(), x.max(), y.min(), y.max()))
    return found


def x_of(axes: Any, gid: str) -> float:
    (line,) = artists(axes, gid)
    (path,) = line.get_paths()
    assert path.vertices[0, 0] == path.vertices[1, 0]
    return float(path.vertices[0, 0])


def texts(figure: Any) -> Iterator[Any]:
    yield from figure.texts
    for axes in figure.axes:
        yield from axes.texts


def words(figure: Any) -> list[str]:
    return [text.get_text() for text in texts(figure)]


@pytest.mark.parametrize("tp", [2, 4, 16])
def test_every_span_is_drawn_once_in_the_colour_of_its_kind(ring: Any, tp: int) -> None:
    timeline = ring(tp, skew_us=7.0)
    (axes,) = draw_timeline([timeline]).axes
    assert spans_drawn(axes) == Counter(group_of(span.kind) for span in timeline.spans)


def test_a_bar_lies_where_its_span_does(ring: Any) -> None:
    timeline = ring(2, put_us=62.0, skew_us=9.0, start_us=5000.0)
    (axes,) = draw_timeline([timeline]).axes
    (gemms,) = artists(axes, "panel0-gemm-bars")
    drawn = sorted((round(left, 6), round(right, 6)) for left, right, _, _ in boxes(gemms))
    assert drawn == sorted(
        (round(span.start_us - timeline.start_us, 6), round(span.end_us - timeline.start_us, 6))
        for span in timeline.spans
        if span.kind == "gemm"
    )


def test_lanes_are_ranks_then_streams_with_compute_on_top(ring: Any) -> None:
    figure = draw_timeline([ring(4)])
    (axes,) = figure.axes
    named = {"compute", "send", "receive", *(f"rank {rank}" for rank in range(4))}
    labels = [text for text in axes.texts if text.get_text() in named]
    streams = [text for text in labels if not text.get_text().startswith("rank")]
    ranks = [text for text in labels if text.get_text().startswith("rank")]
    by_height = sorted(streams, key=lambda text: text.get_position()[1])
    assert [text.get_text() for text in by_height] == ["compute", "send", "receive"] * 4
    assert [text.get_text() for text in ranks] == [f"rank {rank}" for rank in range(4)]
    assert axes.get_ylim()[0] > axes.get_ylim()[1] == 0  # downwards
    (waits,) = artists(axes, "panel0-wait-bars")
    (puts,) = artists(axes, "panel0-put-bars")
    height = {
        name: box[3] - box[2] for name, box in (("wait", boxes(waits)[0]), ("put", boxes(puts)[0]))
    }
    assert height["wait"] < height["put"]


@pytest.mark.parametrize("roof_us", [80.0, 100.0, 130.0, None])
def test_makespan_and_roof_are_lines_with_labels_that_do_not_meet(
    ring: Any, roof_us: float | None
) -> None:
    timeline = dataclasses.replace(ring(2, put_us=62.0), roof_us=roof_us)
    figure = draw_timeline([timeline])
    (axes,) = figure.axes
    assert x_of(axes, "panel0-makespan") == pytest.approx(timeline.makespan_us)
    labels = [text for text in axes.texts if text.get_text().startswith(("makespan 1", "roof "))]
    labels = [text for text in labels if "·" not in text.get_text()]
    assert len(labels) == (1 if roof_us is None else 2)
    if roof_us is not None:
        assert x_of(axes, "panel0-roof") == pytest.approx(roof_us)
        one, other = (text.get_window_extent(figure.canvas.get_renderer()) for text in labels)
        assert not one.overlaps(other)
    else:
        assert not artists(axes, "panel0-roof")
    assert axes.get_xlim()[1] >= max(timeline.makespan_us, roof_us or 0.0)


@pytest.mark.parametrize(("tp", "detail"), [(2, "auto"), (16, "auto"), (72, "ranks")])
def test_exposed_communication_is_drawn_as_worked_out(ring: Any, tp: int, detail: Any) -> None:
    timeline = ring(tp, gemm_us=20.0, put_us=31.0, skew_us=5.0)
    (axes,) = draw_timeline([timeline], detail=detail).axes
    (strips,) = artists(axes, "panel0-exposed")
    corners = strips.get_path().vertices.reshape(-1, 5, 2)[:, :4]
    drawn = sorted((box[:, 0].min(), box[:, 0].max()) for box in corners)
    expected = sorted(
        (start - timeline.start_us, end - timeline.start_us)
        for intervals in exposed_intervals(timeline).values()
        for start, end in intervals
    )
    assert len(expected) > tp
    assert np.allclose(drawn, expected)
    assert strips.get_hatch() == (EXPOSED_HATCH if detail == "auto" else None)


def test_strips_of_exposed_communication_lie_under_their_rank(ring: Any) -> None:
    timeline = ring(2, put_us=62.0)
    (axes,) = draw_timeline([timeline]).axes
    (strips,) = artists(axes, "panel0-exposed")
    tops = sorted(
        {float(y) for y in strips.get_path().vertices.reshape(-1, 5, 2)[:, :4, 1].min(axis=1)}
    )
    (waits,) = artists(axes, "panel0-wait-bars")
    bottoms = sorted({float(box[3]) for box in boxes(waits)})
    assert bottoms[0] < tops[0] < bottoms[1] < tops[1]


def test_panels_share_one_time_axis_and_each_starts_at_its_own_start(ring: Any) -> None:
    measured = ring(
        2, put_us=62.0, skew_us=9.0, start_us=123456.0, origin="measured", clock_error_us=0.4
    )
    simulated = ring(2, put_us=60.0, start_us=0.0)
    figure = draw_timeline([measured, simulated], title="Both")
    upper, lower = figure.axes
    assert upper.get_xlim() == lower.get_xlim()
    assert upper.get_position().y0 > lower.get_position().y1
    assert upper.get_position().x0 == lower.get_position().x0
    for panel, axes in enumerate((upper, lower)):
        (puts,) = artists(axes, f"panel{panel}-put-bars")
        assert min(box[0] for box in boxes(puts)) == pytest.approx(0.0)
    one = upper.bbox.height / (upper.get_ylim()[0] - upper.get_ylim()[1])
    other = lower.bbox.height / (lower.get_ylim()[0] - lower.get_ylim()[1])
    assert one == pytest.approx(other)  # a lane is equally high in both


def test_header_says_what_was_run_and_how_far_to_trust_it(ring: Any) -> None:
    measured = ring(2, origin="measured", clock_error_us=0.42, machine="two GPUs")
    simulated = ring(2, put_us=60.0, validity="not validated", notes=("The link is assumed.",))
    shown = "\n".join(words(draw_timeline([measured, simulated])))
    for expected in (
        "ag-gemm/ring, TP2, measured",
        "ag-gemm/ring, TP2, simulated",
        "m 2048",
        "n 2048",
        "k 7168",
        "bf16",
        "copy_engine",
        "two GPUs",
        "h200-sxm",
        "clock error 0.42 µs",
        "validity: not validated",
        "regret 12.0 %",
        "exposed 10.00 µs",
        "The link is assumed.",
    ):
        assert expected in shown


def test_long_runs_are_in_milliseconds(ring: Any) -> None:
    timeline = ring(2, gemm_us=9000.0, put_us=100.0)
    (axes,) = draw_timeline([timeline]).axes
    assert axes.get_xlabel() == "time (ms)"
    assert x_of(axes, "panel0-makespan") == pytest.approx(timeline.makespan_us / 1000.0)
    (short,) = draw_timeline([ring(2)]).axes
    assert short.get_xlabel() == "time (µs)"


def test_signals_without_length_are_ticks(ring: Any) -> None:
    timeline = ring(4)
    (axes,) = draw_timeline([timeline]).axes
    (ticks,) = artists(axes, "panel0-signal-ticks")
    at = sorted(float(path.vertices[0, 0]) for path in ticks.get_paths())
    assert at == pytest.approx([timeline.makespan_us] * 4)


def test_calls_are_separated_on_every_lane(ring: Any) -> None:
    timeline = ring(2, calls=3)
    figure = draw_timeline([timeline])
    (axes,) = figure.axes
    (separators,) = artists(axes, "panel0-calls")
    assert len(separators.get_paths()) == len(timeline.lanes) * 2
    starts = {
        round(
            min(span.start_us for span in timeline.spans if lane_call(span) == key)
            - timeline.start_us,
            6,
        )
        for key in {lane_call(span) for span in timeline.spans}
        if key[2] > 0
    }
    assert {round(float(path.vertices[0, 0]), 6) for path in separators.get_paths()} == starts
    assert {"call 0", "call 1", "call 2"} <= set(words(figure))
    (single,) = draw_timeline([ring(2)]).axes
    assert not artists(single, "panel0-calls")


def lane_call(span: Span) -> tuple[int, str, int]:
    return span.rank, span.stream, span.call


def test_too_many_calls_are_not_marked_and_it_is_said(ring: Any) -> None:
    figure = draw_timeline([ring(2, calls=200)])
    assert not artists(figure.axes[0], "panel0-calls")
    assert "The calls are too many to mark where each begins." in words(figure)


def test_labels_fit_their_bars_and_keep_clear_of_lines(ring: Any) -> None:
    for tp in (2, 4, 16):
        timeline = ring(tp, gemm_us=50.0, put_us=55.0, skew_us=4.0)
        figure = draw_timeline([timeline])
        (axes,) = figure.axes
        renderer = figure.canvas.get_renderer()
        inverse = axes.transData.inverted()
        gemms = [
            box for name in ("bars",) for box in boxes(artists(axes, f"panel0-gemm-{name}")[0])
        ]
        labels = [text for text in axes.texts if text.get_color() == GROUPS["gemm"].ink]
        assert len(labels) >= 0.7 * len(gemms)
        lines = [timeline.makespan_us, timeline.roof_us]
        for label in labels:
            extent = label.get_window_extent(renderer)
            (left, _), (right, _) = inverse.transform([extent.p0, extent.p1])
            assert any(box[0] <= left and right <= box[1] for box in gemms)
            assert not any(left < line < right for line in lines)


@pytest.mark.parametrize(
    "what",
    [
        {"tp": 2, "put_us": 62.0, "skew_us": 9.0},
        {"tp": 4, "calls": 3},
        {"tp": 16, "gemm_us": 12.0, "put_us": 14.0, "skew_us": 20.0},
        {"tp": 72, "gemm_us": 6.0, "put_us": 7.0, "skew_us": 40.0},
    ],
    ids=lambda what: f"tp{what['tp']}",
)
def test_nothing_is_cut_off_and_no_text_overlaps(ring: Any, what: dict[str, Any]) -> None:
    figure = draw_timeline([ring(**what), ring(what["tp"])], title="A title")
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    page = figure.bbox
    extents = [
        (text.get_text(), text.get_window_extent(renderer))
        for text in texts(figure)
        if text.get_text()
    ]
    for legend in figure.legends:
        extents.append(("legend", legend.get_window_extent(renderer)))
    last = figure.axes[-1]
    extents.append(("axis", last.xaxis.label.get_window_extent(renderer)))
    for name, extent in extents:
        assert extent.x0 >= page.x0, name
        assert extent.x1 <= page.x1, name
        assert extent.y0 >= page.y0, name
        assert extent.y1 <= page.y1, name
    lefts = np.array([[extent.x0, extent.x1, extent.y0, extent.y1] for _, extent in extents])
    # A line of type is taller than its letters: shave off what no letter fills.
    shave = 0.18 * (lefts[:, 3] - lefts[:, 2])
    low, high = lefts[:, 2] + shave, lefts[:, 3] - shave
    for place, (name, _) in enumerate(extents):
        others = (
            (lefts[:, 0] < lefts[place, 1])
            & (lefts[:, 1] > lefts[place, 0])
            & (low < high[place])
            & (high > low[place])
        )
        others[place] = False
        assert not others.any(), (name, [extents[other][0] for other in np.flatnonzero(others)])


def test_tp72_falls_back_to_a_row_per_rank_and_says_so(ring: Any) -> None:
    timeline = ring(72, gemm_us=6.0, put_us=7.0)
    figure = draw_timeline([timeline])
    (axes,) = figure.axes
    expected = Counter(group_of(span.kind) for span in timeline.spans)
    assert spans_drawn(axes) == Counter({"gemm": expected["gemm"], "put": expected["put"]})
    assert any("One row per rank" in text for text in words(figure))
    assert figure.get_figheight() < 12.0
    (gemms,), (puts,) = artists(axes, "panel0-gemm-slivers"), artists(axes, "panel0-put-slivers")
    assert min(box[3] for box in boxes(gemms)) <= min(box[2] for box in boxes(puts))


def test_extremes_are_the_fastest_the_median_and_the_slowest_rank(ring: Any) -> None:
    timeline = ring(9, gemm_us=6.0, put_us=7.0, skew_us=40.0)
    figure = draw_timeline([timeline], detail="extremes")
    ends = {
        rank: max(span.end_us for span in timeline.spans if span.rank == rank) for rank in range(9)
    }
    fastest, *_, slowest = order = sorted(ends, key=lambda rank: (ends[rank], rank))
    shown = [text for text in words(figure) if text.startswith("rank ")]
    assert shown == [f"rank {fastest}", f"rank {order[4]}", f"rank {slowest}"]
    assert any(text.startswith("3 of 9 ranks") for text in words(figure))


def test_twenty_thousand_spans_take_seconds(ring: Any, tmp_path: Path) -> None:
    timeline = ring(8, gemm_us=9.0, put_us=8.0, calls=110, skew_us=3.0)
    assert len(timeline.spans) > 20_000
    began = time.monotonic()
    draw_timeline([timeline], tmp_path / "many.png")
    assert time.monotonic() - began < 10.0


def test_other_kinds_have_colours_of_their_own(ring: Any) -> None:
    spans = tuple(
        Span(f"op{place}", kind, 0, "compute", 0, 10.0 * place, 10.0 * place + 9.0, note=note)
        for place, (kind, note) in enumerate(
            [
                ("collective", "all_gather"),
                ("gemm", None),
                ("row_op", "rms_norm"),
                ("gather_gemm", None),
            ]
        )
    )
    timeline = dataclasses.replace(ring(2), world_size=1, spans=spans, roof_us=None)
    figure = draw_timeline(timeline)
    assert spans_drawn(figure.axes[0]) == Counter(collective=1, gemm=1, other=1, fused=1)
    (legend,) = figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert named == ["GEMM", "fused GEMM", "other compute", "collective"]
    assert {"all_gather", "rms_norm", "gather gemm"} <= set(words(figure))


def test_a_rank_that_did_nothing_keeps_its_place(ring: Any) -> None:
    timeline = ring(2)
    alone = dataclasses.replace(
        timeline,
        spans=tuple(span for span in timeline.spans if span.rank == 1 and span.kind == "gemm"),
    )
    figure = draw_timeline(alone)
    assert [text for text in words(figure) if text.startswith("rank ")] == ["rank 0", "rank 1"]
    assert spans_drawn(figure.axes[0]) == Counter(gemm=2)


def test_names_are_shown_as_they_are(ring: Any, tmp_path: Path) -> None:
    spans = tuple(dataclasses.replace(s, stream=f"$a$ {s.stream}") for s in ring(2).spans)
    timeline = dataclasses.replace(
        ring(2), name="cost $x_1$ and $", machine="a_b^c\nd\t\N{CJK UNIFIED IDEOGRAPH-4E00}",
        variant="", spans=spans, notes=("A note\nof two lines.",),
    )  # fmt: skip
    figure = draw_timeline(timeline, tmp_path / "names.svg", title="$ and $\n\x07")
    shown = words(figure)
    assert "cost $x_1$ and $, TP2, simulated" in shown
    assert "A note of two lines." in shown
    assert any("a_b^c d ?" in text for text in shown)  # what the typeface lacks
    assert "$a$ compute" in shown
    assert "$ and $ ?" in shown


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "PNG"])
def test_same_timelines_give_the_same_bytes(ring: Any, tmp_path: Path, suffix: str) -> None:
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix.lower()]
    written = []
    for name in ("one", "other"):
        path = tmp_path / f"{name}.{suffix}"
        draw_timeline([ring(2, put_us=62.0), ring(2, put_us=60.0)], path)
        written.append(path.read_bytes())
    assert written[0] == written[1]
    assert written[0].startswith(magic)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"one.{suffix}", f"other.{suffix}"]


def test_settings_of_matplotlib_are_neither_used_nor_changed(ring: Any, tmp_path: Path) -> None:
    import matplotlib

    draw_timeline(ring(2), tmp_path / "before.svg")
    with matplotlib.rc_context(
        {"font.size": 30.0, "axes.facecolor": "red", "svg.hashsalt": "mine"}
    ):
        before = dict(matplotlib.rcParams)
        draw_timeline(ring(2), tmp_path / "after.svg")
        assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "before.svg").read_bytes() == (tmp_path / "after.svg").read_bytes()


@pytest.mark.parametrize(
    ("change", "words_of_error"),
    [
        ({"rank": 2}, "names rank 2 of 2"),
        ({"peer": -1}, "names rank -1 of 2"),
        ({"end_us": 0.0}, "ends before it begins"),
        ({"end_us": float("nan")}, "has no finite time"),
    ],
)
def test_spans_that_cannot_be_are_refused(
    ring: Any, change: dict[str, Any], words_of_error: str
) -> None:
    timeline: Timeline = ring(2)
    spans = (dataclasses.replace(timeline.spans[0], **change), *timeline.spans[1:])
    with pytest.raises(InvalidInput, match=words_of_error):
        draw_timeline(dataclasses.replace(timeline, spans=spans))


def test_nothing_to_draw_is_refused(ring: Any) -> None:
    with pytest.raises(InvalidInput, match="no timeline to draw"):
        draw_timeline([])
    with pytest.raises(InvalidInput, match="has no spans"):
        draw_timeline(dataclasses.replace(ring(2), spans=()))
    with pytest.raises(InvalidInput, match="illegible"):
        draw_timeline(ring(2), width=1.0)


def test_paths_are_checked_before_anything_is_drawn(
    ring: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("drawn before the path was checked")

    monkeypatch.setattr("stretto.figures.timeline._composed", fail)
    with pytest.raises(InvalidInput, match=r"\.png, \.svg or \.pdf"):
        draw_timeline(ring(2), tmp_path / "figure.gif")


def test_importing_figures_imports_neither_matplotlib_nor_perfetto_nor_torch() -> None:
    code = (
        "import sys, stretto.figures; heavy = {'matplotlib', 'perfetto', 'torch'}; "
        "sys.exit(', '.join(heavy & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
