"""Cases about signal and wait: epochs, counters, mailboxes."""

from __future__ import annotations

import time

from stretto.schedules.language import Epoch, Flag, InvalidInput, Verb, Word
from stretto.transports.conformance.case import Case, RankContext, expect

__all__ = ["CASES"]

_TURNS = 12
_ADDS = 200


def epochs_cross_the_wrap(context: RankContext) -> None:
    """Around the ring with epochs that run from below 2^32 to beyond; no wait passes early."""
    transport = context.transport()
    first = 2**32 - _TURNS // 2
    workspace = context.workspace(transport, flags=(Flag("turn", initial=first),))
    main, here = context.on("main"), Word("turn", context.rank, 0, 0)
    signal = transport.signal(
        workspace, [Word("turn", context.following, 0, 0)], Epoch(1, first + 1), **main
    )
    wait = transport.wait(workspace, [here], Epoch(1, first + 1), **main)
    for call in range(_TURNS):
        if context.rank == 0:
            context.tell(f"sent/0/{call}")
            context.run(signal, call)
        seen = context.run(wait, call)
        expect(
            context.told(f"sent/{context.preceding}/{call}"),
            f"wait {call} passed before its signal",
        )
        expected = (first + 1 + call) & 0xFFFFFFFF
        expect(tuple(seen) in ((), (expected,)), f"wait {call} saw {seen}, not {expected}")
        if context.rank:
            context.tell(f"sent/{context.rank}/{call}")
            context.run(signal, call)
    transport.barrier()
    last = (first + _TURNS) & 0xFFFFFFFF
    expect(workspace.read_word(here) == last, f"the word holds {workspace.read_word(here)}")
    transport.barrier()


def passed_epochs_stay_passed(context: RankContext) -> None:
    """Nothing is reset: a wait for an epoch long gone, or equal, passes at once."""
    transport = context.transport()
    workspace = context.workspace(transport, flags=(Flag("word", initial=2**32 - 2),))
    main = context.on("main")
    words = [Word("word", context.rank, 0, 0)]
    context.run(transport.signal(workspace, words, Epoch(0, 5), **main))
    for epoch in (2**32 - 2, 2**32 + 1, 0, 4, 5, 6 - 2**31):
        context.run(transport.wait(workspace, words, Epoch(0, epoch), **main))
    transport.barrier()


def counters_lose_no_add(context: RankContext) -> None:
    """All ranks, two streams each, add to one word at once, small and big, across the wrap."""
    transport, ranks = context.transport(), context.world_size
    start = 2**32 - 10
    workspace = context.workspace(transport, flags=(Flag("sum", kind="counter", initial=start),))
    word = Word("sum", 0, 0, 0)
    one, other = Epoch(0, 1), Epoch(0, 70_001)
    add = transport.signal(workspace, [word], one, **context.on("left"))
    add_more = transport.signal(workspace, [word], other, **context.on("right"))
    transport.barrier()
    for call in range(_ADDS):
        context.stream("left").run(add, call)
        context.stream("right").run(add_more, call)
    total = start + ranks * _ADDS * (one.offset + other.offset)
    if context.rank == 0:
        wait = transport.wait(workspace, [word], Epoch(0, total), **context.on("main"))
        context.run(wait)
    for name in ("left", "right"):
        context.stream(name).synchronise()
    transport.barrier()
    held = workspace.read_word(word) if context.rank == 0 else total & 0xFFFFFFFF
    expect(held == total & 0xFFFFFFFF, f"the counter holds {held}, not {total & 0xFFFFFFFF}")
    transport.barrier()


def counters_reach_a_threshold(context: RankContext) -> None:
    """A wait passes when all ranks have added, call after call, and never before."""
    transport, ranks = context.transport(), context.world_size
    workspace = context.workspace(transport, flags=(Flag("sum", kind="counter"),))
    main = context.on("main")
    everywhere = [Word("sum", peer, 0, 0) for peer in range(ranks)]
    add = transport.signal(workspace, everywhere, Epoch(0, 1), **main)
    here = [Word("sum", context.rank, 0, 0)]
    wait = transport.wait(workspace, here, Epoch(ranks, ranks), **main)
    for call in range(5):
        if context.rank == call % ranks:
            time.sleep(0.03)
        context.tell(f"added/{context.rank}/{call}")
        context.run(add, call)
        context.run(wait, call)
        for peer in range(ranks):
            expect(context.told(f"added/{peer}/{call}"), f"call {call}: rank {peer} had not added")
    transport.barrier()


