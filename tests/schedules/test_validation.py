"""Every contradiction in a Program is refused, and says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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
    Fixed,
    Flag,
    FlagRef,
    Peer,
    Phase,
    Program,
    ProgramError,
    Signal,
    View,
    Wait,
)

Change = Callable[[Program], Program]


def operation(which: str, /, **changes) -> Change:
    """Change fields of one operation, in every body that has it."""

    def change(program: Program) -> Program:
        def changed(body: Body) -> Body:
            return Body(
                tuple(
                    replace(found, **changes) if found.id == which else found
                    for found in body.operations
                )
            )

        phases = tuple(
            replace(phase, bodies=tuple(changed(body) for body in phase.bodies))
            for phase in program.phases
        )
        return replace(program, phases=phases)

    return change


def group(id: str, number: int, **changes) -> Change:
    """Change fields of one group of tiles of a fused kernel."""

    def change(program: Program) -> Program:
        kernel = program.phases[0].bodies[0][id]
        groups = list(kernel.groups)
        groups[number] = replace(groups[number], **changes)
        return operation(id, groups=tuple(groups))(program)

    return change


def tiling(**changes) -> Change:
    def change(program: Program) -> Program:
        kernel = program.phases[0].bodies[0]["gathers"]
        return operation("gathers", tiling=replace(kernel.tiling, **changes))(program)

    return change


def buffer(name: str, **changes) -> Change:
    return lambda program: replace(
        program,
        buffers=tuple(
            replace(found, **changes) if found.name == name else found for found in program.buffers
        ),
    )


def flag(name: str, **changes) -> Change:
    return lambda program: replace(
        program,
        flags=tuple(
            replace(found, **changes) if found.name == name else found for found in program.flags
        ),
    )


def fields(**changes) -> Change:
    return lambda program: replace(program, **changes)


def more(field: str, item: object) -> Change:
    return lambda program: replace(program, **{field: (*getattr(program, field), item)})


def phase(**changes) -> Change:
    """Change fields of the second phase, which has a body for each of two ranks."""
    return lambda program: replace(
        program, phases=(program.phases[0], replace(program.phases[1], **changes))
    )


def appended(new: object) -> Change:
    """Append an operation to what rank 1 alone does in the second phase."""

    def change(program: Program) -> Program:
        first, second = program.phases[1].bodies
        return phase(bodies=(first, Body((*second.operations, new))))(program)

    return change


N = Extent(1)
HEADER = [
    (fields(world_size=0), "world_size is 0; it must be at least 1"),
    (fields(dtype="bf17"), "dtype 'bf17' is not one of bf16, "),
    (fields(schema_version=0), "schema version 0, this Stretto reads version 2"),
    (fields(phases=()), "needs at least one phase"),
    (more("buffers", Buffer("y", "input", "bf16", N, N)), "two buffers are called 'y'"),
    (more("flags", Flag("box")), "two flags are called 'box'"),
    (more("phases", Phase("first", (Body(()),))), "two phases are called 'first'"),
    (flag("arrived", count=0), "flag 'arrived': count and slots must be at least 1"),
    (flag("arrived", slots=0), "flag 'arrived': count and slots must be at least 1"),
    (flag("box", initial=2), "flag 'box': a mailbox holds 0 or 1"),
    (flag("count", initial=2**32), "flag 'count': initial must fit 32 bits"),
    (flag("count", initial=-1), "flag 'count': initial must fit 32 bits"),
    (buffer("z", dtype="bf17"), "buffer 'z': dtype 'bf17' is not known"),
    (buffer("all", slots=0), "buffer 'all': slots must be at least 1"),
    (buffer("z", rows=Extent(-1)), "buffer 'z': sizes must not be negative"),
    (buffer("z", columns=Extent(-1)), "buffer 'z': sizes must not be negative"),
    (buffer("x", slots=2, reuse="release"), "buffer 'x': a buffer of the caller has one slot"),
    (phase(repeats=0), "phase 'second': repeats must be at least 1"),
    (phase(bodies=()), "phase 'second' has no body"),
    (phase(body_of=()), "phase 'second': body_of must name each rank's body"),
    (phase(body_of=(0,)), "phase 'second': body_of must give each rank one of the bodies"),
    (phase(body_of=(0, 2)), "phase 'second': body_of must give each rank one of the bodies"),
    (phase(body_of=(0, -1)), "phase 'second': body_of must give each rank one of the bodies"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), HEADER, ids=[message for _, message in HEADER])
def test_headers(everything: Program, change: Change, message: str) -> None:
    with pytest.raises(ProgramError, match=message) as caught:
        change(everything)
    assert caught.value.operation is None


NEXT = Peer(1)
W, Y, Z, SUM = View("w"), View("y"), View("z"), View("sum")
OPERATIONS = [
    # id and edges
    (operation("fill", id=""), 0, "side|compute", "id and stream must not be empty"),
    (operation("fill", stream=""), 0, "", "id and stream must not be empty"),
    (operation("fill", id="gemm"), 0, "compute", "another operation of this body has the same id"),
    (operation("fill", after=("copy",)), 0, "compute", "'copy', which is not enqueued before it"),
    (operation("fill", after=("fill",)), 0, "compute", "'fill', which is not enqueued before it"),
    # views
    (operation("copy", source=View("q")), 0, "side", "there is no buffer 'q'"),
    (operation("copy", destination=View("x")), 0, "side", "it writes 'x', which it may only read"),
    (operation("gemm", out=View("w")), 0, "compute", "it writes 'w', which it may only read"),
    (
        operation("copy", source=View("sum", on=NEXT)),
        0,
        "side",
        "only a put or a kernel's stores may",
    ),
    (
        operation("copy", destination=View("sum", on=NEXT)),
        0,
        "side",
        "only a put or a kernel's stores may",
    ),
    (
        operation("put", source=View("sum", on=NEXT)),
        0,
        "send",
        "only a put or a kernel's stores may",
    ),
    (
        operation("put", destination=View("z", on=NEXT)),
        0,
        "send",
        "buffer 'z' is local, a peer cannot reach it",
    ),
    (
        operation("put", destination=View("all", on=Peer(2, absolute=True))),
        0,
        "send",
        "there is no rank 2 among 2",
    ),
    (
        operation("put", destination=View("all", on=Peer(-1, absolute=True))),
        0,
        "send",
        "there is no rank -1 among 2",
    ),
    (
        operation("put", source=View("x", Block(NEXT))),
        0,
        "send",
        "rank 0 stores its own block alone, not that of rank 1",
    ),
    (
        operation("fill", destination=View("z", Fixed(0, 10))),
        0,
        "compute",
        r"\[0, 10\) is outside the 9 stored elements",
    ),
    (
        operation("fill", destination=View("z", columns=Fixed(2, 4))),
        0,
        "compute",
        r"\[2, 4\) is outside the 3 stored elements",
    ),
    # words
    (operation("fills", words=(FlagRef("q"),)), 0, "send", "there is no flag 'q'"),
    (operation("fills", words=()), 0, "send", "it names no word"),
    (operation("empties", words=()), 0, "compute", "it names no word"),
    (
        operation("put", signal=FlagRef("arrived", 2, on=NEXT)),
        0,
        "send",
        "flag 'arrived' has 2 words, not one at 2",
    ),
    (
        operation("put", signal=FlagRef("box", NEXT), value=Epoch(0, 1)),
        0,
        "send",
        "flag 'box' has 1 words, not one at 1",
    ),
    (
        operation("fills", words=(FlagRef("box", on=Peer(5, absolute=True)),)),
        0,
        "send",
        "there is no rank 5 among 2",
    ),
    (
        operation("empties", words=(FlagRef("box", on=NEXT),)),
        0,
        "compute",
        "a wait looks at a word of its own rank only",
    ),
    (operation("fills", value=Epoch()), 0, "send", "'box' is a mailbox; its value is always 1"),
    (
        operation("put", value=Epoch(0, 1)),
        0,
        "send",
        "epoch flag 'arrived' needs a value that grows with the calls",
    ),
    # shapes
    (operation("gemm", a=View("all", Fixed(0, 4))), 0, "compute", r"rows \(m\): 4 against 9"),
    (operation("gemm", b=View("w", columns=Fixed(0, 2))), 0, "compute", r"\(k\): 4 against 2"),
    (operation("gemm", b=View("w", Fixed(0, 2))), 0, "compute", r"b and out: 2 against 3"),
    (
        operation("gemm", accumulate=View("y", Fixed(0, 4))),
        0,
        "compute",
        "accumulate and out differ: 4 against 9",
    ),
    (
        operation("gemm", accumulate=View("y", columns=Fixed(0, 1))),
        0,
        "compute",
        "accumulate and out differ: 1 against 3",
    ),
    (
        operation("copy", source=View("z", Fixed(1, 9))),
        0,
        "side",
        "source and destination differ in rows: 8 against 9",
    ),
    (
        operation("copy", source=View("z", columns=Fixed(1, 3))),
        0,
        "side",
        "source and destination differ in columns: 2 against 3",
    ),
    (operation("reduce", inputs=(Z, View("all"))), 0, "side", "columns: 4 against 3"),
    (operation("rows", inputs=(Z, W)), 0, "side", "its views differ in rows: 3 against 9"),
    (operation("put", mode="add"), 0, "send", "only a fused kernel can add into a peer's memory"),
    (
        operation("put", destination=View("all", Block(Peer(0, absolute=True)), on=NEXT)),
        1,
        "send",
        "source and destination differ in rows: 4 against 5",
    ),
    # collectives
    (operation("collective", source=View("all")), 0, "compute", "differ in columns"),
    (operation("collective", collective="all_gather"), 0, "compute", "'y' sharded by rows"),
    (operation("collective", destination=SUM), 0, "compute", "'sum' sharded by rows"),
    # fused kernels
    (tiling(tile_m=0), 0, "compute", "tile_m, tile_n and workers must be at least 1"),
    (tiling(tile_n=0), 0, "compute", "tile_m, tile_n and workers must be at least 1"),
    (tiling(workers=0), 0, "compute", "tile_m, tile_n and workers must be at least 1"),
    (tiling(communication_sms=-1), 0, "compute", "tile_m, tile_n and workers"),
    (operation("gathers", groups=()), 0, "compute", "needs at least one group of tiles"),
    (group("gathers", 0, a=View("all")), 0, "compute", r"rows \(m\): 9 against 5"),
    (group("gathers", 0, a=Y, out=Y), 0, "compute", r"columns \(k\): 3 against 4"),
    (
        group("gathers", 0, out=View("y", Block(Peer(0)), Fixed(0, 2))),
        0,
        "compute",
        "n is not the same in b and out: 3 against 2",
    ),
    (group("gathers", 0, emits=(Emit(source=Z),)), 0, "compute", "both source and destination"),
    (
        group("gathers", 0, emits=(Emit(destination=View("sum", on=NEXT)),)),
        0,
        "compute",
        "an emit has both source and destination, or none",
    ),
    (group("gathers", 0, emits=(Emit(),)), 0, "compute", "without data must signal a word"),
    (
        group("gathers", 0, emits=(Emit(View("z", Fixed(0, 2)), View("sum", on=NEXT)),)),
        0,
        "compute",
        "source and destination differ in rows: 2 against 9",
    ),
]


@pytest.mark.parametrize(
    ("change", "rank", "stream", "message"), OPERATIONS, ids=[case[3] for case in OPERATIONS]
)
def test_operations(
    everything: Program, change: Change, rank: int, stream: str, message: str
) -> None:
    with pytest.raises(ProgramError, match=message) as caught:
        change(everything)
    error = caught.value
    assert error.rank == rank
    assert error.stream in stream.split("|")
    known = {found.id for phase in everything.phases for found in phase.bodies[0].operations}
    assert error.operation in known | {""}
    if error.operation and stream:
        where = f"rank {rank}, stream {error.stream}, operation {error.operation}: "
        assert str(error).startswith(where)


def test_every_body_is_checked_for_the_ranks_that_run_it(everything: Program) -> None:
    good = Copy(
        id="own",
        stream="side",
        source=View("z"),
        destination=View("sum", on=Peer(1, absolute=True)),
    )
    appended(good)(everything)  # rank 1 itself: no peer's memory is touched
    wrong = replace(good, destination=View("sum", on=Peer(0, absolute=True)))
    with pytest.raises(ProgramError, match=r"^rank 1, stream side, operation own: only a put or"):
        appended(wrong)(everything)


def test_collectives_agree_in_dtype_and_rows(everything: Program) -> None:
    for name, changes, message in (
        ("part", {"dtype": "fp32"}, "source and destination differ in dtype"),
        ("part", {"rows": Extent(8, "shard")}, "source and destination differ in rows"),
    ):
        with pytest.raises(ProgramError, match=message) as caught:
            buffer(name, **changes)(everything)
        assert caught.value.operation == "collective"
    same = Collective(
        id="sums",
        stream="side",
        collective="all_reduce",
        source=View("z"),
        destination=View("y"),
    )
    assert appended(same)(everything)


def test_moves_agree_in_dtype(everything: Program) -> None:
    with pytest.raises(ProgramError, match="operation put: 'x' and 'all' differ in dtype"):
        buffer("x", dtype="fp16")(everything)
    with pytest.raises(ProgramError, match="operation scatters: 'z' and 'sum' differ in dtype"):
        buffer("sum", dtype="fp32")(everything)


def test_an_epoch_that_stands_still_is_refused_even_in_a_single_call(everything: Program) -> None:
    alone = replace(everything, phases=everything.phases[:1])
    with pytest.raises(ProgramError, match="grows with the calls"):
        operation("put", value=Epoch(0, 1))(alone)


def test_signals_and_waits_may_name_any_of_their_words(everything: Program) -> None:
    words = tuple(FlagRef("arrived", index, on=Peer(1)) for index in range(2))
    wait = tuple(FlagRef("arrived", index) for index in range(2))
    appended(Signal(id="s", stream="side", words=words))(everything)
    appended(Wait(id="w", stream="side", words=wait))(everything)
    # The one wrong word among several is found.
    with pytest.raises(ProgramError, match=r"rank 1, .*operation w: .* not one at 2"):
        appended(Wait(id="w", stream="side", words=(*wait, FlagRef("arrived", 2))))(everything)
