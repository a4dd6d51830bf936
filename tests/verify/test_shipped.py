"""No alarm on what is shipped: any size, any number of ranks, alone and in turn with others."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest
from hand_made import CAPABILITIES, VARIANTS, build

from stretto.runtime.bench.harm_partners import Broadcast, Neighbour, Relay, Staged
from stretto.schedules.language import (
    ALL_COLLECTIVES,
    Capabilities,
    Flag,
    InvalidInput,
    Program,
    from_json,
    to_json,
)
from stretto.schedules.verifier import Verdict, verify


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_safe_at_any_size(variant: str, tp: int) -> None:
    for m in (1, 2, 9, 4 * tp, 4 * tp + 1):
        verdict = verify(build(variant, tp, m), sms=132, hardware_queues=1)
        assert verdict.safe, verdict.errors
        assert verdict.errors == ()
        assert verdict.counterexample is None
        assert verdict.calls == (2 if (variant, tp) == ("unfused", 1) else 3)
        assert verdict.operations == verdict.calls * build(variant, tp, m).operations


@pytest.mark.parametrize("slots", [1, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_number_of_slots_is_safe(variant: str, slots: int) -> None:
    for options in ({}, {"fresh_streams": True}, {"pushed_collectives": True}):
        verdict = verify(build(variant, 3, slots=slots), **options)  # type: ignore[arg-type]
        assert verdict.safe, verdict.errors
        assert verdict.calls == slots + 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_more_calls_and_repeats_change_nothing(variant: str) -> None:
    assert verify(build(variant, 3), calls=8).safe
    stack = build(variant, 3).repeated(80)
    verdict = verify(stack)
    assert verdict.safe
    # 80 repeats of two slots are like 4, and two executions of those show all.
    assert verdict.calls == 8


def test_phases_of_one_program() -> None:
    ring, eager = build("ring", 3), build("eager", 3)
    (one,), (other,) = ring.phases, eager.phases
    assert verify(
        replace(ring, phases=(replace(one, name="a", repeats=3), replace(other, name="b")))
    ).safe


def test_collectives_alone_need_no_credit() -> None:
    library = Capabilities("library", ("collective",), ALL_COLLECTIVES)
    program = VARIANTS["unfused"](world_size=4, m=9, n=2, k=2, capabilities=library).build()
    assert not program.flags
    assert verify(program).safe


def neighbours(tp: int, m: int) -> list[Program]:
    made = [build(variant, tp, m) for variant in VARIANTS]
    others = [build(cls, tp, m + 3 * tp) for cls in (Neighbour, Relay, Staged, Broadcast)]
    return [*made, *others]


@pytest.mark.parametrize("tp", [2, 3])
def test_every_order_of_three_variants_is_safe_on_one_workspace(tp: int) -> None:
    programs = [build(variant, tp, 3 * tp) for variant in VARIANTS]
    for turns in itertools.product(programs, repeat=3):
        verdict = verify(turns, alone=True)
        assert verdict.safe, (verdict.variant, verdict.errors)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_what_keeps_the_contract_may_take_turns_in_any_order(tp: int) -> None:
    """Each is verified by itself; then sequences of them are, call by call."""
    programs = neighbours(tp, 2 * tp)
    for program in programs:
        verdict = verify(program)
        assert verdict.safe, (program.variant, verdict.errors)
    chosen = random.Random(tp)
    for fresh in (False, True):
        for _ in range(12):
            # A scratch buffer of one stream is safe only while that stream stays the same.
            able = [one for one in programs if not fresh or one.variant != Staged.variant]
            turns = chosen.choices(able, k=chosen.randint(2, 5))
            verdict = verify(turns, alone=True, fresh_streams=fresh)
            assert verdict.safe, (verdict.variant, verdict.errors)


def test_programs_that_cannot_share_a_workspace_are_refused() -> None:
    with pytest.raises(InvalidInput, match="one is for 2 ranks, the other for 3"):
        verify([build("ring", 2), build("ring", 3)])
    with pytest.raises(InvalidInput, match="one has 2 slots, the other 3"):
        verify([build("ring", 2), build("unfused", 2, slots=3)])
    ring = build("ring", 2)
    own = tuple(Flag("mine", slots=slots) for slots in (1, 2))
    one, other = (replace(ring, flags=(*ring.flags, flag)) for flag in own)
    with pytest.raises(InvalidInput, match="flag 'mine' of their own; give one of them another"):
        verify([one, other])
    with pytest.raises(InvalidInput, match="declare flag 'mine' differently"):
        verify([one, other], alone=True)
    with pytest.raises(InvalidInput, match="at least one"):
        verify([])
    with pytest.raises(InvalidInput, match="at least 1"):
        verify(ring, calls=0)


def test_a_verdict_is_json_and_back() -> None:
    for program in (build("ring", 3), build("ring", 3).without("release0")):
        verdict = verify(program)
        assert from_json(Verdict, to_json(verdict)) == verdict
        assert f'"safe":{str(verdict.safe).lower()}' in to_json(verdict)


def test_the_same_program_gives_the_same_verdict() -> None:
    for program in (build("direct", 4), build("direct", 4).without("wait1")):
        assert verify(program) == verify(program)


def test_speed() -> None:
    """Bounds with room for a busy machine; what they should be is measured by the benchmark."""
    small = VARIANTS["ring"](world_size=16, m=8192, n=6288, k=7168, capabilities=CAPABILITIES)
    program = small.build()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert verify(program, calls=3).safe
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0
    large = VARIANTS["ring"](world_size=72, m=8192, n=6288, k=7168, capabilities=CAPABILITIES)
    start = time.perf_counter()
    assert verify(large.build()).safe
    assert time.perf_counter() - start < 30.0
