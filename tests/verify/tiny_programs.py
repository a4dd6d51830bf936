"""Tiny Programs, made at random, that the explorer can go through state by state."""

from __future__ import annotations

from hypothesis import strategies as st

from stretto.schedules.language import (
    SELF,
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
    Operation,
    Peer,
    Phase,
    Program,
    Put,
    Reduce,
    Signal,
    TileGroup,
    Tiling,
    View,
    Wait,
)

STREAMS = ("compute", "side", "other")


def buffers(world_size: int, slots: int, initial: str, kept: bool) -> tuple[Buffer, ...]:
    one = Extent(1)
    reuse = "never" if slots > 1 else "caller_stream"
    fate = {"initial": "zero", "reuse": "never"} if kept else {}
    return (
        Buffer("x", "input", "fp32", Extent(world_size, "shard"), one, initial="caller"),
        Buffer("y", "output", "fp32", Extent(2), one, **fate),
        Buffer(
            "g",
            "workspace",
            "fp32",
            Extent(2),
            one,
            "symmetric",
            slots,
            initial,
            reuse,  # type: ignore[arg-type]
        ),
        Buffer(
            "h",
            "workspace",
            "fp32",
            Extent(world_size, "padded"),
            one,
            "symmetric",
            slots,
            "undefined",
            reuse,  # type: ignore[arg-type]
        ),
        Buffer("s", "workspace", "fp32", Extent(2), one, initial=initial),  # type: ignore[arg-type]
        Buffer("t", "workspace", "fp32", Extent(2), Extent(2), initial="zero"),
        Buffer("z", "output", "fp32", Extent(2), one, "symmetric", **fate),
    )


def flags(slots: int, initial: int) -> tuple[Flag, ...]:
    return (
        Flag("e", count=2, slots=slots),
        Flag("c", "counter", slots=slots),
        Flag("b", "mailbox", count=2, initial=initial),
    )


@st.composite
def views(draw: st.DrawFn, names: tuple[str, ...], rows: int, on: Peer = SELF) -> View:
    name = draw(st.sampled_from(names))
    if name in ("x", "h"):
        return View(
            name, Block(draw(st.sampled_from([SELF, Peer(1)])) if name == "h" else SELF), on=on
        )
    start = draw(st.integers(0, 2 - rows))
    return View(name, Fixed(start, start + rows), on=on)


@st.composite
def words(draw: st.DrawFn, *, remote: bool) -> FlagRef:
    flag = draw(st.sampled_from("eeecb"))
    index = 0 if flag == "c" else draw(st.integers(0, 1))
    return FlagRef(flag, index, draw(st.sampled_from([SELF, Peer(1)])) if remote else SELF)


@st.composite
def values(draw: st.DrawFn, flag: str, world_size: int) -> Epoch:
    if flag == "b":
        return Epoch(0, 1)
    if flag == "c":
        return Epoch(draw(st.sampled_from([0, 1, 1])), draw(st.integers(1, 2)))
    return Epoch(1, draw(st.sampled_from([1, 1, 1, 0, -1, 2])))


