"""The shipped all-gather GEMMs, interpreted under every kind of scheduler, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.schedules import SCHEDULES
from stretto.schedules.language import (
    ALL_COLLECTIVES,
    ALL_VERBS,
    Body,
    Capabilities,
    Deadlock,
    Flag,
    FlagRef,
    InvalidInput,
    Peer,
    Program,
    ProgramError,
    RankBuilder,
    Schedule,
    SpanKey,
)
from stretto.sim.interpreter import (
    HOSTILE,
    Chosen,
    Delayed,
    InOrder,
    Random,
    Result,
    Scheduler,
    interpret,
    interpret_sequence,
)

CAPABILITIES = Capabilities("test", ALL_VERBS, ALL_COLLECTIVES, signal_orders_puts=True)
VARIANTS = SCHEDULES["ag-gemm"]
PUSHED = [name for name in VARIANTS if name != "unfused"]
N, K = 2, 3


class Shift(Schedule):
    """Every rank multiplies its neighbour's rows: it hears from one rank, and writes to another.

    Unlike in an all-gather, a rank can be any number of calls ahead of the one it writes to.
    """

    name, variant = "shift", "put"

    def declare(self):
        return VARIANTS["ring"].declare(self)

    def enqueue(self, rank: RankBuilder) -> None:
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        gathered = rank.workspace("gathered", rows=self.m, columns=self.k)
        compute, send, receive = rank.streams("compute", "send", "receive")
        rank.put(x[rank], to=rank + 1, into=gathered[rank + 0], on=send)
        compute.after(rank.wait(gathered[rank - 1], on=receive))
        rank.fill(y, on=compute)
        rank.gemm(gathered[rank - 1], w, y[rank - 1], on=compute)


class Relay(Shift):
    """Rows go on from neighbour to neighbour once; only the forwarding stream knows when."""

    variant = "relay"

    def enqueue(self, rank: RankBuilder) -> None:
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        gathered = rank.workspace("gathered", rows=self.m, columns=self.k)
        compute, send, receive = rank.streams("compute", "send", "receive")
        rank.put(x[rank], to=rank + 1, into=gathered[rank + 0], on=send)
        send.after(rank.wait(gathered[rank - 1], on=receive))
        rank.put(gathered[rank - 1], to=rank + 1, into=gathered[rank - 1], on=send)
        compute.after(rank.wait(gathered[rank - 2], on=receive))
        rank.fill(y, on=compute)
        rank.gemm(gathered[rank - 2], w, y[rank - 2], on=compute)


class ShiftOnOneStream(Shift):
    """The same as Shift, all on the caller's stream, the release too."""

    variant = "one-stream"

    def enqueue(self, rank: RankBuilder) -> None:
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        gathered = rank.workspace("gathered", rows=self.m, columns=self.k)
        (compute,) = rank.streams("compute")
        rank.put(x[rank], to=rank + 1, into=gathered[rank + 0], on=compute)
        rank.wait(gathered[rank - 1], on=compute)
        rank.fill(y, on=compute)
        rank.gemm(gathered[rank - 1], w, y[rank - 1], on=compute)


class Backward(VARIANTS["ring"]):
    """A ring to the other side, so that the first word of a release is what its writer needs."""

    variant, stream = "backward", "send"

    def enqueue(self, rank: RankBuilder) -> None:
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        gathered = rank.workspace("gathered", rows=self.m, columns=self.k)
        compute, send, receive = rank.streams("compute", self.stream, "receive")
        held = x[rank]
        rank.gemm(held, w, y[rank], on=compute)
        for step in rank.steps():
            source = rank + step
            rank.put(held, to=rank - 1, into=gathered[source - 1], on=send)
            arrival = rank.wait(gathered[source], on=receive)
            send.after(arrival)
            compute.after(arrival)
            rank.gemm(gathered[source], w, y[source], on=compute)
            held = gathered[source]


class BackwardElsewhere(Backward):
    """The same on a stream of another name."""

    stream = "elsewhere"


