"""Cases about what goes wrong: no signal, a rank that gives up, dies, or closes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from stretto.schedules.language import Epoch, Flag, PeerLost, RunFailed, Verb, WaitTimeout, Word
from stretto.transports.conformance.case import Case, RankContext, expect
from stretto.transports.interface import Memory, Transport, Workspace

__all__ = ["CASES"]

_ABORT_LIMIT_S = 1.0
_DEATH_LIMIT_S = 2.5
_FLAGS = (Flag("arrived", count=3, initial=4242),)


def _wait(
    context: RankContext, transport: Transport, workspace: Workspace, *, epoch: int = 4711
) -> None:
    words = [Word("arrived", context.rank, 0, 1)]
    on = context.on("receive", "wait7")
    context.run(transport.wait(workspace, words, Epoch(0, epoch), **on), on="receive")


def _lost(action: Callable[[], object]) -> str:
    """Return what `PeerLost` says when the action is tried."""
    try:
        action()
    except PeerLost as error:
        return str(error)
    expect(False, "a rank was lost, and nobody said so")
    return ""


def timeouts_name_everything(context: RankContext) -> None:
    """A wait in vain names rank, stream, operation, flag and both epochs, and ends everyone."""
    first = context.rank == 0
    transport = context.transport(timeout_s=0.4 if first else 20.0)
    workspace = context.workspace(transport, flags=_FLAGS)
    context.meet("ready")
    if first:
        start = time.monotonic()
        try:
            _wait(context, transport, workspace)
            said = ""
        except WaitTimeout as error:
            said = str(error)
        took = time.monotonic() - start
        expect(0.4 <= took < 0.4 + _ABORT_LIMIT_S, f"the timeout of 0.4 s took {took:.2f} s")
        for part in ("rank 0", "receive", "wait7", "arrived", "[1]", "home rank 0", "4711", "4242"):
            expect(part in said, f"{part!r} is not in the message: {said}")
        context.tell("timed out", str(time.time()))
    else:
        said = _lost(lambda: _wait(context, transport, workspace))
        expect("wait7" in said and "rank 0" in said, f"the reason is not quoted: {said}")
        took = time.time() - float(context.hear("timed out"))
        expect(took < _ABORT_LIMIT_S, f"rank 0 gave up {took:.2f} s before this rank noticed")


def aborts_reach_everyone(context: RankContext) -> None:
    """When a rank gives up, every wait and barrier ends within a second and quotes the reason."""
    transport = context.transport()
    workspace = context.workspace(transport, flags=_FLAGS)
    context.meet("ready")
    if context.rank == 0:
        time.sleep(0.2)
        context.tell("aborted", str(time.time()))
        transport.abort("the soup is too hot")
        transport.abort("a second reason")
    for action in (
        lambda: _wait(context, transport, workspace),
        transport.barrier,
        lambda: context.workspace(transport, flags=_FLAGS),
        lambda: _wait(context, transport, workspace, epoch=4242),
    ):
        said = _lost(action)
        expect("the soup is too hot" in said, f"the reason is not quoted: {said}")
        expect("rank 0" in said, f"who gave up is not said: {said}")
    took = time.time() - float(context.hear("aborted"))
    expect(took < _ABORT_LIMIT_S, f"it took {took:.2f} s")


def _survive(context: RankContext, action: Callable[[], object]) -> None:
    """Let the last rank be killed while all others are in `action`."""
    victim = context.world_size - 1
    context.meet("ready")
    if context.rank == victim:
        time.sleep(0.2)
        context.tell("dying", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    said = _lost(action)
    took = time.time() - float(context.hear("dying"))
    expect(took < _DEATH_LIMIT_S, f"the death of a rank was noticed after {took:.2f} s")
    expect(f"rank {victim}" in said, f"the dead rank {victim} is not named: {said}")


def death_ends_a_wait(context: RankContext) -> None:
    """A rank killed by SIGKILL ends the waits of all others."""
    transport = context.transport()
    workspace = context.workspace(transport, flags=_FLAGS)
    _survive(context, lambda: _wait(context, transport, workspace))


def death_ends_a_barrier(context: RankContext) -> None:
    """A rank killed by SIGKILL ends the barrier that the others are in."""
    transport = context.transport()
    _survive(context, transport.barrier)


def death_ends_an_allocation(context: RankContext) -> None:
    """A rank killed by SIGKILL ends the allocation that the others are in."""
    transport = context.transport()
    _survive(context, lambda: context.workspace(transport, buffers=(("data", 4096, 1),)))


def death_ends_a_collective(context: RankContext) -> None:
    """A rank killed by SIGKILL ends the collective that the others are in."""
    transport, ranks = context.transport(), context.world_size
    workspace = context.workspace(transport, buffers=(("data", 64 * ranks, 1),))
    here = workspace.address("data", rank=context.rank, slot=0)
    kind = transport.offered().collectives[0]
    source = 1 if kind == "all_gather" else ranks
    launch = transport.collective(
        workspace,
        kind,
        context.local(bytes(64 * source), rows=source),
        Memory(here, 1 if kind == "reduce_scatter" else ranks, 64, 64),
        dtype="fp32",
        blocks=[1] * ranks,
        **context.on("main"),
    )
    _survive(context, lambda: context.run(launch))


def closing_is_no_death(context: RankContext) -> None:
    """A rank that has closed does not end the waits of others; a barrier without it is vain."""
    transport = context.transport()
    workspace = context.workspace(transport, flags=_FLAGS)
    transport.barrier()
    if context.rank == context.world_size - 1:
        transport.close()
        context.hear("done")
        return
    word = [Word("arrived", context.rank, 0, 1)]
    free = transport.signal(workspace, word, Epoch(0, 4711), **context.on("other"))
    wait = transport.wait(workspace, word, Epoch(0, 4711), **context.on("receive"))
    context.stream("receive").run(wait, 0)
    time.sleep(0.5)
    context.run(free, on="other")
    context.stream("receive").synchronise()
    said = _lost(transport.barrier)
    expect(f"rank {context.world_size - 1}" in said, f"who has closed is not said: {said}")
    context.tell("done")


def closing_ends_own_waits(context: RankContext) -> None:
    """A rank may close while its own streams still wait: they end with an error, and no crash."""
    transport = context.transport()
    workspace = context.workspace(transport, flags=_FLAGS)
    words = [Word("arrived", context.rank, 0, 1)]
    wait = transport.wait(workspace, words, Epoch(0, 4711), **context.on("receive"))
    context.stream("receive").run(wait, 0)
    time.sleep(0.1)
    transport.close()
    try:
        context.stream("receive").synchronise()
        ended = False
    except RunFailed:
        ended = True
    expect(ended, "the wait passed without a signal")
    context.meet("closed")


_VERBS: tuple[Verb, ...] = ("signal", "wait")
CASES = (
    Case(timeouts_name_everything, _VERBS),
    Case(aborts_reach_everyone, _VERBS),
    Case(death_ends_a_wait, _VERBS, least_ranks=2, kills=True),
    Case(death_ends_a_barrier, least_ranks=2, kills=True),
    Case(death_ends_an_allocation, least_ranks=2, kills=True),
    Case(death_ends_a_collective, ("collective",), least_ranks=2, kills=True),
    Case(closing_is_no_death, _VERBS, least_ranks=2),
    Case(closing_ends_own_waits, _VERBS),
)