@st.composite
def operations(
    draw: st.DrawFn, number: int, earlier: list[Operation], world_size: int
) -> Operation:
    id = f"op{number}"
    stream = draw(st.sampled_from(STREAMS[: draw(st.integers(1, 3))]))
    ids = [one.id for one in earlier]
    after = tuple(draw(st.sets(st.sampled_from(ids), max_size=2))) if ids else ()
    common = {"id": id, "stream": stream, "after": tuple(sorted(after))}
    kind = draw(
        st.sampled_from(
            [
                "put",
                "put",
                "wait",
                "wait",
                "signal",
                "copy",
                "copy",
                "fill",
                "reduce",
                "collective",
                "fused",
            ]
        )
    )
    if kind == "put":
        to = draw(st.sampled_from([Peer(1), Peer(1), SELF]))
        signal = draw(st.none() | words(remote=False))
        if signal is not None:
            signal = FlagRef(signal.flag, signal.index, to)
        source = draw(views(("x", "s"), 1))
        value = Epoch() if signal is None else draw(values(signal.flag, world_size))
        if signal is not None and signal.flag == "c":
            value = Epoch(0, 1)
        return Put(
            source=source,
            destination=draw(views(("g", "g", "h", "z"), 1, on=to)),
            signal=signal,
            value=value,
            **common,
        )
    if kind == "signal":
        first = draw(words(remote=True))
        more = draw(st.booleans())
        named = (first, FlagRef(first.flag, first.index, first.on + 1)) if more else (first,)
        value = Epoch(0, 1) if first.flag == "c" else draw(values(first.flag, world_size))
        return Signal(words=named, value=value, **common)
    if kind == "wait":
        word = draw(words(remote=False))
        return Wait(words=(word,), value=draw(values(word.flag, world_size)), **common)
    if kind == "copy":
        return Copy(
            source=draw(views(("x", "g", "s", "h"), 1)),
            destination=draw(views(("y", "s", "g", "z"), 1)),
            **common,
        )
    if kind == "fill":
        return Fill(destination=draw(views(("y", "s", "g"), 2)), **common)
    if kind == "reduce":
        inputs = draw(views(("g", "s"), 2)), draw(views(("g", "s"), 2))
        return Reduce(inputs=inputs, out=draw(views(("y", "s"), 2)), **common)
    if kind == "fused":
        gated = draw(st.booleans())
        emits = draw(st.booleans())
        word = FlagRef("e", draw(st.integers(0, 1)))
        return GatherGemm(
            b=View("t", Fixed(0, 1), Fixed(0, 1)),
            tiling=Tiling(1, 1, workers=4),
            groups=tuple(
                TileGroup(
                    a=View("s", Fixed(row, row + 1)),
                    out=View("y", Fixed(row, row + 1)),
                    gates=(Gate(word),) if gated and row else (),
                    emits=(
                        Emit(
                            View("y", Fixed(row, row + 1)),
                            View("z", Fixed(row, row + 1), on=Peer(1)),
                            FlagRef("e", 1, Peer(1)) if row else None,
                            mode=draw(st.sampled_from(["set", "add"])),
                        ),
                    )
                    if emits
                    else (),
                )
                for row in range(2)
            ),
            **common,
        )
    return Collective(collective="all_gather", source=View("x"), destination=View("h"), **common)


@st.composite
def exchanges(draw: st.DrawFn, number: int, earlier: list[Operation]) -> list[Operation]:
    """A put or signal to the neighbour, and the wait for that of the other neighbour."""
    flag = draw(st.sampled_from("eeecb"))
    index = 0 if flag == "c" else draw(st.integers(0, 1))
    ids = [one.id for one in earlier]
    after = tuple(sorted(draw(st.sets(st.sampled_from(ids), max_size=2)))) if ids else ()
    value = {"e": Epoch(1, 1), "c": Epoch(0, 1), "b": Epoch(0, 1)}[flag]
    one, other = (draw(st.sampled_from(STREAMS)) for _ in range(2))
    sent: Operation
    if draw(st.booleans()):
        sent = Put(
            id=f"op{number}",
            stream=one,
            after=after,
            source=draw(views(("x", "s"), 1)),
            destination=draw(views(("g", "g", "z"), 1, on=Peer(1))),
            signal=FlagRef(flag, index, Peer(1)),
            value=value,
        )
    else:
        sent = Signal(
            id=f"op{number}",
            stream=one,
            after=after,
            words=(FlagRef(flag, index, Peer(1)),),
            value=value,
        )
    seen = Wait(
        id=f"op{number}w",
        stream=other,
        words=(FlagRef(flag, index),),
        value=Epoch(1, 1) if flag != "b" else Epoch(0, 1),
    )
    return [sent, seen] if draw(st.integers(0, 5)) else [seen, sent]


@st.composite
def bodies(draw: st.DrawFn, world_size: int, most: int) -> Body:
    made: list[Operation] = []
    wanted = draw(st.integers(1, most))
    while len(made) < wanted:
        if draw(st.integers(0, 2)):
            made += draw(exchanges(len(made), made))
        else:
            made.append(draw(operations(len(made), made, world_size)))
    return Body(tuple(made))


@st.composite
def programs(draw: st.DrawFn, most: int = 6) -> Program:
    """Programs of two or three ranks and a handful of operations, most of them unsafe."""
    world_size = draw(st.sampled_from([2, 2, 2, 3]))
    slots = draw(st.integers(1, 2))
    alike = draw(st.integers(0, 3)) > 0
    count = 1 if alike else world_size
    most = most if world_size == 2 else 3
    return Program(
        name="tiny",
        variant="random",
        world_size=world_size,
        shape=(),
        dtype="fp32",
        transport="test",
        buffers=buffers(
            world_size,
            slots,
            draw(st.sampled_from(["zero", "undefined"])),
            draw(st.integers(0, 4)) > 0,
        ),
        flags=flags(draw(st.sampled_from([1, slots])), draw(st.integers(0, 1))),
        phases=(
            Phase(
                "call",
                tuple(draw(bodies(world_size, most)) for _ in range(count)),
                () if alike else tuple(range(world_size)),
            ),
        ),
    )
