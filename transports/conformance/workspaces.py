"""Cases about workspaces, set-up and what a transport says of itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

from stretto.schedules.language import (
    ALL_COLLECTIVES,
    ALL_VERBS,
    CollectiveKind,
    Epoch,
    Flag,
    InvalidInput,
    RunFailed,
    Unsupported,
    Verb,
    Word,
)
from stretto.transports.conformance.case import Case, RankContext, expect, has_flags
from stretto.transports.interface import Launch, Memory, Transport, Workspace

__all__ = ["CASES"]


def capabilities_are_honest(context: RankContext) -> None:
    """Every claimed verb can be prepared, every other one raises `Unsupported`."""
    transport = context.transport()
    offered = transport.offered()
    expect(offered.transport == transport.name, "the capabilities bear another name")
    expect(transport.available().usable, "it is used, and yet says that it is not available")
    flags = (Flag("flag", count=context.world_size),) if has_flags(offered) else ()
    workspace = context.workspace(transport, buffers=(("data", 4096, 1),), flags=flags)
    for verb in ALL_VERBS:
        for kind in ALL_COLLECTIVES if verb == "collective" else (None,):
            try:
                _prepared(context, transport, workspace, verb, kind)
                refused = False
            except Unsupported:
                refused = True
            claimed = offered.lacks(verb, kind) is None
            expect(claimed is not refused, f"{verb} {kind or ''}: claimed {claimed}, not so")
    try:
        workspace.device_handle()
        reachable = True
    except Unsupported:
        reachable = False
    expect(reachable is bool(offered.kernel_access), "kernel_access and device_handle disagree")
    transport.barrier()


def _prepared(
    context: RankContext,
    transport: Transport,
    workspace: Workspace,
    verb: Verb,
    kind: CollectiveKind | None,
) -> Launch:
    at = workspace.address("data", rank=context.rank, slot=0)
    word = Word("flag", context.rank, 0, 0)
    if verb == "put":
        return transport.put(context.local(b"data"), Memory(at, 1, 4, 4), **context.on("main"))
    if verb == "signal":
        return transport.signal(workspace, [word], Epoch(), **context.on("main"))
    if verb == "wait":
        return transport.wait(workspace, [word], Epoch(), **context.on("main"))
    ranks = context.world_size
    source = 1 if kind == "all_gather" else ranks
    destination = 1 if kind == "reduce_scatter" else ranks
    return transport.collective(
        workspace,
        kind or "all_gather",
        context.local(bytes(16 * source), rows=source),
        Memory(at, destination, 16, 16),
        dtype="fp32",
        blocks=[1] * ranks,
        **context.on("main"),
    )


def addresses_are_disjoint(context: RankContext) -> None:
    """No two slots, ranks, buffers, flag words or workspaces share a byte."""
    transport = context.transport()
    flags: tuple[Flag, ...] = (Flag("one", count=3, slots=2), Flag("two", count=1))
    flags = flags if has_flags(transport.offered()) else ()
    spans: list[tuple[int, int]] = []
    for sizes in ((100, 4097), (1, 64)):
        buffers = (("a", sizes[0], 2), ("b", sizes[1], 3), ("none", 0, 1))
        workspace = context.workspace(transport, buffers=buffers, flags=flags)
        spans += [
            (workspace.address(name, rank=rank, slot=slot), slot_bytes)
            for rank in context.reachable(transport)
            for name, slot_bytes, slots in buffers
            for slot in range(slots)
        ]
        words = [word for word in workspace.snapshot() if word.home == context.rank]
        asked = sum(flag.count * flag.slots for flag in flags)
        expect(len(words) == asked, f"{asked} words were asked for, there are {len(words)}")
        spans += [(workspace.word_address(word), 4) for word in words]
        for word in words:
            expect(workspace.word_address(word) % 4 == 0, f"{word} is not aligned")
    filled = sorted(span for span in spans if span[1])
    for (begin, size), (following, _) in pairwise(filled):
        expect(begin + size <= following, f"{size} bytes at {begin:#x} reach {following:#x}")
    transport.barrier()


def memory_is_symmetric(context: RankContext) -> None:
    """What a rank writes into its own slot is what the others see at that rank's address."""
    transport = context.transport()
    workspace = context.workspace(transport, buffers=(("data", 64, 2),))
    for slot in range(2):
        own = workspace.address("data", rank=context.rank, slot=slot)
        context.device.write(own, bytes([16 * context.rank + slot]) * 64)
    transport.barrier()
    for rank in range(context.world_size):
        for slot in range(2):
            data = context.device.read(workspace.address("data", rank=rank, slot=slot), 64)
            expect(data == bytes([16 * rank + slot]) * 64, f"rank {rank} slot {slot}: {data!r}")
    transport.barrier()


