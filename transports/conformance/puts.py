"""Cases about put: what arrives, when, and what stays as it was."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from stretto.schedules.language import CheckFailed, Epoch, Flag, InvalidInput, Word
from stretto.transports.conformance.case import Case, RankContext, expect
from stretto.transports.interface import Memory

__all__ = ["CASES"]

_PATTERNS = 4


@lru_cache(maxsize=16)
def _pattern(rank: int, number: int, size: int) -> bytes:
    return np.random.default_rng((rank, number)).bytes(size)


def data_is_there_before_its_signal(context: RankContext) -> None:
    """Whoever has seen the signal sees all bytes, round after round, small and big."""
    transport = context.transport()
    flags = (Flag("arrived", slots=2), Flag("released"))
    for size, rounds in ((1, 100), (4099, 100), (2_500_003, 12)):
        workspace = context.workspace(transport, buffers=(("data", size, 2),), flags=flags)
        sources = [
            context.local(_pattern(context.rank, number, size)) for number in range(_PATTERNS)
        ]
        targets = [
            Memory(workspace.address("data", rank=context.following, slot=slot), 1, size, size)
            for slot in range(2)
        ]
        send, receive = context.on("send"), context.on("receive")
        credit = transport.wait(
            workspace, [Word("released", context.rank, 0, 0)], Epoch(1, -1), **send
        )
        puts = [
            transport.put(sources[number], targets[number % 2], **send)
            for number in range(_PATTERNS)
        ]
        signals, waits = [], []
        for slot in range(2):
            there = [Word("arrived", context.following, slot, 0)]
            here = [Word("arrived", context.rank, slot, 0)]
            signals.append(transport.signal(workspace, there, Epoch(), **send))
            waits.append(transport.wait(workspace, here, Epoch(), **receive))
        release = transport.signal(
            workspace, [Word("released", context.preceding, 0, 0)], Epoch(), **receive
        )
        for call in range(rounds):
            context.stream("send").run(credit, call)
            context.stream("send").run(puts[call % _PATTERNS], call)
            context.stream("send").run(signals[call % 2], call)
        for call in range(rounds):
            context.run(waits[call % 2], call, on="receive")
            at = workspace.address("data", rank=context.rank, slot=call % 2)
            arrived = context.device.read(at, size)
            expected = _pattern(context.preceding, call % _PATTERNS, size)
            _expect_same(arrived, expected, f"{size} bytes, round {call}")
            context.run(release, call, on="receive")
        context.stream("send").synchronise()


def everyone_reaches_everyone(context: RankContext) -> None:
    """A rank can put into every rank's memory, its own included."""
    transport, ranks, size = context.transport(), context.world_size, 1000
    workspace = context.workspace(
        transport, buffers=(("data", ranks * size, 1),), flags=(Flag("arrived", count=ranks),)
    )
    for peer in range(ranks):
        source = context.local(_pattern(context.rank, peer, size))
        at = workspace.address("data", rank=peer, slot=0) + context.rank * size
        context.run(transport.put(source, Memory(at, 1, size, size), **context.on("main")))
        words = [Word("arrived", peer, 0, context.rank)]
        context.run(transport.signal(workspace, words, Epoch(), **context.on("main")))
    words = [Word("arrived", context.rank, 0, peer) for peer in range(ranks)]
    context.run(transport.wait(workspace, words, Epoch(), **context.on("main")))
    for peer in range(ranks):
        at = workspace.address("data", rank=context.rank, slot=0) + peer * size
        arrived, expected = context.device.read(at, size), _pattern(peer, context.rank, size)
        _expect_same(arrived, expected, f"from rank {peer}")
    transport.barrier()


def data_is_forwarded(context: RankContext) -> None:
    """A ring: what arrived from one neighbour is put to the other, straight out of the slot."""
    transport, ranks, size = context.transport(), context.world_size, 70_001
    workspace = context.workspace(
        transport, buffers=(("data", ranks * size, 1),), flags=(Flag("arrived", count=ranks),)
    )
    own = workspace.address("data", rank=context.rank, slot=0)
    there = workspace.address("data", rank=context.following, slot=0)
    context.device.write(own + context.rank * size, _pattern(context.rank, 0, size))
    main = context.on("main")
    for step in range(1, ranks):
        passed, awaited = (context.rank - step + 1) % ranks, (context.rank - step) % ranks
        source = Memory(own + passed * size, 1, size, size)
        target = Memory(there + passed * size, 1, size, size)
        context.run(transport.put(source, target, **main))
        signalled = [Word("arrived", context.following, 0, passed)]
        context.run(transport.signal(workspace, signalled, Epoch(), **main))
        words = [Word("arrived", context.rank, 0, awaited)]
        context.run(transport.wait(workspace, words, Epoch(), **main))
    for rank in range(ranks):
        arrived, expected = context.device.read(own + rank * size, size), _pattern(rank, 0, size)
        _expect_same(arrived, expected, f"shard {rank}")
    transport.barrier()


