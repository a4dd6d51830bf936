"""A Program that has one of everything."""

from __future__ import annotations

import pytest

from stretto.schedules.language import (
    Block,
    Body,
    Buffer,
    Collective,
    Copy,
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
    Opaque,
    Peer,
    Phase,
    Program,
    Put,
    Reduce,
    RowOp,
    Signal,
    Tags,
    TileGroup,
    TileOrder,
    Tiling,
    View,
    Wait,
)

OWN, NEXT = Block(Peer(0)), Block(Peer(1))


def everything_program() -> Program:
    """Return a Program with every operation, buffer, flag and kind of expression in it."""
    full, rows = Extent(9), Extent(9, "padded")
    k, n = Extent(4), Extent(3)
    buffers = (
        Buffer("x", "input", "bf16", Extent(9, "shard"), k, initial="caller"),
        Buffer("w", "weight", "bf16", n, k, initial="caller", reuse="never"),
        Buffer("y", "output", "bf16", full, n),
        Buffer("part", "output", "bf16", Extent(9, "shard"), n),
        Buffer("all", "workspace", "bf16", rows, k, "symmetric", 2, reuse="release"),
        Buffer("sum", "workspace", "bf16", full, n, "symmetric", initial="zero"),
        Buffer("z", "workspace", "bf16", full, n),
    )
    flags = (
        Flag("arrived", count=2, slots=2),
        Flag("count", "counter", initial=3),
        Flag("box", "mailbox"),
    )
    tiling = Tiling(16, 8, workers=4, order=TileOrder("grouped", 2), communication_sms=1)
    arrived = FlagRef("arrived", Peer(0), on=Peer(1))
    gathers = GatherGemm(
        id="gathers",
        stream="compute",
        b=View("w"),
        tiling=tiling,
        groups=(
            TileGroup(a=View("x"), out=View("y", OWN)),
            TileGroup(
                a=View("all", NEXT),
                out=View("y", NEXT),
                gates=(Gate(FlagRef("arrived", Peer(1))), Gate(FlagRef("count"), Epoch(4, 7))),
                emits=(Emit(word=FlagRef("count", on=Peer(1)), value=Epoch(0, 2)),),
            ),
        ),
    )
    group = TileGroup(
        a=View("all", OWN),
        out=View("z", OWN),
        emits=(Emit(View("z", OWN), View("sum", OWN, on=Peer(1)), mode="add"),),
    )
    scatters = GemmReduceScatter(
        id="scatters",
        stream="compute",
        b=View("w"),
        tiling=tiling,
        groups=(group,),
        reduction="add",
        accumulator="bf16",
    )
    reduces = GemmAllReduce(
        id="reduces",
        stream="compute",
        b=View("w"),
        tiling=Tiling(8, 8, 1, TileOrder("ring")),
        groups=(group,),
        reduction="multimem",
    )
    box = (FlagRef("box", on=Peer(1)),)
    first = (
        Put(
            id="put",
            stream="send",
            tags=Tags(step=1, shard=Peer(0), note="own rows"),
            source=View("x"),
            destination=View("all", OWN, on=Peer(1)),
            signal=arrived,
        ),
        gathers,
        scatters,
        reduces,
        Signal(id="fills", stream="send", words=box, value=Epoch(0, 1)),
        Wait(id="empties", stream="compute", words=(FlagRef("box"),), value=Epoch(0, 1)),
        Collective(
            id="collective",
            stream="compute",
            after=("put", "fills"),
            collective="reduce_scatter",
            source=View("y"),
            destination=View("part"),
        ),
    )
    top = View("z", Fixed(0, 2), Fixed(1, 3))
    second = (
        Gemm(
            id="gemm",
            stream="compute",
            a=View("all"),
            b=View("w"),
            out=View("z"),
            accumulate=View("y"),
        ),
        Fill(id="fill", stream="compute", destination=top, number=0.5),
        Copy(id="copy", stream="side", source=View("z"), destination=View("y"), after=("fill",)),
        RowOp(
            id="rows",
            stream="side",
            function="add",
            inputs=(View("z"), View("y")),
            outputs=(View("z"),),
            flops_per_row=3.0,
            bytes_per_row=18.0,
        ),
        Reduce(id="reduce", stream="side", inputs=(View("z"), View("y")), out=View("z")),
        Opaque(
            id="opaque",
            stream="side",
            tags=Tags(layer=2),
            function="attention",
            inputs=(View("z", Block(Peer(1), 1, 3)),),
            outputs=(),
            flops=1e6,
            moved_bytes=2e6,
        ),
    )
    return Program(
        name="everything",
        variant="by-hand",
        world_size=2,
        shape=(("m", 9), ("n", 3), ("k", 4)),
        dtype="bf16",
        transport="test",
        buffers=buffers,
        flags=flags,
        phases=(
            Phase("first", (Body(first),)),
            Phase("second", (Body(second), Body(second[:1])), (0, 1), repeats=3),
        ),
        computes="something",
    )


@pytest.fixture(scope="session")
def everything() -> Program:
    return everything_program()
