"""What each operation and flag means to the interpreter, in Programs written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from by_hand import caller, numbers, program, sharded, symmetric

from stretto.schedules.language import (
    Block,
    Body,
    Buffer,
    Copy,
    Deadlock,
    Emit,
    Epoch,
    Extent,
    Fill,
    Fixed,
    Flag,
    FlagRef,
    Gate,
    GatherGemm,
    Gemm,
    GemmAllReduce,
    GemmReduceScatter,
    OperationBase,
    Peer,
    Phase,
    Program,
    Put,
    Reduce,
    RowOp,
    Signal,
    TileGroup,
    Tiling,
    View,
    Wait,
    Word,
)
from stretto.sim.interpreter import (
    HOSTILE,
    Chosen,
    Delayed,
    InOrder,
    Manner,
    Random,
    Scheduler,
    Step,
    interpret,
)


class BeginFirst(InOrder):
    """Takes the first step of one operation, then all of the others, then the rest of it."""

    def __init__(self, operation: str, manner: Manner) -> None:
        super().__init__(manner)
        self.operation, self.begun = operation, False

    def pick(self, steps: Sequence[Step]) -> int:
        names = [step.operation for step in steps]
        if self.begun or self.operation not in names:
            others = [place for place, name in enumerate(names) if name != self.operation]
            return (others or [0])[0]
        self.begun = True
        return names.index(self.operation)


SCHEDULERS: list[Scheduler] = [InOrder(), InOrder(HOSTILE), *(Random(seed) for seed in range(12))]
NEXT, LAST = Peer(1), Peer(-1)
ONCE, ONE = Epoch(), Epoch(0, 1)
TILING = Tiling(tile_m=16, tile_n=16, workers=1)


# ---- flags ---------------------------------------------------------------------------------------


def mailboxes(*, empties: bool = True) -> Program:
    """Rank r fills the mailbox of rank r + 1 with its x; one slot, no credit: the mailbox is it."""
    box, full = symmetric("box", 2), FlagRef("full", on=NEXT)
    operations: list[OperationBase] = [
        Put(
            id="put",
            stream="send",
            source=View("x"),
            destination=View("box", on=NEXT),
        ),
        Signal(id="fill", stream="send", words=(full,), value=ONE),
        Wait(id="empty", stream="compute", words=(FlagRef("full"),), value=ONE),
        Copy(id="copy", stream="compute", source=View("box"), destination=View("y")),
    ]
    if not empties:
        del operations[2]
    buffers = [caller("x", 2), caller("y", 2, role="output"), box]
    return program(2, buffers, [Flag("full", "mailbox")], operations)


def test_a_mailbox_holds_the_signal_until_it_is_empty() -> None:
    x = [numbers(2, 2, seed=seed) for seed in range(6)]

    def given(call: int):
        return {"x": [x[2 * call], x[2 * call + 1]]}

    for scheduler in SCHEDULERS:
        result = interpret(mailboxes(), given, calls=1, scheduler=scheduler)
        np.testing.assert_array_equal(result.outputs["y"], [x[1], x[0]])
        assert set(result.words.values()) == {0}
    # The second signal of a rank ends only after the first has been taken out.
    slow = Delayed(ranks=[1], operations=["empty"])
    trace = interpret(mailboxes(), given, calls=3, scheduler=slow).trace
    for call in (1, 2):
        assert trace.index((call, 0, "fill")) > trace.index((call - 1, 1, "empty"))


def test_a_full_mailbox_is_a_deadlock_of_the_sender() -> None:
    stuck = mailboxes(empties=False)
    given = {"x": [np.ones((2, 2))] * 2}
    assert set(interpret(stuck, given).words.values()) == {1}
    with pytest.raises(Deadlock) as caught:
        interpret(stuck, given, calls=2)
    assert (
        "rank 0, stream send, operation fill of call 1 waits for mailbox full[0] of rank 1 "
        "(slot 0): expected 0, seen 1" in str(caught.value)
    )
    empty = mailboxes().without("fill")
    with pytest.raises(Deadlock, match=r"empty of call 0 waits for mailbox full\[0\].* 1, seen 0"):
        interpret(empty, given)


def counting(world_size: int, *, threshold: Epoch) -> Program:
    """Every rank adds 3 to rank 0's counter; rank 0 waits for the threshold, then answers all."""
    home = Peer(0, absolute=True)
    add = Signal(id="add", stream="compute", words=(FlagRef("sum", on=home),), value=Epoch(0, 3))
    answers = tuple(FlagRef("go", on=Peer(rank, absolute=True)) for rank in range(world_size))
    first = [
        add,
        Wait(id="all", stream="compute", words=(FlagRef("sum"),), value=threshold),
        Signal(id="answer", stream="compute", words=answers),
    ]
    go = Wait(id="go", stream="compute", words=(FlagRef("go"),))
    bodies = [[*first, go], *[[add, go]] * (world_size - 1)]
    return program(world_size, [], [Flag("sum", "counter"), Flag("go")], *bodies)