def build(cls: type[Schedule], tp: int, m: int, *, slots: int = 2) -> Program:
    if slots != cls.slots:
        cls = type(cls.__name__, (cls,), {"slots": slots})
    return cls(world_size=tp, m=m, n=N, k=K, capabilities=CAPABILITIES).build()


def without_credits(program: Program) -> Program:
    (phase,) = program.phases
    found = [
        operation.id
        for body in phase.bodies
        for operation in body.operations
        if operation.tags.note == "credit"
    ]
    assert found
    return program.without(*found)


class Case:
    """Inputs of whole numbers for some executions of all-gather GEMMs, and what they give."""

    def __init__(self, programs: list[Program], seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.programs = programs
        self.tp = programs[0].world_size
        self.weights = random.integers(-4, 5, (self.tp, N, K)).astype(float)
        self.x = [
            random.integers(-4, 5, (program.sizes["m"], K)).astype(float) for program in programs
        ]

    def blocks(self, execution: int) -> list[np.ndarray]:
        x = self.x[execution]
        block = -(-len(x) // self.tp)
        return [x[rank * block : (rank + 1) * block] for rank in range(self.tp)]

    def inputs(self, execution: int) -> dict[str, list[np.ndarray]]:
        return {"x": self.blocks(execution), "w": list(self.weights)}

    def expected(self, execution: int, rank: int) -> np.ndarray:
        x = self.x[execution]
        if self.programs[execution].name != "shift":
            return x @ self.weights[rank].T
        whole = np.zeros((len(x), N))
        hops = 2 if self.programs[execution].variant == "relay" else 1
        block, source = -(-len(x) // self.tp), (rank - hops) % self.tp
        rows = slice(source * block, (source + 1) * block)
        whole[rows] = x[rows] @ self.weights[rank].T
        return whole

    def run(self, scheduler: Scheduler, **options) -> Result:
        return interpret_sequence(self.programs, self.inputs, scheduler=scheduler, **options)

    def wrong(self, scheduler: Scheduler, **options) -> list[tuple[int, int]]:
        """Return which executions gave which ranks other numbers than they should have."""
        result = self.run(scheduler, **options)
        return [
            (execution, rank)
            for execution, outputs in enumerate(result.by_call)
            for rank in range(self.tp)
            if not np.array_equal(outputs["y"][rank], self.expected(execution, rank))
        ]


def adversaries(tp: int) -> list[Scheduler]:
    slow = tp // 2
    worst: list[Scheduler] = [
        InOrder(HOSTILE),
        Delayed(ranks=[slow], kinds=["gemm", "collective"], among=Random(0)),
        Delayed(ranks=[tp - 1], streams=["send"], among=Random(1)),
    ]
    if tp > 8:
        return [*worst, Random(2)]
    return [
        *worst,
        InOrder(),
        Delayed(ranks=[slow]),
        Delayed(kinds=["put"], among=InOrder(HOSTILE)),
        *(Random(seed) for seed in range(8 if tp <= 4 else 2)),
    ]


@pytest.mark.parametrize("m", [1, 2, 9, 17, 33])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ag_gemm_is_exact_under_every_scheduler(variant: str, tp: int, m: int) -> None:
    case = Case([build(VARIANTS[variant], tp, m)] * 3)
    for scheduler in adversaries(tp):
        assert case.wrong(scheduler) == []


@settings(max_examples=60, derandomize=True)
@given(
    variant=st.sampled_from(sorted(VARIANTS)),
    tp=st.integers(1, 6),
    m=st.integers(1, 20),
    slots=st.integers(1, 3),
    calls=st.integers(1, 5),
    first_call=st.integers(0, 2**33),
    run_ahead=st.sampled_from([None, 0, 1]),
    fresh_streams=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_ag_gemm_is_exact_for_any_size(
    variant: str,
    tp: int,
    m: int,
    slots: int,
    calls: int,
    first_call: int,
    run_ahead: int | None,
    fresh_streams: bool,
    seed: int,
) -> None:
    case = Case([build(VARIANTS[variant], tp, m, slots=slots)] * calls, seed)
    options = {"run_ahead": run_ahead, "fresh_streams": fresh_streams}
    assert case.wrong(Random(seed), first_call=first_call, **options) == []


# ---- credits -------------------------------------------------------------------------------------


def racing(tp: int) -> list[Scheduler]:
    return [
        Delayed(ranks=[1], kinds=["gemm"]),
        Delayed(ranks=[1], kinds=["gemm"], among=Random(5)),
        *(Random(seed) for seed in range(20)),
    ]


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_slot_needs_its_credit_at_the_second_call(variant: str, tp: int) -> None:
    # Poison off: what is wrong is wrong by the race alone. The library's all-gather synchronises
    # by itself; one that is built from puts needs the credit.
    options = {"poison_released": False, "pushed_collectives": True}
    with_credit = build(VARIANTS[variant], tp, 2 * tp, slots=1)
    delayed = Delayed(ranks=[1], kinds=["gemm", "collective"])
    for scheduler in (delayed, *racing(tp)):
        assert Case([with_credit] * 3).wrong(scheduler, **options) == []
    unsafe = without_credits(with_credit)
    assert Case([unsafe]).wrong(delayed, **options) == []
    broken = [Case([unsafe] * 2).wrong(scheduler, **options) for scheduler in racing(tp)]
    assert (0, 1) in broken[0] or variant == "unfused"
    assert any(broken)


def test_library_collectives_need_no_credit() -> None:
    unsafe = without_credits(build(VARIANTS["unfused"], 3, 6, slots=1))
    for scheduler in (Delayed(ranks=[1], kinds=["gemm"]), *racing(3)):
        assert Case([unsafe] * 4).wrong(scheduler, poison_released=False) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_slots_of_a_full_exchange_protect_each_other(variant: str) -> None:
    # A rank that writes call c + 2 has had everyone's rows of call c + 1, and nobody sends those
    # before its caller's stream has done call c: without the credit nothing goes wrong either.
    for tp in (2, 3, 4):
        unsafe = without_credits(build(VARIANTS[variant], tp, 2 * tp))
        for scheduler in racing(tp):
            assert Case([unsafe] * 5).wrong(scheduler, poison_released=False) == []


def test_two_slots_without_credit_race_at_the_third_call() -> None:
    delayed = Delayed(ranks=[1], kinds=["gemm"])
    safe = build(Shift, 4, 8)
    for scheduler in (delayed, *racing(4)):
        assert Case([safe] * 6).wrong(scheduler) == []
    unsafe = without_credits(safe)
    assert Case([unsafe] * 2).wrong(delayed, poison_released=False) == []
    # The third call wrote into the slot that rank 1 was still reading in the first.
    assert (0, 1) in Case([unsafe] * 3).wrong(delayed, poison_released=False)
    assert (0, 1) in Case([unsafe] * 3).wrong(delayed)


def test_a_released_slot_is_poisoned() -> None:
    (phase,) = build(Shift, 2, 4).phases
    hasty = Body(
        tuple(
            replace(operation, after=()) if operation.id == "release0" else operation
            for operation in phase.bodies[0].operations
        )
    )
    case = Case([replace(build(Shift, 2, 4), phases=(replace(phase, bodies=(hasty,)),))])
    late = Delayed(kinds=["gemm"])
    assert case.wrong(late, poison_released=False) == []  # nobody writes there in one call
    assert case.wrong(late) == [(0, 0), (0, 1)]


# ---- several Programs on one workspace -----------------------------------------------------------


def mixture(tp: int, choose: Callable[[int], int]) -> list[Program]:
    kinds = [
        build(VARIANTS["ring"], tp, 9),
        build(VARIANTS["direct"], tp, 2),
        build(VARIANTS["unfused"], tp, 17),
        build(Shift, tp, 3 * tp),
        build(VARIANTS["eager"], tp, 12),
        build(Relay, tp, 2 * tp),
        build(ShiftOnOneStream, tp, 4 * tp),
        build(Backward, tp, 2 * tp),
        build(BackwardElsewhere, tp, tp),
    ]
    return [kinds[choose(turn) % len(kinds)] for turn in range(11)]


@pytest.mark.parametrize("tp", [2, 3, 8])
def test_schedules_and_shapes_take_turns_on_one_workspace(tp: int) -> None:
    random = np.random.default_rng(tp)
    for seed in range(4):
        order = random.integers(0, 9, 11)
        case = Case(mixture(tp, lambda turn, order=order: int(order[turn])), seed)
        for scheduler in (Random(seed), Delayed(ranks=[tp - 1], among=Random(seed))):
            for fresh in (False, True):
                options = {"pushed_collectives": True, "fresh_streams": fresh}
                assert case.wrong(scheduler, **options) == []


def test_turns_without_credit_race() -> None:
    programs = mixture(3, lambda turn: 3 + (turn % 2) * 2)  # shift, ring, shift, ring, ...
    delayed = Delayed(ranks=[1], kinds=["gemm"])
    assert Case(programs).wrong(delayed) == []
    shift = build(Shift, 3, 9)
    ring = build(VARIANTS["ring"], 3, 9)
    turns = [shift, shift, ring]  # the ring writes where rank 1 still reads the first shift's rows
    assert Case(turns).wrong(delayed, poison_released=False) == []
    unsafe = without_credits(ring)
    assert (0, 1) in Case([shift, shift, unsafe]).wrong(delayed, poison_released=False)


def test_every_slot_is_released_for_itself() -> None:
    # Rank 1 forwards late in call 0; call 1 releases on a stream that knows nothing of it.
    late = Delayed(ranks=[1], operations=["put1"], calls=[0])
    relay, shift = build(Relay, 4, 8), build(ShiftOnOneStream, 4, 8)
    assert Case([relay, shift, shift]).wrong(late, poison_released=False) == []
    # With one word for both slots, the release of call 1 would pass for that of call 0.
    with pytest.raises(ProgramError, match="has 2 slots, the workspace has 1"):
        released_by_one_word(relay)


def released_by_one_word(program: Program) -> Program:
    flags = [
        replace(flag, slots=1) if flag.name == "slot.released" else flag for flag in program.flags
    ]
    return replace(program, flags=tuple(flags))


def test_a_release_that_has_reached_some_ranks_is_not_overtaken() -> None:
    # Call 2 releases the slot of call 0 on another stream. Were its words set while those of call
    # 0 were still under way, they would be set back, and whoever waits for them would hang.
    here, elsewhere = build(Backward, 3, 6), build(BackwardElsewhere, 3, 6)
    direct = build(VARIANTS["direct"], 3, 6)

    def turns(one: Program, other: Program) -> Case:
        return Case([one, other, other, one, direct, direct])

    half_way = [Delayed(ranks=[rank], operations=["release0"], calls=[0]) for rank in range(3)]
    for scheduler in half_way:
        assert turns(here, elsewhere).wrong(scheduler) == []
    hasty = [without_own_credit(program) for program in (here, elsewhere)]
    for scheduler in half_way:
        with pytest.raises(Deadlock, match=r"credit0 of call 4 waits .*: expected 3, seen 1"):
            turns(*hasty).run(scheduler)


def without_own_credit(program: Program) -> Program:
    (phase,) = program.phases
    own = FlagRef("slot.released", Peer(0))
    operations = tuple(
        replace(operation, words=tuple(word for word in operation.words if word != own))
        if operation.tags.note == "credit"
        else operation
        for operation in phase.bodies[0].operations
    )
    return replace(program, phases=(replace(phase, bodies=(Body(operations),)),))


def test_programs_that_cannot_share_a_workspace_are_refused() -> None:
    two, three = build(Shift, 2, 4), build(Shift, 3, 6)
    with pytest.raises(InvalidInput, match="one is for 2 ranks, the other for 3"):
        interpret_sequence([two, three], {})
    with pytest.raises(InvalidInput, match="one has 2 slots, the other 3"):
        interpret_sequence([two, build(Shift, 2, 4, slots=3)], {})
    unfused = SCHEDULES["ag-gemm"]["unfused"]
    library = Capabilities("library", ("collective",), ("all_gather",))
    silent = unfused(world_size=2, m=4, n=2, k=3, dtype="fp32", capabilities=library).build()
    with pytest.raises(InvalidInput, match=r"shift .* gives its slot back .* and ag-gemm unfused"):
        interpret_sequence([two, silent], {})
    other = Flag("gathered.arrived", count=2)
    flags = tuple(other if flag.name == other.name else flag for flag in two.flags)
    own = replace(two.without(*(one.id for one in two.phases[0].bodies[0].operations)), flags=flags)
    with pytest.raises(InvalidInput, match=r"declare flag 'gathered\.arrived' differently"):
        interpret_sequence([two, own], {})
    with pytest.raises(InvalidInput, match="at least one"):
        interpret_sequence([], {})


# ---- deadlocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", PUSHED)
def test_a_missing_release_is_a_deadlock_with_names_and_epochs(variant: str) -> None:
    program = build(VARIANTS[variant], 2, 4).without("turn0", "release0")
    assert Case([program] * 2).wrong(InOrder()) == []
    with pytest.raises(Deadlock) as caught:
        Case([program] * 3).run(Random(1))
    text = str(caught.value)
    assert "4 streams are stuck" in text
    for rank in (0, 1):
        assert (
            f"rank {rank}, stream send, operation credit0 of call 2 waits for epoch "
            f"slot.released[{1 - rank}] of rank {rank} (slot 0): expected 1, seen 0" in text
        )
        assert (
            f"rank {rank}, stream compute, operation wait0 of call 2 waits for epoch "
            f"gathered.arrived[{1 - rank}] of rank {rank} (slot 0): expected 3, seen 1" in text
        )


def test_a_missing_put_holds_the_ranks_that_wait_for_it() -> None:
    program = build(VARIANTS["ring"], 3, 6).without("put1")
    with pytest.raises(Deadlock, match=r"operation wait1 of call 0 .*expected 1, seen 0"):
        Case([program]).run(InOrder())


def test_a_host_that_may_not_run_ahead_is_named() -> None:
    program = build(VARIANTS["ring"], 2, 4).without("put0", "turn0", "release0")
    with pytest.raises(Deadlock, match=r"credit0 of call 1 waits for the host, .* end of call 0"):
        Case([program] * 2).run(InOrder(), run_ahead=0)


# ---- the caller ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", PUSHED)
def test_the_caller_overwrites_inputs_at_once_and_only_exits_protect_them(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case([build(VARIANTS[variant], 3, 6)] * 2)
    late = Delayed(ranks=[1], streams=["send"])
    assert case.wrong(late) == []
    monkeypatch.setattr(Program, "exits", lambda self, body: ())
    # A rank cannot end its call before others have had its rows, unless its own last put is late.
    late = Delayed(streams=["send"], operations=["put0", "put1"], ranks=[1])
    assert case.wrong(late) != []
    assert case.wrong(late, hostile_caller=False) != case.wrong(late)


@pytest.mark.parametrize("variant", PUSHED)
def test_side_streams_begin_after_the_caller_has_written_the_input(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case([build(VARIANTS[variant], 3, 6)] * 3)
    late = Delayed(streams=["compute"])
    assert case.wrong(late) == []
    monkeypatch.setattr(Program, "entries", lambda self, body: ())
    assert case.wrong(late) != []


def test_inputs_that_do_not_fit_are_refused() -> None:
    program = build(VARIANTS["ring"], 2, 3)
    good = Case([program]).inputs(0)
    with pytest.raises(InvalidInput, match="'x' needs one array for each of 2 ranks; there are 1"):
        interpret(program, good | {"x": good["x"][:1]})
    with pytest.raises(InvalidInput, match=r"'w' needs one array .* there are none"):
        interpret(program, {"x": good["x"]})
    with pytest.raises(InvalidInput, match=r"'x' of rank 1 has shape \(3, 3\), not \(1, 3\)"):
        interpret(program, good | {"x": [good["x"][0], np.zeros((3, 3))]})
    with pytest.raises(InvalidInput, match="takes no 'z' from its caller; it takes w, x"):
        interpret(program, good | {"z": []})


# ---- what is recorded ----------------------------------------------------------------------------


def test_the_same_scheduler_decides_the_same_and_chosen_repeats_it() -> None:
    case = Case([build(VARIANTS["direct"], 4, 9)] * 3)
    scheduler = Random(11)
    first = case.run(scheduler)
    assert case.run(scheduler).trace == first.trace
    assert case.run(Random(12)).trace != first.trace
    assert case.run(Chosen(first.trace)).trace == first.trace
    # What cannot be followed is approached: the last operation asked for first ends as it can.
    asked = case.run(Chosen([first.trace[-1]])).trace
    assert set(asked) == set(first.trace)
    assert asked.index(first.trace[-1]) < len(asked) - 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_trace_keeps_streams_and_edges(variant: str) -> None:
    program = build(VARIANTS[variant], 4, 9)
    calls = 3
    body = program.phases[0].body(0)
    result = Case([program] * calls).run(Random(3))
    place = {key: position for position, key in enumerate(result.trace)}
    assert len(place) == len(result.trace) == calls * program.operations
    for call in range(calls):
        for rank in range(4):
            last: dict[str, int] = {}
            for operation in body.operations:
                here = place[SpanKey(call, rank, operation.id)]
                assert here > last.get(operation.stream, -1)
                last[operation.stream] = here
                for earlier in operation.after:
                    assert here > place[SpanKey(call, rank, earlier)]
    for (_, stream), ended in result.progress.items():
        assert ended == calls * sum(operation.stream == stream for operation in body.operations)
    assert result.steps > len(result.trace)


def test_a_host_without_run_ahead_ends_every_call_before_the_next() -> None:
    case = Case([build(VARIANTS["ring"], 3, 6)] * 4)
    in_time = case.run(Delayed(ranks=[0]), run_ahead=0)
    for rank in range(3):
        calls = [key.call for key in in_time.trace if key.rank == rank]
        assert calls == sorted(calls)
    ahead = case.run(Delayed(ranks=[0]))
    assert any(
        [key.call for key in ahead.trace if key.rank == rank]
        != sorted(key.call for key in ahead.trace if key.rank == rank)
        for rank in range(3)
    )


def test_words_start_where_earlier_calls_left_them_and_wrap() -> None:
    program = build(VARIANTS["ring"], 3, 6)
    unbroken = Case([program] * 7).run(InOrder())
    resumed = Case([program] * 2).run(InOrder(), first_call=5)
    assert resumed.words == unbroken.words
    assert {key.call for key in resumed.trace} == {5, 6}
    wrapped = Case([program] * 4)
    assert wrapped.wrong(Random(0), first_call=2**32 - 2) == []
    words = wrapped.run(Random(0), first_call=2**32 - 2).words
    assert {value for word, value in words.items() if word.flag == "slot.released"} == {1, 2}


def test_delayed_delays_what_is_named_and_nothing_else() -> None:
    case = Case([build(VARIANTS["eager"], 3, 6)] * 2)
    for named in (
        {"ranks": [2], "operations": ["gemm1"]},
        {"ranks": [0], "calls": [0], "kinds": ["put"]},
    ):
        trace = case.run(Delayed(**named)).trace
        free = case.run(InOrder()).trace
        chosen = {
            key
            for key in free
            if key.rank in named["ranks"]
            and key.call in named.get("calls", [key.call])
            and key.operation.startswith(tuple(named.get("operations", named.get("kinds", ()))))
        }
        first = next(key for key in trace if key in chosen)
        assert trace.index(first) > free.index(first)
    assert case.run(Delayed()).trace == case.run(InOrder()).trace


def test_a_scheduler_of_ones_own() -> None:
    class Latest(InOrder):
        def pick(self, steps):
            return len(steps) - 1

    case = Case([build(VARIANTS["ring"], 4, 9)] * 3)
    assert case.wrong(Latest()) == []
    seen = count()

    class Counting(InOrder):
        def ended(self, key: SpanKey) -> None:
            next(seen)

    result = case.run(Delayed(ranks=[0], among=Counting()))
    assert next(seen) == len(result.trace)
