"""Synchronisation that is not needed: all of it can go together, and nothing else can."""

from __future__ import annotations

import pytest
from hand_made import VARIANTS, build, made, rows, word

from stretto.schedules.language import Copy, Epoch, Program, Put, Signal, Wait
from stretto.schedules.verifier import Redundant, verify
from stretto.schedules.verifier.redundancy import _candidates, _without


def removed(program: Program, which: tuple[Redundant, ...]) -> Program:
    for one in which:
        program = _without(program, one)
    return program


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_list_can_go_and_no_more(variant: str, alone: bool) -> None:
    program = build(variant, 3)
    found = verify(program, alone=alone, redundant=True).redundant
    assert found is not None
    smaller = removed(program, found)
    assert verify(smaller, alone=alone).safe
    for one in _candidates(smaller):
        assert not verify(_without(smaller, one), alone=alone).safe, one
    if alone and variant == "ring":
        # A full exchange with two slots needs no credit if nobody else is there.
        assert "credit0 need not be waited for" in [one.message for one in found]
    if not alone and variant != "direct":  # there, one rank's credit stands for another's
        assert all(one.what == "after" for one in found)


def test_it_is_not_looked_for_unasked_nor_in_what_is_unsafe() -> None:
    program = build("ring", 3)
    assert verify(program).redundant is None
    assert verify(program.without("wait0"), redundant=True).redundant is None


def test_each_kind_of_thing() -> None:
    sent = Put(
        id="put0",
        stream="send",
        source=rows("x", 0, 2),
        destination=rows("g", 0, 2, on=1),
        signal=word(on=1),
    )
    seen = Wait(id="wait0", stream="compute", words=(word(),))
    again = Wait(id="wait1", stream="compute", words=(word(),))
    used = Copy(
        id="copy0",
        stream="compute",
        source=rows("g", 0, 2),
        destination=rows("y", 0, 2),
        after=("wait0",),
    )
    back = Signal(id="back", stream="compute", words=(word(index=1, on=1),))
    noise = Signal(id="noise", stream="other", words=(word("counter", on=1),), value=Epoch(0, 1))
    credit = Wait(id="credit", stream="send", words=(word(index=1),), value=Epoch(1, 0))
    program = made(credit, sent, seen, again, used, back, noise)
    verdict = verify(program, alone=True, redundant=True)
    assert verdict.redundant is not None
    gone = {(one.operation, one.what, one.edge) for one in verdict.redundant}
    # One of the two waits stays; the edge says what the stream says already.
    assert ("copy0", "after", "wait0") in gone or ("wait0", "wait", None) in gone
    assert len(gone & {("wait0", "wait", None), ("wait1", "wait", None)}) == 1
    assert ("noise", "signal", None) in gone
    assert not gone & {("credit", "wait", None), ("back", "signal", None), ("put0", "signal", None)}