def test_a_counter_adds_and_passes_when_all_have_added() -> None:
    for scheduler in SCHEDULERS:
        result = interpret(counting(4, threshold=Epoch(12, 12)), {}, calls=3, scheduler=scheduler)
        for call in range(3):
            here = result.trace.index((call, 0, "all"))
            assert all(result.trace.index((call, rank, "add")) < here for rank in range(4))
        assert result.words[Word("sum", 0, 0, 0)] == 36


def test_a_counter_resumes_and_wraps_at_32_bits() -> None:
    first = 2**32 // 12 - 1
    result = interpret(counting(4, threshold=Epoch(12, 12)), {}, calls=3, first_call=first)
    assert result.words[Word("sum", 0, 0, 0)] == (first + 3) * 12 - 2**32
    with pytest.raises(Deadlock, match=r"counter sum.*expected 13, seen 12"):
        interpret(counting(4, threshold=Epoch(12, 13)), {}, scheduler=Random(0))


def test_first_call_knows_phases_slots_and_strides() -> None:
    word, count = FlagRef("step", on=NEXT), FlagRef("count", on=NEXT)
    phases = [
        Phase(
            name,
            (
                Body(
                    (
                        Signal(id="set", stream="compute", words=(word,), value=Epoch(5, offset)),
                        Signal(
                            id="add", stream="compute", words=(count,), value=Epoch(stride, offset)
                        ),
                    )
                ),
            ),
            repeats=repeats,
        )
        for name, offset, stride, repeats in (("a", 7, 0, 3), ("b", 1, 2, 1))
    ]
    flags = [Flag("step", slots=3, initial=9), Flag("count", "counter", slots=2, initial=1)]
    whole = replace(program(2, [], flags, ()), phases=tuple(phases))
    for executions in (1, 2, 3, 4, 5, 9):
        aged = interpret(whole, {}, first_call=4 * executions)
        assert aged.words == interpret(whole, {}, calls=executions + 1).words


def test_a_wait_wants_all_its_words() -> None:
    both = Wait(id="wait", stream="compute", words=(FlagRef("f", 0), FlagRef("f", 1)))
    flags = [Flag("f", count=2)]
    sends = [
        Signal(id=f"signal{index}", stream=f"s{index}", words=(FlagRef("f", index),))
        for index in range(2)
    ]
    for scheduler in SCHEDULERS:
        trace = interpret(program(1, [], flags, [*sends, both]), {}, scheduler=scheduler).trace
        assert trace[-1] == (0, 0, "wait")
    with pytest.raises(Deadlock, match=r"f\[1\] of rank 0 \(slot 0\): expected 1, seen 0"):
        interpret(program(1, [], flags, [sends[0], both]), {})


# ---- what is ordered, and what is not ------------------------------------------------------------


