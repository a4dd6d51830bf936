"""What schedules owe each other on one workspace, and that breaches of it do harm."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hand_made import VARIANTS, build, found, kinds

from stretto.runtime.bench.harm import Judge, Scenario, Stalled
from stretto.runtime.bench.harm_partners import Broadcast, Neighbour, Relay, Staged
from stretto.schedules.language import (
    SELF,
    Body,
    Epoch,
    Operation,
    Program,
    ProgramError,
    Signal,
    SpanKey,
    Wait,
)
from stretto.schedules.verifier import verify
from stretto.sim.interpreter import Delayed


def changed(program: Program, id: str, **fields: object) -> Program:
    """Return the Program with one operation of its only body changed."""
    (phase,) = program.phases
    bodies = tuple(
        Body(
            tuple(replace(one, **fields) if one.id == id else one for one in body.operations)  # type: ignore[arg-type]
        )
        for body in phase.bodies
    )
    return replace(program, phases=(replace(phase, bodies=bodies),))


def operation(program: Program, id: str) -> Operation:
    return program.phases[0].bodies[0][id]


def without_own_word(program: Program) -> Program:
    """Return the Program as it was written before its credits were for the own word too."""
    for body in program.phases[0].bodies:
        for one in body.operations:
            if isinstance(one, Wait) and one.tags.note == "credit" and len(one.words) > 1:
                words = tuple(word for word in one.words if word.index != SELF)
                program = changed(program, one.id, words=words)
    return program


@pytest.mark.parametrize("variant", ["ring", "direct", "eager"])
def test_a_missing_credit(variant: str) -> None:
    broken = build(variant, 3).without("credit0")
    finding = found(broken, "no_credit")
    assert re.match(
        r"Rank \d's put0 of call 0 may write rows \d to \d of slot 0 of 'gathered' on rank \d "
        r"before rank \d has given it back: another schedule may have used it just before\.",
        finding.message,
    )
    assert finding.missing is not None
    assert "'slot.released'" in finding.missing
    # Called back to back by itself it is safe: ranks that exchange everything wait for each other.
    assert verify(broken, alone=True).safe
    neighbour = build(Neighbour, 3)
    assert kinds(verify([neighbour, neighbour, broken], alone=True)) >= {"reuse"}
    slow = Delayed(ranks=[1], kinds=["gemm"], calls=[0])
    judge = Judge(build(variant, 3))
    turns = (neighbour, neighbour, broken, neighbour)
    assert judge.run(Scenario("slow to read", turns, slow)) == "wrong numbers"


def test_a_credit_may_be_anothers() -> None:
    """At TP 4 the last push of the direct variant follows its receiver's neighbour's credit."""
    assert verify(build("direct", 4).without("credit2")).safe
    assert not verify(build("eager", 4).without("credit2")).safe


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_release_that_comes_too_early(variant: str) -> None:
    program = build(variant, 3)
    early = changed(program, "release0", after=(), stream="elsewhere")
    assert "early_release" in kinds(verify(early))
    before = replace(operation(program, "release0"), value=Epoch(1, 3))
    high = changed(program, "release0", value=before.value)
    assert "releases its slot to epoch 3, not 1" in found(high, "early_release").message


def test_a_release_that_not_all_ranks_hear() -> None:
    program = build("ring", 3)
    release = operation(program, "release0")
    assert isinstance(release, Signal)
    fewer = changed(program, "release0", words=release.words[1:])
    finding = found(fewer, "early_release")
    assert re.match(r"Rank \d does not give its slot back to rank \d", finding.message)


def test_a_release_out_of_turn() -> None:
    finding = found(without_own_word(build("ring", 3)), "no_turn")
    assert "may release its slot before this rank's last release" in finding.message


def test_the_own_word_comes_last() -> None:
    program = build("ring", 3)
    release = operation(program, "release0")
    assert isinstance(release, Signal)
    turned = changed(program, "release0", words=(release.words[-1], *release.words[:-1]))
    assert (
        "own word of 'slot.released' before that of another rank"
        in found(turned, "no_turn").message
    )


def test_having_received_a_put_is_no_turn() -> None:
    """A put says that its sender's word was set; the own word may still be under way.

    The release of call 0 stops before its last word, that of call 2 overtakes it, and the
    all-gather of call 4 waits for an epoch that has been set back.
    """
    ring, unfused = without_own_word(build("ring", 3)), build("unfused", 3)
    turns = (ring, ring, ring, ring, unfused, unfused)
    finding = found([ring, ring, unfused], "lost_signal", alone=True, fresh_streams=True)
    assert re.search(r"may set 'slot\.released'\[\d\] of rank \d, slot \d back to", finding.message)
    judge = Judge(build("ring", 3))

    def stalled(programs: tuple[Program, ...]) -> str | None:
        scheduler = Stalled(SpanKey(0, 0, "release0"), 3, SpanKey(2, 0, "release0"))
        return judge.run(Scenario("stalled", programs, scheduler, fresh_streams=True))

    assert stalled(turns) == "no progress"
    right = build("ring", 3)
    assert stalled((right, right, right, right, unfused, unfused)) is None
    assert verify([right, right, unfused], alone=True, fresh_streams=True).safe


def test_a_flag_without_the_slots_of_its_buffer() -> None:
    program = build("ring", 3)
    flags = tuple(
        replace(flag, slots=1) if flag.name == "gathered.arrived" else flag
        for flag in program.flags
    )
    with pytest.raises(ProgramError, match="has 1 slots, the workspace has 2"):
        replace(program, flags=flags)


def test_partners_of_the_judge_keep_the_contract_and_get_right_numbers() -> None:
    judge = Judge(build("ring", 3))
    for cls in (Neighbour, Relay, Staged, Broadcast):
        program = build(cls, 3)
        assert verify(program).safe
        assert judge.run(Scenario("alone", (program,) * 3, Delayed())) is None
