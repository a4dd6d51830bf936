"""A counterexample as it is drawn: who is at fault, in what order, and nothing about times."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import FancyArrowPatch, Rectangle

from stretto.figures import draw_timeline, summary_rows
from stretto.figures.style import FAULT
from stretto.schedules import schedule_class, verify
from stretto.schedules.language import (
    ALL_COLLECTIVES,
    ALL_VERBS,
    Capabilities,
    InvalidInput,
    Program,
    SpanKey,
    Timeline,
)
from stretto.schedules.published_ring import PublishedRing

CAPABILITIES = Capabilities("test", ALL_VERBS, ALL_COLLECTIVES, signal_orders_puts=True)


def ring(tp: int) -> Program:
    return build(schedule_class("ag-gemm", "ring"), tp)


def build(cls: Any, tp: int) -> Program:
    program: Program = cls(
        world_size=tp, m=4 * tp - 1, n=8, k=8, dtype="fp32", capabilities=CAPABILITIES
    ).build()
    return program


def edited(program: Program, operation: str, **changes: object) -> Program:
    """Return the Program with fields of one operation changed in all bodies."""
    (phase,) = program.phases
    bodies = tuple(
        dataclasses.replace(
            body,
            operations=tuple(
                dataclasses.replace(one, **changes) if one.id == operation else one  # type: ignore[arg-type]
                for one in body.operations
            ),
        )
        for body in phase.bodies
    )
    return dataclasses.replace(program, phases=(dataclasses.replace(phase, bodies=bodies),))


def silent(tp: int) -> Program:
    """Return a ring whose first put does not signal: the wait for it hangs."""
    return edited(ring(tp), "put0", signal=None)


def circular(tp: int) -> Program:
    """Return a ring in which every rank's first put follows the wait for the other's."""
    (phase,) = ring(tp).phases
    bodies = tuple(
        dataclasses.replace(
            body,
            operations=(
                dataclasses.replace(body["wait0"], stream="early", after=()),
                *(one for one in body.operations if one.id != "wait0"),
            ),
        )
        for body in phase.bodies
    )
    early = dataclasses.replace(ring(tp), phases=(dataclasses.replace(phase, bodies=bodies),))
    return edited(early, "put0", after=("wait0",))


def shown(program: Program) -> Timeline:
    timeline = verify(program).counterexample
    assert timeline is not None
    return timeline


BROKEN = {
    "published": lambda tp: build(PublishedRing, tp),
    "without credit": lambda tp: ring(tp).without("credit0"),
    "without wait": lambda tp: ring(tp).without("wait0"),
    "early release": lambda tp: edited(ring(tp), "release0", after=()),
    "without release": lambda tp: ring(tp).without("release0"),
    "without signal": silent,
    "circular": circular,
}


def texts(figure: Any) -> Iterator[Any]:
    yield from figure.texts
    for axes in figure.axes:
        yield from (text for text in axes.texts if text.get_text())
    for legend in figure.legends:
        yield from legend.get_texts()


def words(figure: Any) -> list[str]:
    return [text.get_text() for text in texts(figure)]


def patches(figure: Any, kind: type, prefix: str) -> dict[str, Any]:
    return {
        patch.get_gid(): patch
        for axes in figure.axes
        for patch in axes.patches
        if isinstance(patch, kind) and (patch.get_gid() or "").startswith(prefix)
    }


def named(key: SpanKey) -> str:
    return f"{key.call}-{key.rank}-{key.operation}"


@pytest.mark.parametrize("what", BROKEN)
def test_it_says_nothing_of_times(what: str) -> None:
    timeline = shown(BROKEN[what](2))
    figure = draw_timeline(timeline)
    for text in words(figure):
        for time in ("makespan", "exposed", "roof", "regret", "µs"):
            assert time not in text
    assert not any(axes.axison for axes in figure.axes)
    assert not any("µs" in value for _, value in summary_rows(timeline))


def test_other_timelines_do() -> None:
    timeline = dataclasses.replace(
        shown(build(PublishedRing, 2)), origin="simulated", machine="small", marks=()
    )
    said = "\n".join(words(draw_timeline(timeline)))
    for time in ("makespan", "exposed", "µs"):
        assert time in said
    assert {"makespan", "exposed communication"} <= {name for name, _ in summary_rows(timeline)}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("what", BROKEN)
def test_what_the_finding_names_stands_out(what: str, tp: int) -> None:
    timeline = shown(BROKEN[what](tp))
    figure = draw_timeline(timeline)
    bars = patches(figure, Rectangle, "mark-")
    assert set(bars) == {f"mark-{named(mark.key)}" for mark in timeline.marks}
    others = patches(figure, Rectangle, "span-")
    keys = timeline.by_key.keys() - {mark.key for mark in timeline.marks}
    assert set(others) == {f"span-{named(key)}" for key in keys}
    fault = tuple(int(FAULT[place : place + 2], 16) / 255 for place in (1, 3, 5))
    assert all(bar.get_edgecolor()[:3] == pytest.approx(fault) for bar in bars.values())
    assert not any(bar.get_edgecolor()[:3] == pytest.approx(fault) for bar in others.values())
    thinnest = min(bar.get_linewidth() for bar in bars.values())
    assert all(bar.get_linewidth() < thinnest for bar in others.values())
    said = words(figure)
    for mark in timeline.marks:
        assert said.count(mark.name) == sum(one.name == mark.name for one in timeline.marks)
        (line,) = [
            text
            for text in said
            if text.startswith(f"{mark.name} (rank {mark.rank}, stream {mark.stream})")
        ]
        assert mark.role in line
        begun = mark.key in timeline.by_key
        assert begun == ("has not begun" not in line)
        assert begun == (bars[f"mark-{named(mark.key)}"].get_linestyle() in ("-", "solid"))


@pytest.mark.parametrize("what", BROKEN)
def test_the_sentence_of_the_finding_is_the_caption(what: str) -> None:
    program = BROKEN[what](4)
    said = " ".join(words(draw_timeline(shown(program))))
    assert verify(program).errors[0].message in said


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("what", ["published", "early release", "without release"])
def test_an_arrow_leads_from_every_signal_to_its_wait(what: str, tp: int) -> None:
    timeline = shown(BROKEN[what](tp))
    figure = draw_timeline(timeline)
    arrows = patches(figure, FancyArrowPatch, "signal-")
    bars = patches(figure, Rectangle, "span-") | patches(figure, Rectangle, "mark-")
    bar_of = {gid.partition("-")[2]: bar for gid, bar in bars.items()}
    pairs = [
        (signal, wait)
        for wait, signals in timeline.matches.items()
        for signal in signals
        if signal.rank != wait.rank
    ]
    assert pairs
    assert set(arrows) >= {f"signal-{named(one)}-to-{named(other)}" for one, other in pairs}
    for one, other in pairs:
        arrow = arrows[f"signal-{named(one)}-to-{named(other)}"]
        (tail, from_y), (head, to_y) = arrow._posA_posB
        source, target = bar_of[named(one)], bar_of[named(other)]
        assert tail == pytest.approx(source.get_x() + source.get_width(), abs=0.03)
        assert head == pytest.approx(target.get_x() + target.get_width(), abs=0.03)
        assert source.get_y() < from_y < source.get_y() + source.get_height()
        edges = (target.get_y(), target.get_y() + target.get_height())
        assert min(abs(to_y - edge) for edge in edges) < 0.03
        assert tail < head


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("what", ["without signal", "circular"])
def test_a_signal_that_never_comes_has_no_arrow(what: str, tp: int) -> None:
    timeline = shown(BROKEN[what](tp))
    assert any(mark.operation == "wait0" for mark in timeline.marks)
    assert not patches(draw_timeline(timeline), FancyArrowPatch, "signal-")


def test_bars_keep_the_order_and_are_as_long_as_their_names() -> None:
    timeline = shown(BROKEN["without release"](4))
    figure = draw_timeline(timeline)
    bars = patches(figure, Rectangle, "span-")
    ends: dict[float, set[float]] = {}
    for span in timeline.spans:
        bar = bars.get(f"span-{named(span.key)}")
        if bar is not None:
            ends.setdefault(span.start_us, set()).add(round(bar.get_x(), 6))
            ends.setdefault(span.end_us, set()).add(round(bar.get_x() + bar.get_width(), 6))
    assert all(len(places) == 1 for places in ends.values())
    places = [min(ends[time]) for time in sorted(ends)]
    assert places == sorted(places)
    assert len(set(places)) == len(places)
    names = [text for text in words(figure) if text.removeprefix("call 1: ") in {"put0", "wait0"}]
    drawn = [gid for gid in bars if gid.endswith(("-put0", "-wait0"))]
    assert len(names) == len(drawn) > 8


def test_ranks_without_a_part_are_left_out_and_it_is_said() -> None:
    figure = draw_timeline(shown(BROKEN["without wait"](8)))
    said = words(figure)
    assert [text for text in said if text.startswith("rank ")] == ["rank 0", "rank 1"]
    assert "Without a part in it, and left out: 6 of 8 ranks" in said


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("what", BROKEN)
def test_nothing_is_cut_off_and_no_text_overlaps(what: str, tp: int) -> None:
    figure = draw_timeline(shown(BROKEN[what](tp)), title="A title")
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    found = [(text.get_text(), text.get_window_extent(renderer)) for text in texts(figure)]
    page = figure.bbox
    for text, extent in found:
        assert page.x0 <= extent.x0, text
        assert extent.x1 <= page.x1, text
        assert page.y0 <= extent.y0, text
        assert extent.y1 <= page.y1, text
    left, right, bottom, top = np.array([(e.x0, e.x1, e.y0, e.y1) for _, e in found]).T
    # A line of type is taller than its letters: shave off what no letter fills.
    low, high = bottom + 0.18 * (top - bottom), top - 0.18 * (top - bottom)
    for place, (text, _) in enumerate(found):
        meets = (left < right[place]) & (right > left[place]) & (low < high[place])
        meets &= high > low[place]
        meets[place] = False
        assert not meets.any(), (text, [found[other][0] for other in np.flatnonzero(meets)])


def test_same_counterexample_same_bytes(tmp_path: Path) -> None:
    written = []
    for name in ("one", "other"):
        draw_timeline(shown(build(PublishedRing, 2)), tmp_path / f"{name}.svg")
        written.append((tmp_path / f"{name}.svg").read_bytes())
    assert written[0] == written[1]


def test_it_shares_no_figure() -> None:
    timeline = shown(build(PublishedRing, 2))
    with pytest.raises(InvalidInput, match="draw it by itself"):
        draw_timeline([timeline, timeline])


def test_spans_of_a_stream_that_overlap_have_rows_of_their_own() -> None:
    """A put that nothing waits for goes on while its stream has gone further."""
    timeline = shown(build(PublishedRing, 2))
    (first,) = [span for span in timeline.spans if span.key == SpanKey(0, 1, "put0")]
    long = dataclasses.replace(first, end_us=timeline.end_us)
    spans = tuple(long if span is first else span for span in timeline.spans)
    figure = draw_timeline(dataclasses.replace(timeline, spans=spans))
    bars = patches(figure, Rectangle, "span-") | patches(figure, Rectangle, "mark-")
    one, other = bars["span-0-1-put0"], bars["mark-1-1-put0"]
    assert one.get_x() + one.get_width() > other.get_x()
    apart = abs(one.get_y() - other.get_y())
    assert apart > min(one.get_height(), other.get_height())
    assert words(figure).count("send") == 2