def pushed(*, signal_on: str) -> Program:
    """Rank 0 puts without a signal and signals later, on this stream, after the put has ended."""
    put = Put(id="put", stream="send", source=View("x"), destination=View("box", on=NEXT))
    after = () if signal_on == "send" else ("put",)
    signal = Signal(id="signal", stream=signal_on, words=(FlagRef("f", on=NEXT),), after=after)
    wait = Wait(id="wait", stream="compute", words=(FlagRef("f"),))
    copy = Copy(id="copy", stream="compute", source=View("box"), destination=View("y"))
    buffers = [caller("x", 3), caller("y", 3, role="output"), symmetric("box", 3)]
    return program(2, buffers, [Flag("f")], [put, signal], [wait, copy])


def test_a_signal_orders_the_puts_before_it_on_its_stream_only() -> None:
    x = numbers(3, 2)
    for scheduler in (*SCHEDULERS, Delayed(kinds=["put"])):
        result = interpret(pushed(signal_on="send"), {"x": [x, x]}, scheduler=scheduler)
        np.testing.assert_array_equal(result.outputs["y"][1], x)
    late = interpret(pushed(signal_on="other"), {"x": [x, x]}, scheduler=Delayed(kinds=["put"]))
    assert np.isnan(late.outputs["y"][1]).all()


def test_data_under_way_lands_in_order_and_in_the_end() -> None:
    x = numbers(3, 2)
    twice = pushed(signal_on="send")
    (put, signal), receiver = (body.operations for body in twice.phases[0].bodies)
    zero = Fill(id="fill", stream="send", destination=View("z"))
    first = replace(put, id="first", source=View("z"))
    buffers = [*twice.buffers, Buffer("z", "workspace", "fp32", Extent(3), Extent(2))]
    for scheduler in (*SCHEDULERS, Delayed(kinds=["put"])):
        both = program(2, buffers, twice.flags, [zero, first, put, signal], receiver)
        result = interpret(both, {"x": [x, x]}, scheduler=scheduler)
        np.testing.assert_array_equal(result.outputs["y"][1], x)


def test_unordered_streams_race() -> None:
    fill = Fill(id="fill", stream="side", destination=View("z"), number=7)
    copy = Copy(id="copy", stream="compute", source=View("z"), destination=View("y"))
    z = Buffer("z", "workspace", "fp32", Extent(2), Extent(2), initial="zero")
    buffers = [z, caller("y", 2, role="output")]
    racy = program(1, buffers, [], [fill, copy])
    seen = {
        str(interpret(racy, {}, scheduler=scheduler).outputs["y"][0].tolist())
        for scheduler in SCHEDULERS
    }
    zeros, sevens = [[0.0] * 2] * 2, [[7.0] * 2] * 2
    nans = [[float("nan")] * 2] * 2
    assert {str(zeros), str(sevens), str(nans)} <= seen
    for order in (["fill", "copy"], ["copy", "fill"]):
        chosen = Chosen([(0, 0, id) for id in order])
        got = interpret(racy, {}, scheduler=chosen).outputs["y"][0].tolist()
        assert got == (sevens if order[0] == "fill" else zeros)
    ordered = program(1, buffers, [], [fill, replace(copy, after=("fill",))])
    for scheduler in (*SCHEDULERS, Delayed(operations=["fill"])):
        assert interpret(ordered, {}, scheduler=scheduler).outputs["y"][0].tolist() == sevens


@pytest.mark.parametrize("kind", ["copy", "put", "gemm", "reduce"])
def test_sources_are_read_at_any_moment_until_the_end(kind: str) -> None:
    # The source is overwritten on another stream while the operation may be under way.
    z, y = View("z"), View("y")
    eye = Buffer("eye", "weight", "fp32", Extent(2), Extent(2), initial="caller", reuse="never")
    reader = {
        "copy": Copy(id="read", stream="compute", source=z, destination=y),
        "put": Put(id="read", stream="compute", source=z, destination=y),
        "gemm": Gemm(id="read", stream="compute", a=z, b=View("eye"), out=y),
        "reduce": Reduce(id="read", stream="compute", inputs=(z,), out=y),
    }[kind]
    clobber = Fill(id="clobber", stream="side", destination=z, number=5)
    z_buffer = Buffer("z", "workspace", "fp32", Extent(2), Extent(2), initial="zero")
    racy = program(1, [z_buffer, eye, caller("y", 2, role="output")], [], [reader, clobber])
    given = {"eye": [np.eye(2)]}
    for manner, expected in ((Manner(), 0.0), (Manner(reads="end"), 5.0)):
        result = interpret(racy, given, scheduler=BeginFirst("read", manner))
        assert set(result.outputs["y"][0].flat) == {expected}
    if kind in ("copy", "put"):
        by_rows = BeginFirst("read", Manner(by_rows=True))
        rows = interpret(racy, given, scheduler=by_rows).outputs["y"][0]
        assert rows.tolist() == [[0, 0], [5, 5]]


