"""The smallest run that shows what is wrong: it may happen, shows it, and can be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from hand_made import VARIANTS, build

from stretto.figures import draw_timeline
from stretto.schedules.language import Program, SpanKey, Timeline, from_json, to_json
from stretto.schedules.published_ring import PublishedRing
from stretto.schedules.verifier import verify
from stretto.schedules.verifier.mutants import mutants


def counterexample(program: Program, **options: object) -> Timeline:
    timeline = verify(program, **options).counterexample  # type: ignore[arg-type]
    assert timeline is not None
    return timeline


def test_both_operations_of_a_race_go_on_at_the_end() -> None:
    program = build(PublishedRing, 2, 4)
    verdict = verify(program)
    timeline = counterexample(program)
    reader, writer = (
        timeline.by_key[SpanKey(place.call, place.rank, place.operation)]
        for place in verdict.errors[0].places
    )
    assert reader.end_us == writer.end_us == timeline.end_us
    assert max(reader.start_us, writer.start_us) < timeline.end_us
    assert timeline.notes == (verdict.errors[0].message,)
    # Nothing that the race does not need: no second call but the one put.
    assert [span.key for span in timeline.spans if span.call == 1] == [writer.key]
    assert len(timeline.spans) == 9


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_edge_is_kept(variant: str) -> None:
    """Whatever went wrong, the run that shows it is one that streams and events allow."""
    shown = 0
    for mutant in mutants(build(variant, 3)):
        if mutant.program is None:
            continue
        verdict = verify(mutant.program)
        timeline = verdict.counterexample
        if timeline is None:
            continue
        shown += 1
        body = mutant.program.phases[0].bodies[0]
        lanes: dict[tuple[int, str], float] = {}
        for span in sorted(timeline.spans, key=lambda one: (one.start_us, one.end_us)):
            lane = (span.rank, span.stream)
            if span.kind != "wait":
                assert span.start_us >= lanes.get(lane, 0.0) - 1e-9, (mutant.what, span)
            if span.end_us < timeline.end_us:
                lanes[lane] = max(lanes.get(lane, 0.0), span.end_us)
            for earlier in body[span.operation].after if span.operation in body.index else ():
                before = timeline.by_key[SpanKey(span.call, span.rank, earlier)]
                if span.kind != "wait":
                    assert before.end_us <= span.start_us + 1e-9, (mutant.what, span, before)
        assert len(timeline.spans) <= verdict.operations + 2 * verdict.calls * 3
    assert shown > 10


def test_it_is_drawn(tmp_path: Path) -> None:
    for name, program in (
        ("race", build(PublishedRing, 2, 4)),
        ("deadlock", build("ring", 2).without("put0")),
        ("unwritten", build("ring", 2).without("put0", "wait0")),
        ("early", build("ring", 2).without("credit0")),
    ):
        timeline = counterexample(program)
        assert from_json(Timeline, to_json(timeline)) == timeline
        path = tmp_path / f"{name}.svg"
        draw_timeline(timeline, path)
        assert path.stat().st_size > 1000


def test_a_deadlock_shows_who_hangs() -> None:
    program = build("ring", 2).without("put0")
    verdict = verify(program)
    timeline = counterexample(program)
    (place,) = verdict.errors[0].places
    assert (place.operation, place.access) == ("wait0", "wait")
    assert timeline.by_key[SpanKey(place.call, place.rank, "wait0")].end_us == timeline.end_us
