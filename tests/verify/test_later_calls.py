"""What the first calls, back to back, do not show: later ones, and those with others in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hand_made import (
    BUFFERS,
    FLAGS,
    VARIANTS,
    build,
    copy,
    found,
    kinds,
    made,
    put,
    rows,
    wait,
    word,
)

from stretto.schedules.language import (
    RELEASED,
    Body,
    Buffer,
    Copy,
    Epoch,
    Extent,
    Fill,
    Flag,
    FlagRef,
    Gemm,
    Operation,
    Program,
    Signal,
    View,
    Wait,
)
from stretto.schedules.published_ring import PublishedRing, PublishedRingThenAllReduce
from stretto.schedules.verifier import verify
from stretto.schedules.verifier.explorer import explore

SILENT = made(Fill(id="fill0", stream="compute", destination=rows("s")))
"""Calls of this one have nothing to do with those of any other."""


# ---- words ---------------------------------------------------------------------------------------


def test_values_that_grow_unevenly() -> None:
    """The first calls look safe: it takes some until a wait passes by an old signal."""
    sent, seen = put(value=Epoch(2, 1)), wait(value=Epoch(1, 1))
    back = Signal(id="back", stream="compute", words=(word(index=1, on=1),), after=("copy0",))
    credit = wait("credit", stream="send", words=(word(index=1),), value=Epoch(1, 0))
    uneven = made(credit, sent, seen, copy(after=("wait0",)), back)
    assert kinds(verify(uneven, alone=True)) & {"race", "reuse"}
    even = made(credit, put(), seen, copy(after=("wait0",)), back)
    assert verify(even, alone=True).safe
    assert not verify(even, alone=True).advice


def test_an_initial_value_that_lets_the_first_calls_pass() -> None:
    """A wait of 1000 calls' credit looks right for the first calls, and hangs in the 1001st."""
    flags = (Flag("epoch", count=2, initial=1000), *FLAGS[1:])
    nobody = made(wait(), flags=flags)
    assert "deadlock" in kinds(verify(nobody))
    late = found(nobody, "deadlock")
    assert all(place.call > 1000 for place in late.places)
    signalled = made(Signal(id="signal0", stream="send", words=(word(on=1),)), wait(), flags=flags)
    verdict = verify(signalled)
    assert verdict.safe
    assert [advice.kind for advice in verdict.advice] == ["uneven_values"]


# ---- memory that lives on ------------------------------------------------------------------------


def line(length: int, *, number: float = 1.0) -> Program:
    """A Program whose output is wrong as soon as a number has come through a line of buffers."""
    one = Extent(1)
    buffers = (
        Buffer("x", "input", "fp32", Extent(1, "shard"), one, initial="caller"),
        Buffer("w", "weight", "fp32", one, one, initial="caller", reuse="never"),
        Buffer("y", "output", "fp32", one, one),
        *(Buffer(f"d{i}", "workspace", "fp32", one, one, initial="zero") for i in range(length)),
    )
    operations: list[Operation] = [
        Gemm(
            id="gemm",
            stream="compute",
            a=View("x"),
            b=View("w"),
            out=View("y"),
            accumulate=View("d0"),
        )
    ]
    operations += [
        Copy(id=f"copy{i}", stream="compute", source=View(f"d{i + 1}"), destination=View(f"d{i}"))
        for i in range(length - 1)
    ]
    last = View(f"d{length - 1}")
    operations.append(Fill(id="fill", stream="compute", destination=last, number=number))
    return replace(made(*operations, tp=1, buffers=buffers, flags=()), computes="all_gather_gemm")


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
def test_a_wrong_number_that_takes_many_calls(length: int) -> None:
    finding = found(line(length), "wrong_result")
    assert f"After call {length} of made" in finding.message
    assert "wrong_result" in kinds(verify(line(length).repeated(80)))
    harmless = verify(line(length, number=0.0))
    assert harmless.safe
    assert harmless.findings == ()
    assert harmless.calls == 2


def test_memory_that_does_not_settle() -> None:
    """The line is longer than what is looked at: the verdict says so."""
    verdict = verify(line(40))
    assert verdict.safe
    (advice,) = verdict.advice
    assert advice.kind == "uneven_values"
    assert "calls 0 to 8 were examined" in advice.message
    assert verify(line(40), calls=9).findings == ()


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_shipped_reads_the_same_in_all_calls(variant: str) -> None:
    for tp in (1, 2, 3):
        program = build(variant, tp)
        for one in (program, program.repeated(3), program.repeated(80)):
            assert "uneven_values" not in {advice.kind for advice in verify(one).advice}