# ---- the other operations ------------------------------------------------------------------------


def test_compute_operations() -> None:
    x, w = numbers(4, 3), numbers(2, 3, seed=1)
    z = Buffer("z", "workspace", "fp32", Extent(4), Extent(2))
    buffers = [
        caller("x", 4, 3),
        caller("w", 2, 3, role="weight", reuse="never"),
        caller("y", 4, role="output"),
        z,
    ]
    whole, top = View("z"), View("z", rows=Fixed(0, 2), columns=Fixed(1, 2))
    operations = [
        Gemm(id="gemm", stream="compute", a=View("x"), b=View("w"), out=whole),
        Gemm(id="more", stream="compute", a=View("x"), b=View("w"), out=whole, accumulate=whole),
        Fill(id="fill", stream="compute", destination=top, number=-1),
        RowOp(id="add", stream="compute", function="add", inputs=(whole, whole), outputs=(whole,)),
        Reduce(id="reduce", stream="compute", inputs=(whole, whole, whole), out=View("y")),
    ]
    expected = 2 * x @ w.T
    expected[:2, 1] = -1
    for scheduler in SCHEDULERS:
        result = interpret(
            program(1, buffers, [], operations), {"x": [x], "w": [w]}, scheduler=scheduler
        )
        np.testing.assert_array_equal(result.outputs["y"][0], 6 * expected)


# ---- fused kernels -------------------------------------------------------------------------------


def gather_gemm() -> Program:
    """Two ranks push their rows to each other; a fused kernel multiplies what is there."""
    send = Put(
        id="push",
        stream="send",
        source=View("x"),
        destination=View("all", Block(Peer(0)), on=NEXT),
        signal=FlagRef("arrived", Peer(0), on=NEXT),
    )
    own = TileGroup(a=View("x"), out=View("y", Block(Peer(0))))
    other = TileGroup(
        a=View("all", Block(NEXT)),
        out=View("y", Block(NEXT)),
        gates=(Gate(FlagRef("arrived", NEXT)),),
        emits=(Emit(word=FlagRef("done", Peer(0), on=NEXT)),),
    )
    fused = GatherGemm(
        id="fused", stream="compute", b=View("w"), tiling=TILING, groups=(own, other)
    )
    credit = Wait(id="credit", stream="send", words=(FlagRef("done", NEXT),), value=Epoch(1, 0))
    buffers = [
        sharded("x", 5, 3, role="input"),
        caller("w", 2, 3, role="weight", reuse="never"),
        symmetric("all", 5, 3),
        caller("y", 5, role="output"),
    ]
    return program(
        2, buffers, [Flag("arrived", count=2), Flag("done", count=2)], [credit, send, fused]
    )


def test_gather_gemm_waits_at_its_gates_and_emits() -> None:
    xs, w = numbers(3, 5, 3), numbers(2, 2, 3, seed=3)

    def given(call: int):
        return {"x": [xs[call][:3], xs[call][3:]], "w": list(w)}

    for scheduler in (*SCHEDULERS, Delayed(kinds=["put"]), Delayed(ranks=[1])):
        result = interpret(gather_gemm(), given, calls=3, scheduler=scheduler)
        for call in range(3):
            for rank in range(2):
                got = result.by_call[call]["y"][rank]
                np.testing.assert_array_equal(got, xs[call] @ w[rank].T)
    racy = gather_gemm().without("credit")
    wrong = [
        not np.array_equal(
            interpret(racy, given, calls=3, scheduler=scheduler).by_call[0]["y"][1], xs[0] @ w[1].T
        )
        for scheduler in (Delayed(ranks=[1], kinds=["gather_gemm"]), *SCHEDULERS)
    ]
    assert any(wrong)
    with pytest.raises(Deadlock, match=r"operation fused of call 0 waits for epoch arrived\[1\]"):
        interpret(gather_gemm().without("push"), given)