def rectangles_are_exact(context: RankContext) -> None:
    """A strided put writes its rectangle and not one byte beside it."""
    transport = context.transport()
    step = transport.offered().alignment_bytes
    rows, pitch = 37, 101 * step
    size = rows * pitch
    workspace = context.workspace(transport, buffers=(("data", size, 1),))
    own = workspace.address("data", rank=context.rank, slot=0)
    there = workspace.address("data", rank=context.following, slot=0)
    source = context.local(_pattern(context.rank, 0, size))
    given = _pattern(context.preceding, 0, size)
    main = context.on("main")
    # Row, rows, column, columns; in the source the rectangle lies two columns further right.
    for row, count, column, columns in (
        (3, 30, 7, 50),
        (0, 37, 0, 98),
        (5, 1, 1, 1),
        (1, 9, 90, 3),
    ):
        context.device.write(own, b"\xaa" * size)
        transport.barrier()
        at = row * pitch + column * step
        taken = Memory(source.address + at + 2 * step, count, columns * step, pitch)
        target = Memory(there + at, count, columns * step, pitch)
        context.run(transport.put(taken, target, **main))
        transport.barrier()
        expected = bytearray(b"\xaa" * size)
        for line in range(count):
            begin = at + line * pitch
            end = begin + columns * step
            expected[begin:end] = given[begin + 2 * step : end + 2 * step]
        found = context.device.read(own, size)
        _expect_same(found, bytes(expected), f"{count} x {columns} at {row}, {column}")
        transport.barrier()


def pitches_may_differ(context: RankContext) -> None:
    """A packed source fills a column of a wider matrix."""
    transport = context.transport()
    step = transport.offered().alignment_bytes
    rows, columns, pitch = 64, 9 * step, 50 * step
    workspace = context.workspace(transport, buffers=(("data", rows * pitch, 1),))
    own = workspace.address("data", rank=context.rank, slot=0)
    there = workspace.address("data", rank=context.following, slot=0)
    context.device.write(own, bytes(rows * pitch))
    source = context.local(_pattern(context.rank, 0, rows * columns), rows=rows)
    transport.barrier()
    target = Memory(there + step, rows, columns, pitch)
    context.run(transport.put(source, target, **context.on("main")))
    transport.barrier()
    given, found = _pattern(context.preceding, 0, rows * columns), bytearray()
    data = context.device.read(own, rows * pitch)
    for row in range(rows):
        begin = row * pitch + step
        found += data[begin : begin + columns]
    _expect_same(bytes(found), given, "the column")
    expect(sum(data) == sum(given), "bytes beside the column have changed")
    transport.barrier()


def empty_put_still_signals(context: RankContext) -> None:
    """A put of no rows moves nothing; the signal behind it arrives all the same."""
    transport = context.transport()
    workspace = context.workspace(transport, buffers=(("data", 64, 1),), flags=(Flag("arrived"),))
    own = workspace.address("data", rank=context.rank, slot=0)
    there = workspace.address("data", rank=context.following, slot=0)
    context.device.write(own, b"\xaa" * 64)
    transport.barrier()
    source, main = context.local(bytes(64)), context.on("main")
    for rows, row_bytes in ((0, 64), (0, 0)):
        taken = Memory(source.address, rows, row_bytes, 64)
        context.run(transport.put(taken, Memory(there, rows, row_bytes, 64), **main))
    there_word = [Word("arrived", context.following, 0, 0)]
    context.run(transport.signal(workspace, there_word, Epoch(), **main))
    words = [Word("arrived", context.rank, 0, 0)]
    context.run(transport.wait(workspace, words, Epoch(), **main))
    expect(context.device.read(own, 64) == b"\xaa" * 64, "an empty put has written something")
    transport.barrier()


def wrong_puts_are_refused(context: RankContext) -> None:
    """Two sizes, or a destination outside the workspace, are errors at preparation."""
    transport = context.transport()
    workspace = context.workspace(transport, buffers=(("data", 64, 1), ("after", 64, 1)))
    there = workspace.address("data", rank=context.following, slot=0)
    source = context.local(bytes(4096))
    refused = 0
    for taken, target in (
        (Memory(source.address, 1, 64, 64), Memory(there, 1, 32, 32)),
        (Memory(source.address, 2, 32, 32), Memory(there, 1, 32, 32)),
        (Memory(source.address, 1, 65, 65), Memory(there, 1, 65, 65)),
        (Memory(source.address, 2, 16, 64), Memory(there, 2, 16, 64)),
        (Memory(source.address, 1, 64, 64), Memory(source.address + 64, 1, 64, 64)),
    ):
        try:
            transport.put(taken, target, **context.on("main"))
        except InvalidInput:
            refused += 1
    expect(refused == 5, f"{5 - refused} wrong puts were prepared")
    transport.barrier()


def _expect_same(found: bytes, expected: bytes, where: str) -> None:
    if found != expected:
        wrong = [place for place in range(len(expected)) if found[place] != expected[place]]
        raise CheckFailed(
            f"{where}: {len(wrong)} of {len(expected)} bytes are wrong, first {wrong[0]}, "
            f"last {wrong[-1]}"
        )


CASES = (
    Case(data_is_there_before_its_signal, ("put", "signal", "wait")),
    Case(everyone_reaches_everyone, ("put", "signal", "wait")),
    Case(data_is_forwarded, ("put", "signal", "wait")),
    Case(rectangles_are_exact, ("put",)),
    Case(pitches_may_differ, ("put",)),
    Case(empty_put_still_signals, ("put", "signal", "wait")),
    Case(wrong_puts_are_refused, ("put",)),
)
