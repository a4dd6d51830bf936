"""The verifier against the explorer, which goes through every interleaving of tiny Programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hand_made import VARIANTS, build
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tiny_programs import programs

from stretto.schedules.language import Body, Epoch, Fill, Program, ProgramError, View, Wait
from stretto.schedules.published_ring import PublishedRing, PublishedRingThenAllReduce
from stretto.schedules.verifier import verify
from stretto.schedules.verifier.explorer import explore
from stretto.schedules.verifier.mutants import mutants

SAME = {"reuse": "race", "lost_signal": "deadlock"}
"""Kinds that the explorer does not tell apart."""


def problems(order: list[Program], *, limit: int = 20_000) -> tuple[set[str], set[str]] | None:
    """Return what the verifier and the explorer find, None if the latter gives up."""
    exploration = explore(order, limit=limit)
    if not exploration.complete:
        return None
    verdict = verify(order, calls=1, alone=True)
    mine = {SAME.get(finding.kind, finding.kind) for finding in verdict.errors}
    return mine - {"wrong_result"}, set(exploration.problems)


def comparable(mine: set[str], theirs: set[str]) -> tuple[set[str], set[str]]:
    """Leave out what both need not see in the same light."""
    if "collective_mismatch" in mine:  # looked at first, and alone
        return {"unsafe"} if mine else set(), {"unsafe"} if theirs else set()
    if "ambiguous_mailbox" in mine | theirs:  # what follows from it depends on who comes first
        return {"unsafe"} if mine else set(), {"unsafe"} if theirs else set()
    blurred = set()
    if "race" in mine | theirs:
        blurred.add("unwritten")  # whether something was written by then is open
    if "deadlock" in mine | theirs:
        blurred.add("unawaited")
    return mine - blurred, theirs - blurred


seen: Counter[str] = Counter()


@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_verifier_and_explorer_agree_on_every_tiny_program(data: st.DataObject) -> None:
    try:
        program = data.draw(programs())
    except ProgramError:
        seen["refused"] += 1
        return
    calls = data.draw(st.integers(1, 3))
    found = problems([program] * calls)
    if found is None:
        seen["too large"] += 1
        return
    mine, theirs = comparable(*found)
    assert mine == theirs, verify([program] * calls, calls=1, alone=True).errors
    seen.update(theirs or {"safe"})


def test_tiny_programs_were_of_all_kinds() -> None:
    """The test before this one says little unless both answers came up often."""
    if not seen:
        pytest.skip("runs after the agreement, in the same process")
    assert seen["safe"] > 40
    for kind in ("race", "deadlock", "unwritten", "ambiguous_counter"):
        assert seen[kind] > 5, (kind, seen)
    assert seen["too large"] + seen["refused"] < seen.total() / 4


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_two_tiny_programs_in_turn(data: st.DataObject) -> None:
    one = data.draw(programs(most=3))
    other = data.draw(programs(most=3))
    if one.world_size != other.world_size:
        return
    other = replace(other, name="other", buffers=one.buffers, flags=one.flags)
    found = problems([one, other, one])
    if found is not None:
        mine, theirs = comparable(*found)
        assert mine == theirs, verify([one, other, one], calls=1, alone=True).errors


@pytest.mark.parametrize("variant", VARIANTS)
def test_they_agree_on_every_mutant_of_the_shipped_schedules(variant: str) -> None:
    program = build(variant, 2, 4)
    outcomes: Counter[bool] = Counter()
    for mutant in mutants(program):
        if mutant.program is None:
            continue
        found = problems([mutant.program] * 3)
        assert found is not None
        mine, theirs = comparable(*found)
        assert mine == theirs, (mutant.family, mutant.what)
        outcomes[bool(theirs)] += 1
    assert outcomes[True] >= 5
    assert outcomes[False] >= 3


@pytest.mark.parametrize("variant", ["ring", "eager", "unfused"])
def test_three_ranks(variant: str) -> None:
    program = build(variant, 3, 3)
    for one in (program, program.without("release0"), program.without("wait0")):
        found = problems([one], limit=200_000)
        assert found is not None
        mine, theirs = comparable(*found)
        assert mine == theirs
    assert problems([program], limit=200_000) == (set(), set())


def test_the_published_ring() -> None:
    alone, apart = (build(cls, 2, 2) for cls in (PublishedRing, PublishedRingThenAllReduce))
    assert explore([alone]).problems == frozenset()
    assert explore([alone] * 2).problems == {"race"}
    assert explore([apart] * 3).problems == frozenset()


def test_the_explorer_says_when_it_gives_up() -> None:
    exploration = explore([build("eager", 3, 3)] * 3, limit=100)
    assert not exploration.complete
    assert exploration.states >= 100


@seed(4)  # harm is rare: with these examples there is some, as the next test makes sure
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_what_is_safe_in_turn_with_others_is(data: st.DataObject) -> None:
    """Calls of another schedule, which has nothing to do with it, make no difference."""
    try:
        program = data.draw(programs(most=3))
    except ProgramError:
        return
    early = [
        replace(one, value=Epoch(1, one.value.offset - data.draw(st.integers(0, 2))))
        if isinstance(one, Wait) and one.words[0].flag == "e"
        else one
        for one in program.phases[0].bodies[0].operations
    ]
    bodies = (Body(tuple(early)), *program.phases[0].bodies[1:])
    program = replace(program, phases=(replace(program.phases[0], bodies=bodies),))
    if not verify(program, alone=True).safe:
        return
    fill = Fill(id="fill", stream="compute", destination=View("s"))
    phase = replace(program.phases[0], bodies=(Body((fill,)),), body_of=())
    silent = replace(program, name="silent", phases=(phase,))
    # Not at once, so that no wait passes by what a flag holds at first.
    found = [
        problems([*[silent] * 3, program, *[silent] * between, program], limit=5_000)
        for between in range(3)
    ]
    if any(one is None for one in found):
        return
    harmed = any(theirs for _, theirs in filter(None, found))
    turns[verify(program).safe, harmed] += 1
    assert verify(program).safe is not harmed, verify(program).errors


turns: Counter[tuple[bool, bool]] = Counter()


def test_programs_were_harmed_by_others_and_were_not() -> None:
    if not turns:
        pytest.skip("runs after the test before it, in the same process")
    assert turns[True, False] > 10
    assert turns[False, True] > 0