def reducing(kind: str) -> Program:
    """``y = sum over ranks of x @ w.T``: tiles are added into the rows' owner (or everyone)."""
    world = range(3)
    to_all = kind == "gemm_all_reduce"
    groups = []
    for offset in world:
        owners = [Peer(rank) for rank in world] if to_all else [Peer(offset)]
        emits = tuple(
            Emit(
                source=View("part", Block(Peer(offset))),
                destination=View("sum", Block(Peer(offset)), on=owner),
                word=FlagRef("added", on=owner),
                value=ONE,
                mode="add",
            )
            for owner in owners
        )
        rows = Block(Peer(offset))
        groups.append(TileGroup(a=View("x", rows), out=View("part", rows), emits=emits))
    cls = GemmAllReduce if to_all else GemmReduceScatter
    fused = cls(
        id="fused",
        stream="compute",
        b=View("w"),
        tiling=TILING,
        groups=tuple(groups),
        reduction="add",
    )
    adds = 9 if to_all else 3
    rows = View("sum") if to_all else View("sum", Block(Peer(0)))
    operations = [
        fused,
        Wait(id="all", stream="compute", words=(FlagRef("added"),), value=Epoch(adds, adds)),
        Copy(id="copy", stream="compute", source=rows, destination=View("y")),
    ]
    out = caller("y", 7, role="output") if to_all else sharded("y", 7, role="output")
    buffers = [
        caller("x", 7, 3),
        caller("w", 2, 3, role="weight", reuse="never"),
        Buffer("part", "workspace", "fp32", Extent(7), Extent(2)),
        symmetric("sum", 7, initial="zero"),
        out,
    ]
    return program(3, buffers, [Flag("added", "counter")], operations)


