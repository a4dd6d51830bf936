"""The smallest run that shows what is wrong: it may happen, shows it, and can be drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hand_made import VARIANTS, build, found, made, put, wait, word

from stretto.figures import draw_timeline
from stretto.schedules.language import (
    Epoch,
    Program,
    Signal,
    SpanKey,
    Timeline,
    from_json,
    to_json,
)
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_shows_the_first_error(variant: str) -> None:
    """However many operations that takes: what is read first is what is seen."""
    larger = 0
    for mutant in mutants(build(variant, 2)):
        verdict = None if mutant.program is None else verify(mutant.program)
        if verdict is None or verdict.counterexample is None:
            continue
        timeline, (first, *others) = verdict.counterexample, verdict.errors
        assert timeline.notes == (first.message,), mutant.what
        places = [(place.call, place.rank, place.operation) for place in first.places]
        assert places == [tuple(mark.key) for mark in timeline.marks][: len(places)], mutant.what
        larger += bool(others)
    assert larger > 3


def test_marks_are_called_what_the_sentence_calls_them() -> None:
    verdict = verify(build(PublishedRing, 2, 4))
    read, write = counterexample(build(PublishedRing, 2, 4)).marks
    (finding,) = verdict.errors
    assert (read.name, write.name) == ("gemm1 of call 0", "put0 of call 1")
    assert read.name in finding.message
    assert write.name in finding.message
    assert (read.rank, read.stream, read.role) == (
        0,
        "compute",
        "reads rows 2 to 3 of 'gathered' on rank 0",
    )
    assert (write.rank, write.stream, write.role) == (
        1,
        "send",
        "writes rows 2 to 3 of 'gathered' on rank 0",
    )
    assert read.ongoing
    assert write.ongoing


def test_a_release_is_shown_with_what_it_does_not_wait_for() -> None:
    program = build("ring", 3)
    body = program.phases[0].bodies[0]
    loose = replace(
        body,
        operations=tuple(
            replace(one, after=()) if one.id == "release0" else one for one in body.operations
        ),
    )
    program = replace(program, phases=(replace(program.phases[0], bodies=(loose,)),))
    verdict, timeline = verify(program), counterexample(program)
    assert verdict.errors[0].kind == "early_release"
    release, use = timeline.marks
    assert release.operation == "release0"
    assert use.name in verdict.errors[0].message
    assert (release.ongoing, use.ongoing) == (False, True)
    assert timeline.by_key[use.key].end_us == timeline.end_us


def test_a_lost_signal_is_shown_with_the_wait_that_misses_it() -> None:
    program = made(
        Signal(id="low", stream="send", words=(word(on=1),), value=Epoch(1, 1)),
        Signal(id="high", stream="other", words=(word(on=1),), value=Epoch(1, 2)),
        wait(value=Epoch(1, 2)),
    )
    verdict = verify(program, calls=1, alone=True)
    timeline = counterexample(program, calls=1, alone=True)
    assert verdict.errors[0].kind == "lost_signal"
    assert {mark.operation for mark in timeline.marks} == {"low", "wait0"}
    assert {mark.key for mark in timeline.marks} <= timeline.by_key.keys()
    (missed,) = [mark for mark in timeline.marks if mark.operation == "wait0"]
    assert missed.ongoing
    assert timeline.by_key[missed.key].end_us == timeline.end_us


def test_all_of_a_cycle_is_marked_begun_or_not() -> None:
    """Every rank's put follows its wait, which is for the other's put."""
    program = made(wait(words=(word(),)), put(signal=word(on=1), after=("wait0",)))
    verdict, timeline = verify(program), counterexample(program)
    assert verdict.errors[0].kind == "deadlock"
    assert len(timeline.marks) == len(verdict.errors[0].places) == 4
    begun = {mark.operation: mark.key in timeline.by_key for mark in timeline.marks}
    assert begun == {"wait0": True, "put0": False}
    assert {mark.role for mark in timeline.marks if mark.rank == 0} == {
        "waits for 'epoch'[0] of rank 0",
        "waits",
    }


def test_a_queue_that_is_stuck_is_shown_as_it_is_stuck() -> None:
    """What the queue keeps from beginning is no span, though it would be with more queues."""
    program = made(wait(), Signal(id="signal0", stream="send", words=(word(on=1),)))
    finding = found(program, "hardware_queue", calls=1, hardware_queues=1)
    timeline = counterexample(program, calls=1, hardware_queues=1)
    assert {place.operation for place in finding.places} == {"wait0", "signal0"}
    assert {span.operation for span in timeline.spans} == {"wait0"}
    assert {mark.operation for mark in timeline.marks} == {"wait0", "signal0"}


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
