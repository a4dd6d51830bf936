"""Recorded runs against their Programs: simulated, measured, and tampered with."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
from hand_made import VARIANTS, build

from stretto.schedules import schedule_class
from stretto.schedules.language import FlagEvent, InvalidInput, Program, Span, Timeline
from stretto.schedules.published_ring import PublishedRingThenAllReduce
from stretto.schedules.verifier import check_timeline
from stretto.sim import Machine, simulate


def simulated(variant: str, tp: int = 4, calls: int = 3) -> tuple[Timeline, Program]:
    machine = Machine.load("h200-sxm")
    transport = machine.transport(machine.default_transport(variant))
    cls = schedule_class("ag-gemm", variant)
    program = cls(world_size=tp, m=512, n=256, k=256, capabilities=transport.capabilities).build()
    program = program.repeated(calls)
    return simulate(program, machine).timeline, program


def with_span(timeline: Timeline, place: int, **fields: object) -> Timeline:
    spans = list(timeline.spans)
    spans[place] = replace(spans[place], **fields)  # type: ignore[arg-type]
    return replace(timeline, spans=tuple(spans))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_simulation_keeps_every_edge(variant: str) -> None:
    timeline, program = simulated(variant)
    assert check_timeline(timeline, program) == ()


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_operation_that_is_moved_breaks_an_edge(variant: str) -> None:
    """Only what nothing precedes can be moved forward."""
    timeline, program = simulated(variant, 2, 2)
    unnoticed = []
    for place, span in enumerate(timeline.spans):
        shift = timeline.makespan_us
        moved = with_span(
            timeline, place, start_us=span.start_us - shift, end_us=span.end_us - shift
        )
        if not check_timeline(moved, program):
            unnoticed.append(span)
    assert all(span.call == 0 for span in unnoticed)
    assert len(unnoticed) <= 2 * program.world_size
    assert {span.kind for span in unnoticed} <= {"gemm", "put", "wait"}


def span_of(timeline: Timeline, kind: str) -> int:
    return next(place for place, span in enumerate(timeline.spans) if span.kind == kind)


def test_what_is_said() -> None:
    timeline, program = simulated("ring", 2, 1)
    wait = next(place for place, span in enumerate(timeline.spans) if span.operation == "wait0")
    span = timeline.spans[wait]
    early = with_span(timeline, wait, start_us=-1.0, end_us=-0.5)
    messages = [finding.message for finding in check_timeline(early, program)]
    assert any("before any signal that releases it had begun" in text for text in messages)

    gone = replace(timeline, spans=timeline.spans[:wait] + timeline.spans[wait + 1 :])
    (finding,) = check_timeline(gone, program)
    assert finding.message == f"wait0 of rank {span.rank} in call 0 is not in the record."
    assert finding.kind == "record"

    twice = replace(timeline, spans=(*timeline.spans, span))
    assert "1 operations were recorded twice." in [
        finding.message for finding in check_timeline(twice, program)
    ]
    strange = with_span(timeline, wait, operation="else")
    assert {finding.message.split(" of ")[0] for finding in check_timeline(strange, program)} == {
        "wait0",
        "else",
    }
    other = with_span(timeline, wait, stream="elsewhere")
    (finding,) = check_timeline(other, program)
    assert "was recorded as a wait on stream elsewhere" in finding.message

    event = span.awaited[0]
    low = with_span(timeline, wait, awaited=(replace(event, value=event.value + 1),))
    assert "awaited other words or values" in check_timeline(low, program)[0].message
    seen = with_span(timeline, wait, awaited=(replace(event, seen=0),))
    (finding,) = check_timeline(seen, program)
    assert finding.message == (f"wait0 of rank {span.rank} in call 0 passed at 0, but waits for 1.")


def test_the_clock_error_is_allowed_for() -> None:
    timeline, program = simulated("ring", 2, 1)
    place = next(
        place
        for place, span in enumerate(timeline.spans)
        if span.operation == "gemm1" and span.rank == 0
    )
    span = timeline.spans[place]
    early = with_span(timeline, place, start_us=span.start_us - 0.5)
    assert check_timeline(early, program)
    assert check_timeline(replace(early, clock_error_us=0.6), program) == ()


def test_a_rank_may_not_leave_a_collective_before_all_have_come() -> None:
    timeline, program = simulated("unfused", 3, 1)
    place = span_of(timeline, "collective")
    span = timeline.spans[place]
    late = with_span(timeline, place, start_us=span.end_us + 1.0, end_us=span.end_us + 2.0)
    messages = [finding.message for finding in check_timeline(late, program)]
    assert any("with which it meets, had come at" in text for text in messages)


def test_another_programs_timeline_is_refused() -> None:
    timeline, program = simulated("ring", 2, 1)
    with pytest.raises(InvalidInput, match="world_size is 2, the Program's is 3"):
        check_timeline(timeline, simulated("ring", 3, 1)[1])
    with pytest.raises(InvalidInput, match="variant"):
        check_timeline(timeline, replace(program, variant="other"))


def test_mailboxes_in_a_record() -> None:
    """Every wait takes one signal: the second wait needs the second signal."""
    program = build(PublishedRingThenAllReduce, 2, 4)
    spans = []
    for rank in range(2):
        moment = 0.0
        for operation in program.phases[0].bodies[0].operations:
            signalled = [
                FlagEvent(sync.word.flag, 1 - rank, 0, 0, 1) for sync in operation.signals()
            ]
            awaited = [FlagEvent(sync.word.flag, rank, 0, 0, 1) for sync in operation.waits()]
            spans.append(
                Span(
                    operation=operation.id,
                    kind=operation.kind,
                    rank=rank,
                    stream=operation.stream,
                    call=0,
                    start_us=moment,
                    end_us=moment + 1.0,
                    after=operation.after,
                    signalled=tuple(signalled),
                    awaited=tuple(awaited),
                )
            )
            moment += 1.0
    timeline = Timeline(
        program.name,
        program.variant,
        2,
        program.shape,
        program.dtype,
        program.transport,
        "measured",
        "test",
        tuple(spans),
    )
    assert check_timeline(timeline, program) == ()
    place = next(
        place for place, span in enumerate(spans) if span.operation == "wait0" and span.rank == 0
    )
    early = with_span(timeline, place, start_us=-2.0, end_us=-1.0)
    assert [finding.message for finding in check_timeline(early, program)] == [
        "wait0 of rank 0 in call 0 ended at -1.000 us, before any signal that releases it had "
        "begun."
    ]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="real runs need torch")
def test_a_measured_run_keeps_every_edge() -> None:
    """Warmed up, so that the record begins in the middle of the workspace's life."""
    from stretto.runtime.session import RunOptions, run_programs
    from stretto.transports import load_transport

    capabilities = load_transport("shared_memory").offered()
    programs = [
        schedule_class("ag-gemm", variant)(
            world_size=2, m=9, n=16, k=16, dtype="fp32", capabilities=capabilities
        )
        .build()
        .repeated(3)
        for variant in VARIANTS
    ]
    results = run_programs(programs, RunOptions(iterations=3, warmup=1))
    for program, result in zip(programs, results, strict=True):
        assert check_timeline(result.timeline, program) == ()
        last = max(
            range(len(result.timeline.spans)), key=lambda at: result.timeline.spans[at].end_us
        )
        early = with_span(result.timeline, last, start_us=-1e6, end_us=-1e6 + 1)
        assert check_timeline(early, program)