def flags_begin_as_declared(context: RankContext) -> None:
    """Flags hold their initial value, and an unknown word or buffer is refused."""
    transport = context.transport()
    flags = (
        Flag("zero"),
        Flag("high", count=2, slots=2, initial=2**32 - 1),
        Flag("box", kind="mailbox", initial=1),
    )
    workspace = context.workspace(transport, buffers=(("data", 8, 1),), flags=flags)
    initial = {flag.name: flag.initial for flag in flags}
    transport.barrier()
    for word, held in workspace.snapshot().items():
        expect(held == initial[word.flag], f"{word} holds {held}")
    refused = 0
    attempts: tuple[Callable[[], object], ...] = (
        lambda: workspace.word_address(Word("zero", 0, 0, 1)),
        lambda: workspace.word_address(Word("none", 0, 0, 0)),
        lambda: workspace.word_address(Word("zero", context.world_size, 0, 0)),
        lambda: workspace.address("data", rank=0, slot=1),
        lambda: workspace.address("none", rank=0, slot=0),
    )
    for attempt in attempts:
        try:
            attempt()
        except InvalidInput:
            refused += 1
    expect(refused == 5, "a word or buffer that does not exist has an address")
    transport.barrier()


def layouts_must_agree(context: RankContext) -> None:
    """Different layouts are refused on every rank, and the transport is still good."""
    transport = context.transport()
    last = context.rank == context.world_size - 1
    flagged = has_flags(transport.offered())
    for buffers, flags in (
        ((("data", 65 if last else 64, 1),), ()),
        ((("data", 64, 1),), (Flag("flag", count=2 if last else 1),)),
        ((("other" if last else "data", 64, 1),), ()),
    ):
        if flags and not flagged:
            continue
        try:
            context.workspace(transport, buffers=buffers, flags=flags)
        except InvalidInput:
            continue
        expect(False, "ranks that ask for different workspaces got one")
    context.workspace(transport, buffers=(("data", 64, 1),))
    transport.barrier()


def barrier_holds(context: RankContext) -> None:
    """No rank leaves a barrier before the last one has come; many in a row."""
    transport = context.transport()
    for turn in range(3):
        late = turn % context.world_size
        if context.rank == late:
            time.sleep(0.1)
            context.tell(f"came/{turn}")
        transport.barrier()
        expect(context.told(f"came/{turn}"), f"barrier {turn} was left before rank {late} came")
    for _ in range(50):
        transport.barrier()


def transports_are_apart(context: RankContext) -> None:
    """Two transports of one process, at the same time, and one after another, do not mix."""
    first, second = context.transport(), context.transport()
    one = context.workspace(first, buffers=(("data", 64, 1),))
    two = context.workspace(second, buffers=(("data", 64, 1),))
    for number, workspace in enumerate((one, two)):
        own = workspace.address("data", rank=context.rank, slot=0)
        context.device.write(own, bytes([number + 1]) * 64)
    first.barrier()
    first.close()
    second.barrier()
    for rank in context.reachable(second):
        data = context.device.read(two.address("data", rank=rank, slot=0), 64)
        expect(data == b"\2" * 64, f"rank {rank}: {data!r}")
    second.barrier()
    context.transport().barrier()


def closing_is_final(context: RankContext) -> None:
    """A second close does nothing; what was prepared raises afterwards and does no harm."""
    transport = context.transport()
    offered = transport.offered()
    flags = (Flag("flag"),) if has_flags(offered) else ()
    workspace = context.workspace(transport, buffers=(("data", 4096, 1),), flags=flags)
    launches = [
        _prepared(context, transport, workspace, verb, kind)
        for verb in ALL_VERBS
        for kind in (offered.collectives if verb == "collective" else (None,))
        if offered.lacks(verb, kind) is None
    ]
    transport.barrier()
    for _ in range(2):
        workspace.close()
    for _ in range(2):
        transport.close()
    for launch in launches:
        try:
            launch(0)
        except RunFailed:
            continue
        expect(False, "a verb ran on a closed workspace")


CASES = (
    Case(capabilities_are_honest),
    Case(addresses_are_disjoint),
    Case(memory_is_symmetric, maps_peers=True),
    Case(flags_begin_as_declared, ("signal",)),
    Case(layouts_must_agree, least_ranks=2),
    Case(barrier_holds),
    Case(transports_are_apart),
    Case(closing_is_final),
)