@pytest.mark.parametrize("kind", ["gemm_reduce_scatter", "gemm_all_reduce"])
def test_fused_reductions_add_into_peers(kind: str) -> None:
    x, w = numbers(3, 7, 3), numbers(3, 2, 3, seed=8)
    total = sum(x[rank] @ w[rank].T for rank in range(3))
    expected = [total] * 3 if kind == "gemm_all_reduce" else [total[:3], total[3:6], total[6:]]
    for scheduler in (*SCHEDULERS, Delayed(ranks=[2])):
        outputs = interpret(
            reducing(kind), {"x": list(x), "w": list(w)}, scheduler=scheduler
        ).outputs
        for got, wanted in zip(outputs["y"], expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


# ---- calls ---------------------------------------------------------------------------------------


def test_phases_and_repeats_are_calls_and_the_caller_acts_between_executions_only() -> None:
    grow = RowOp(
        id="grow", stream="compute", function="grow", inputs=(View("z"),), outputs=(View("z"),)
    )
    start = Copy(id="start", stream="compute", source=View("x"), destination=View("z"))
    stop = Copy(id="stop", stream="side", source=View("z"), destination=View("y"))
    buffers = [
        caller("x", 2),
        caller("y", 2, role="output"),
        Buffer("z", "workspace", "fp32", Extent(2), Extent(2)),
    ]
    stack = replace(
        program(1, buffers, [], ()),
        phases=(
            Phase("start", (Body((start,)),)),
            Phase("layers", (Body((grow,)),), repeats=4),
            Phase("stop", (Body((stop,)),)),
        ),
    )
    xs = [numbers(2, 2, seed=seed) for seed in range(3)]
    for scheduler in (*SCHEDULERS, Delayed(streams=["side"]), Delayed(streams=["compute"])):
        result = interpret(
            stack,
            lambda execution: {"x": [xs[execution]]},
            calls=3,
            scheduler=scheduler,
            functions={"grow": lambda z: 2 * z + 1},
        )
        for x, outputs in zip(xs, result.by_call, strict=True):
            np.testing.assert_array_equal(outputs["y"][0], 16 * x + 15)
        assert [key.call for key in result.trace] == list(range(18))


def test_streams_go_on_from_call_to_call_unless_they_are_fresh() -> None:
    fill = Fill(id="fill", stream="side", destination=View("z"))
    z = Buffer("z", "workspace", "fp32", Extent(1), Extent(1))
    late = Delayed(calls=[0])
    kept = interpret(program(1, [z], [], [fill]), {}, calls=2, scheduler=late)
    assert [key.call for key in kept.trace] == [0, 1]
    options = {"calls": 2, "scheduler": late, "fresh_streams": True}
    fresh = interpret(program(1, [z], [], [fill]), {}, **options)
    assert [key.call for key in fresh.trace] == [1, 0]
    assert fresh.progress == kept.progress == {(0, "compute"): 0, (0, "side"): 2}
    on_callers = replace(fill, stream="compute")
    callers = interpret(program(1, [z], [], [on_callers]), {}, **options)
    assert [key.call for key in callers.trace] == [0, 1]


def test_memory_that_nobody_wrote_is_nan() -> None:
    for name, kind in (("local", "local"), ("shared", "symmetric")):
        z = Buffer("z", "workspace", "fp32", Extent(2), Extent(2), kind=kind)
        copy = Copy(id=name, stream="compute", source=View("z"), destination=View("y"))
        result = interpret(program(1, [z, caller("y", 2, role="output")], [], [copy]), {})
        assert np.isnan(result.outputs["y"][0]).all()


def test_weights_are_taken_once_and_zeroed_memory_is_zero_once() -> None:
    add = RowOp(
        id="add",
        stream="compute",
        function="add",
        inputs=(View("z"), View("w")),
        outputs=(View("z"),),
    )
    copy = Copy(id="copy", stream="compute", source=View("z"), destination=View("y"))
    buffers = [
        caller("w", 2, role="weight", reuse="never"),
        Buffer("z", "workspace", "fp32", Extent(2), Extent(2), initial="zero"),
        caller("y", 2, role="output"),
    ]
    w = numbers(2, 2)

    def given(call: int):
        return {"w": [w]} if call == 0 else {}

    result = interpret(program(1, buffers, [], [add, copy]), given, calls=3)
    np.testing.assert_array_equal([got["y"][0] for got in result.by_call], [w, 2 * w, 3 * w])


def test_an_output_is_nan_before_every_call_whoever_the_caller_is() -> None:
    calls = iter(range(9))
    keep = RowOp(
        id="keep", stream="compute", function="keep", inputs=(View("y"),), outputs=(View("y"),)
    )
    whole = program(1, [caller("y", 2, role="output")], [], [keep])
    functions = {"keep": lambda y: np.ones((2, 2)) if next(calls) == 0 else y}
    result = interpret(whole, {}, calls=2, hostile_caller=False, functions=functions)
    first, second = (outputs["y"][0] for outputs in result.by_call)
    assert set(first.flat) == {1}
    assert np.isnan(second).all()


def test_the_caller_leaves_its_buffers_alone_between_repeats() -> None:
    grow = RowOp(
        id="grow", stream="side", function="grow", inputs=(View("y"),), outputs=(View("y"),)
    )
    y = Buffer("y", "output", "fp32", Extent(2), Extent(2), initial="caller")
    stack = program(1, [y], [], [grow]).repeated(3)
    start = numbers(2, 2, 2)
    result = interpret(
        stack,
        lambda execution: {"y": [start[execution]]},
        calls=2,
        functions={"grow": lambda y: 3 * y},
    )
    for outputs, began in zip(result.by_call, start, strict=True):
        np.testing.assert_array_equal(outputs["y"][0], 27 * began)
