"""Sums and functions of rows: what is the same number, however it was made, is the same symbol."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hand_made import kinds, made

from stretto.schedules.language import (
    Block,
    Body,
    Buffer,
    Copy,
    Emit,
    Epoch,
    Extent,
    Fill,
    Fixed,
    Flag,
    FlagRef,
    Gate,
    Gemm,
    GemmReduceScatter,
    Operation,
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
)
from stretto.schedules.verifier import verify
from stretto.schedules.verifier.calls import window_of
from stretto.schedules.verifier.meaning import _Meaning
from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.report import Reporter
from stretto.schedules.verifier.unroll import unroll

SELF, NEXT = Peer(0), Peer(1)


def reduce_scatter(
    tp: int, m: int, workspace: Buffer, operations: Sequence[Operation], flags: Sequence[Flag]
) -> Program:
    buffers = (
        Buffer("x", "input", "fp32", Extent(m), Extent(2), initial="caller"),
        Buffer("w", "weight", "fp32", Extent(2), Extent(2), initial="caller", reuse="never"),
        Buffer("y", "output", "fp32", Extent(m, "shard"), Extent(2)),
        Buffer("part", "workspace", "fp32", Extent(m), Extent(2)),
        workspace,
    )
    return Program(
        name="gemm-rs",
        variant="by-hand",
        world_size=tp,
        shape=(("m", m),),
        dtype="fp32",
        transport="test",
        buffers=buffers,
        flags=tuple(flags),
        phases=(Phase("call", (Body(tuple(operations)),)),),
        computes="gemm_reduce_scatter",
    )


# ---- a ring that adds ----------------------------------------------------------------------------


def added(id: str, inputs: tuple[View, ...], out: View) -> RowOp:
    return RowOp(id=id, stream="compute", function="add", inputs=inputs, outputs=(out,))


def reduced(id: str, inputs: tuple[View, ...], out: View) -> Reduce:
    return Reduce(id=id, stream="compute", inputs=inputs, out=out)


def ring(
    tp: int, m: int, add: Callable[[str, tuple[View, ...], View], Operation], *, without: int = 0
) -> Program:
    """Return a ring reduce-scatter that adds its own part to what it received.

    In step s rank r sends block r - 1 - s to the next rank and receives block r - 2 - s; with
    `without` it does not add in the step before so many steps from the end.
    """

    def part(owner: int) -> View:
        return View("part", Block(Peer(owner)))

    def received(owner: int, on: int = 0) -> View:
        return View("received", Block(Peer(owner)), on=Peer(on))

    whole = View("part")
    operations: list[Operation] = [
        Gemm(id="gemm", stream="compute", a=View("x"), b=View("w"), out=whole),
        Wait(id="credit", stream="compute", words=(FlagRef("free"),), value=Epoch(1, 0)),
    ]
    for step in range(tp - 1):
        operations.append(
            Put(
                id=f"put{step}",
                stream="compute",
                source=part(-1 - step),
                destination=received(-1 - step, on=1),
                signal=FlagRef("arrived", step, on=NEXT),
            )
        )
        come = -2 - step
        operations.append(
            Wait(id=f"wait{step}", stream="compute", words=(FlagRef("arrived", step),))
        )
        out = View("y") if step == tp - 2 else part(come)
        if without and step == tp - 1 - without:
            operations.append(
                Copy(id=f"copy{step}", stream="compute", source=received(come), destination=out)
            )
        else:
            operations.append(add(f"add{step}", (received(come), part(come)), out))
    operations.append(Signal(id="back", stream="compute", words=(FlagRef("free", on=Peer(-1)),)))
    received_rows = Buffer("received", "workspace", "fp32", Extent(m), Extent(2), "symmetric")
    flags = (Flag("free"), Flag("arrived", count=tp - 1))
    return reduce_scatter(tp, m, received_rows, operations, flags)


@pytest.mark.parametrize("add", [added, reduced])
@pytest.mark.parametrize(("tp", "m"), [(2, 4), (3, 7), (4, 4), (8, 10)])
def test_a_ring_that_adds(
    tp: int, m: int, add: Callable[[str, tuple[View, ...], View], Operation]
) -> None:
    verdict = verify(ring(tp, m, add), alone=True)
    assert (verdict.safe, verdict.findings) == (True, ())
    for without in range(1, tp):
        wrong = verify(ring(tp, m, add, without=without), alone=True)
        assert kinds(wrong) == {"wrong_result"}


# ---- a kernel that adds what it emits ------------------------------------------------------------


def emitting(tp: int, *, zero: str) -> Program:
    """Return a fused GEMM and reduce-scatter: tiles are added to the sum of their owner.

    The owner sets its sum to zero before it lets others add to it, after it has read the sum, or
    never.
    """
    ready = Epoch(1, 1) if zero == "before" else Epoch(1, 0)
    groups = tuple(
        TileGroup(
            a=View("x", Block(Peer(owner))),
            out=View("part", Block(Peer(owner))),
            gates=(Gate(FlagRef("ready", Peer(owner)), ready),),
            emits=(
                Emit(
                    View("part", Block(Peer(owner))),
                    View("sum", on=Peer(owner)),
                    FlagRef("arrived", SELF, Peer(owner)),
                    mode="add",
                ),
            ),
        )
        for owner in range(tp)
    )
    kernel = GemmReduceScatter(
        id="kernel",
        stream="compute",
        b=View("w"),
        tiling=Tiling(16, 8, 1),
        groups=groups,
        reduction="add",
    )
    fill = Fill(id="zero", stream="compute", destination=View("sum"))
    free = Signal(
        id="free",
        stream="compute",
        words=tuple(FlagRef("ready", SELF, Peer(peer)) for peer in range(tp)),
    )
    come = tuple(FlagRef("arrived", Peer(peer)) for peer in range(tp))
    wait = Wait(id="come", stream="compute", words=come)
    out = Copy(id="out", stream="compute", source=View("sum"), destination=View("y"))
    operations = {
        "before": (fill, free, kernel, wait, out),
        "after": (kernel, wait, out, fill, free),
        "never": (kernel, wait, out, free),
    }
    total = Buffer(
        "sum", "workspace", "fp32", Extent(2 * tp, "shard"), Extent(2), "symmetric", initial="zero"
    )
    flags = (Flag("ready", count=tp), Flag("arrived", count=tp))
    return reduce_scatter(tp, 2 * tp, total, operations[zero], flags)


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
def test_emits_that_add_settle(tp: int) -> None:
    """What an add finds depends on the order of adds; what is read after all of them does not."""
    for zero in ("before", "after"):
        verdict = verify(emitting(tp, zero=zero), alone=True)
        assert (verdict.safe, verdict.findings) == (True, ())
        assert verdict.calls == 2  # no more than for Programs that add nothing
    wrong = verify(emitting(tp, zero="never"), alone=True)
    assert kinds(wrong) == {"wrong_result"}
    assert "After call 1 of gemm-rs" in wrong.errors[0].message


def test_an_add_to_bytes_that_nobody_wrote() -> None:
    program = emitting(2, zero="never")
    total = program.buffer["sum"]
    undefined = Buffer("sum", "workspace", "fp32", total.rows, total.columns, "symmetric")
    operations = program.phases[0].bodies[0].operations
    wrong = reduce_scatter(2, 4, undefined, operations, program.flags)
    assert "unwritten" in kinds(verify(wrong, alone=True))


# ---- functions of rows ---------------------------------------------------------------------------


def row_op(
    id: str, function: str, inputs: str, outputs: str, tables: str = "", **options: float
) -> RowOp:
    return RowOp(
        id=id,
        stream="compute",
        function=function,
        inputs=tuple(View(name) for name in inputs.split()),
        outputs=tuple(View(name) for name in outputs.split()),
        tables=tuple(View(name) for name in tables.split()),
        options=tuple(sorted(options.items())),
    )


def read_from(*operations: Operation) -> dict[str, list]:
    """Return the symbols that copies find in their sources after `operations` of one rank."""
    given = {
        name: Buffer(name, "input", "fp32", Extent(rows), Extent(4), initial="caller")
        for name, rows in (("x", 6), ("r", 6), ("g", 1), ("h", 1))
    }
    scratch = {
        name: Buffer(name, "workspace", "fp32", Extent(6), Extent(4), initial="zero")
        for name in ("a", "b", "c", "d", "out")
    }
    copies = [
        Copy(id=f"read {name}", stream="compute", source=View(name), destination=View("out"))
        for name in "abcd"
    ]
    program = made(
        *operations, *copies, tp=1, buffers=(*given.values(), *scratch.values()), flags=()
    )
    window = window_of([program], 1)
    world = unroll(window.programs, window.turns)
    meaning = _Meaning(Order(world, world.flags.initial), Reporter(world), set())
    meaning.run()
    found = meaning.found[0]
    first = len(operations)
    return {name: patches for (_, place, _, name, *_), patches in found.items() if place >= first}


def test_the_fused_norm_is_the_sum_and_its_norm() -> None:
    read = read_from(
        row_op("fused", "add_rms_norm", "x r", "a b", "g"),
        row_op("sum", "add", "r x", "c"),
        row_op("norm", "rms_norm", "c", "d", "g", eps=1e-6),
    )
    assert read["a"] == read["c"]
    assert read["b"] == read["d"]
    assert read["a"] != read["b"]


@pytest.mark.parametrize(
    "other",
    [
        row_op("other", "rms_norm", "x", "b", "g", eps=1e-5),
        row_op("other", "rms_norm", "x", "b", "h"),
        row_op("other", "rms_norm", "x", "b"),
        row_op("other", "rms_norm", "r", "b", "g"),
        row_op("other", "mine", "x", "b", "g"),
    ],
    ids=["eps", "table", "no-table", "input", "name"],
)
def test_options_and_tables_make_a_difference(other: RowOp) -> None:
    read = read_from(row_op("one", "rms_norm", "x", "a", "g"), other)
    assert read["a"] != read["b"]


def test_rows_in_parts_give_what_all_rows_give() -> None:
    """Rows in two calls, and columns that were brought in two parts."""

    def part(name: str, start: int, stop: int) -> View:
        return View(name, Fixed(start, stop))

    halves = [
        RowOp(
            id=f"half{start}",
            stream="compute",
            function="rms_norm",
            inputs=(part("x", start, stop),),
            outputs=(part("a", start, stop),),
            tables=(View("g"),),
        )
        for start, stop in ((0, 2), (2, 6))
    ]
    left, right = Fixed(0, 1), Fixed(1, 4)
    columns = [
        Copy(
            id=f"columns{number}",
            stream="compute",
            source=View("x", columns=side),
            destination=View("c", columns=side),
        )
        for number, side in enumerate((left, right))
    ]
    read = read_from(
        *halves,
        *columns,
        row_op("norm", "rms_norm", "c", "b", "g"),
        row_op("whole", "rms_norm", "x", "d", "g"),
    )
    (whole,) = read["d"]
    assert read["b"] == [whole]
    assert [value for _, value in read["a"]] == [whole[1]] * 2


def test_a_table_is_read() -> None:
    """Whoever writes it meanwhile races with the row operation."""
    changes = Fill(id="changes", stream="side", destination=View("s", Fixed(3, 4)))
    reads = RowOp(
        id="reads",
        stream="compute",
        function="rms_norm",
        inputs=(View("s", Fixed(0, 2)),),
        outputs=(View("s", Fixed(0, 2)),),
        tables=(View("s", Fixed(3, 4)),),
    )
    assert kinds(verify(made(changes, reads), alone=True)) & {"race"}