# ---- calls of others in between ------------------------------------------------------------------


def test_a_wait_for_an_earlier_call() -> None:
    """It is safe back to back; if the call before was another schedule's, nobody has signalled."""
    seen = Wait(id="seen", stream="compute", words=(word(),), value=Epoch(1, 0))
    told = Signal(id="told", stream="compute", words=(word(),), value=Epoch(1, 1))
    program = made(seen, told)
    assert verify(program, alone=True).safe
    finding = found(program, "deadlock")
    assert finding.message.startswith("If the calls before were those of other schedules: ")
    assert kinds(verify([program, SILENT], alone=True)) == {"deadlock"}
    assert "deadlock" in explore([program, SILENT, program]).problems
    # In one execution no other schedule is called.
    (phase,) = program.phases
    told_first = replace(phase, name="first", bodies=(Body((told,)),))
    assert verify(replace(program, phases=(told_first, phase))).safe


def test_an_epoch_set_back_with_others_in_between() -> None:
    """Back to back the lower value is high enough for the next wait; after a gap it is not."""
    early = Wait(id="early", stream="compute", words=(word(),), value=Epoch(1, 0))
    answer = Signal(id="answer", stream="compute", words=(word(on=1),))
    asked = Wait(id="asked", stream="compute", words=(word(),))
    first = Signal(id="first", stream="side", words=(word(on=1),))
    second = replace(first, id="second", stream="compute")
    program = made(early, answer, others=(first, asked, second))
    assert verify(program, alone=True).safe
    finding = found(program, "lost_signal")
    assert {place.operation for place in finding.places} >= {"early", "second"}
    assert "deadlock" in explore([*[SILENT] * 3, program, SILENT, program]).problems
    assert explore([*[SILENT] * 3, program, program]).problems == frozenset()


def handing(slots: int) -> Program:
    """One rank's streams hand each other a buffer; releases of another one keep it from reuse."""
    shared = replace(BUFFERS[3], slots=2, reuse="release")
    own = replace(shared, name="a", slots=slots, reuse="never")
    flags = (Flag(RELEASED, slots=2, purpose="release"), Flag("told"))
    back = (FlagRef(RELEASED),)
    return made(
        Wait(id="credit", stream="side", words=back, value=Epoch(1, -1)),
        Fill(id="fill", stream="side", destination=View("a")),
        Signal(id="tell", stream="side", words=(word("told"),)),
        Wait(id="seen", stream="other", words=(word("told"),)),
        copy(stream="other", source=View("a"), destination=rows("s")),
        Signal(id="release", stream="other", words=back),
        tp=1,
        buffers=(*BUFFERS[:3], shared, BUFFERS[4], own),
        flags=flags,
    )


def test_memory_of_ones_own_is_ordered_without_the_calls_of_others() -> None:
    """The release that it waits for says that its own use is over only if it is of that slot."""
    assert verify(handing(2)).safe
    odd = handing(3)
    assert verify(odd, alone=True).safe
    finding = found(odd, "reuse")
    assert {place.operation for place in finding.places} == {"fill", "copy0"}
    others = giving_back(odd)
    assert verify(others).safe
    assert kinds(verify([odd, others, others, odd], alone=True, calls=1)) == {"reuse"}
    even = handing(2)
    assert verify([even, *[giving_back(even)] * 3], alone=True).safe


def giving_back(program: Program) -> Program:
    """Return another schedule that does nothing but give back what `handing` shares."""
    (phase,) = program.phases
    credit, release = (phase.bodies[0][id] for id in ("credit", "release"))
    body = Body((replace(credit, stream="elsewhere"), replace(release, stream="elsewhere")))
    return replace(program, variant="other", phases=(replace(phase, bodies=(body,)),))


def test_what_others_must_not_use_is_named() -> None:
    assert verify(build(PublishedRing, 2), calls=1).unshared == ("gathered", "channel")
    assert verify(build(PublishedRingThenAllReduce, 2)).unshared == ("gathered", "channel")
    assert verify(build(PublishedRingThenAllReduce, 2), alone=True).unshared == ()
    assert verify(SILENT).unshared == ("g", "epoch", "counter", "mailbox")