def mailboxes_have_depth_one(context: RankContext) -> None:
    """A second signal waits until the first one has been taken; none is lost or merged."""
    transport = context.transport()
    workspace = context.workspace(transport, flags=(Flag("box", kind="mailbox"),))
    there = [Word("box", context.following, 0, 0)]
    here = [Word("box", context.rank, 0, 0)]
    fill = transport.signal(workspace, there, Epoch(0, 1), **context.on("send"))
    take = transport.wait(workspace, here, Epoch(0, 1), **context.on("receive"))
    for call in range(100):
        context.stream("send").run(fill, call)
    time.sleep(0.1)  # the second one waits by now
    for call in range(100):
        context.stream("receive").run(take, call)
    context.stream("send").synchronise()
    context.stream("receive").synchronise()
    transport.barrier()
    held = workspace.read_word(here[0])
    expect(held == 0, f"after as many waits as signals the mailbox holds {held}")
    transport.barrier()


def many_words_at_once(context: RankContext) -> None:
    """One signal sets words of all ranks; one wait holds until the last of its words has come."""
    transport, ranks = context.transport(), context.world_size
    flags = (Flag("a", count=ranks, slots=2), Flag("b", count=ranks))
    workspace = context.workspace(transport, flags=flags)
    main = context.on("main")
    for slot in range(2):
        everywhere = [
            word
            for peer in range(ranks)
            for word in (Word("a", peer, slot, context.rank), Word("b", peer, 0, context.rank))
        ]
        here = [
            word
            for peer in range(ranks)
            for word in (Word("a", context.rank, slot, peer), Word("b", context.rank, 0, peer))
        ]
        late = ranks - 1
        if context.rank == late:
            time.sleep(0.05)
            context.tell(f"late/{slot}")
        context.run(transport.signal(workspace, everywhere, Epoch(0, slot + 1), **main))
        seen = context.run(transport.wait(workspace, here, Epoch(0, slot + 1), **main))
        expect(context.told(f"late/{slot}"), f"the wait passed before rank {late} signalled")
        expect(len(seen) in (0, len(here)), f"{len(here)} words were awaited, {len(seen)} reported")
        transport.barrier()


def streams_are_independent(context: RankContext) -> None:
    """A wait holds its own stream alone: another stream of the same rank goes on and frees it."""
    transport = context.transport()
    names = ("one", "two", "three", "four")
    flags = (Flag("ball", count=len(names)), Flag("gate", count=len(names)))
    workspace = context.workspace(transport, flags=flags)
    for place, name in enumerate(names):
        # Each stream begins held, the last one frees the one before it, and so on to the first.
        on, here = context.on(name), [Word("gate", context.rank, 0, place)]
        if place + 1 < len(names):
            context.stream(name).run(transport.wait(workspace, here, Epoch(), **on), 0)
        if place:
            before = [Word("gate", context.rank, 0, place - 1)]
            context.stream(name).run(transport.signal(workspace, before, Epoch(), **on), 0)
        there = [Word("ball", context.following, 0, place)]
        hit = transport.signal(workspace, there, Epoch(), **on)
        ball = [Word("ball", context.rank, 0, place)]
        take = transport.wait(workspace, ball, Epoch(), **on)
        for call in range(50):
            context.stream(name).run(hit, call)
            context.stream(name).run(take, call)
    for name in names:
        context.stream(name).synchronise()
    transport.barrier()


def a_wait_is_for_own_words(context: RankContext) -> None:
    """A wait for another rank's word is refused when it is prepared."""
    transport = context.transport()
    workspace = context.workspace(transport, flags=(Flag("flag"),))
    words = [Word("flag", context.following, 0, 0)]
    try:
        transport.wait(workspace, words, Epoch(), **context.on("main"))
        refused = False
    except InvalidInput:
        refused = True
    expect(refused, "a wait for another rank's word was prepared")
    transport.barrier()


_VERBS: tuple[Verb, ...] = ("signal", "wait")
CASES = (
    Case(epochs_cross_the_wrap, _VERBS),
    Case(passed_epochs_stay_passed, _VERBS),
    Case(counters_lose_no_add, _VERBS),
    Case(counters_reach_a_threshold, _VERBS),
    Case(mailboxes_have_depth_one, _VERBS),
    Case(many_words_at_once, _VERBS),
    Case(streams_are_independent, _VERBS),
    Case(a_wait_is_for_own_words, _VERBS, least_ranks=2),
)
