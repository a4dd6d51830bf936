"""Transport between processes of one machine: memory that all of them map, no GPU needed.

Ranks are operating-system processes.  A workspace is one shared segment with every rank's buffers
and flags in it (`stretto.transports.posix.workspace`); a put is a memcpy into the peer's part, a
signal a store and a wake, a wait a look and then a sleep in the kernel
(`stretto.transports.posix.futex`).  A stream is a thread: a launch returns when its work is done.

Memory model
------------
What a rank wrote before it signalled, by puts or otherwise, must be there for a rank that has seen
the signal.  That takes four facts:

1. *The flag is one access.*  Words lie at addresses divisible by 4 (`SharedWord` refuses others)
   and are loaded and stored through ``ctypes.c_uint32.value``, which CPython implements as a memcpy
   of a constant 4 bytes.  Compilers make that one 4-byte load or store, and even the library's
   memcpy moves 4 bytes by one or two identical 4-byte moves.  An aligned 4-byte access is atomic on
   every 64-bit processor that Linux runs on.
2. *The compiler keeps the order.*  The copy and the flag are reached through calls of function
   pointers (libc's memmove, numpy's loops, the setter of ctypes) between which the interpreter
   runs; no compiler sees both and could exchange them.
3. *The signaller's processor keeps the order.*  x86-64 lets no store pass an earlier store (TSO:
   Intel SDM volume 3, section 8.2), so the data is visible before the flag.  The exception is
   non-temporal stores, which libc uses for long copies; libc ends such a copy with ``sfence``,
   since every caller relies on it.
4. *The waiter's processor keeps the order.*  x86-64 lets no load pass an earlier load, so data read
   after the flag is at least as new as the flag.

On other processors 3 and 4 are not given.  There a full fence is issued before every store of a
flag and after every load that lets a wait pass: `stretto.transports.posix.futex.fence`, which has
the kernel perform a fully ordered read-modify-write.  It orders this thread's earlier accesses
before its later ones, whatever its word, which is all that a release and an acquire need.  This has
been argued, not run: no machine with such a processor was at hand.

A counter needs atomic adds from several processes: the kernel does them (``FUTEX_WAKE_OP``).  A
mailbox has one producer and one consumer for each word, so a look and a store are enough.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stretto.schedules.language import (
    ALL_COLLECTIVES,
    ALL_VERBS,
    Capabilities,
    CollectiveKind,
    Epoch,
    InvalidInput,
    PeerLost,
    RunFailed,
    StrettoError,
    Word,
    WorkspaceLayout,
)
from stretto.transports.interface import (
    NO_LABEL,
    Availability,
    Label,
    Launch,
    Memory,
    Store,
    Transport,
    Workspace,
)
from stretto.transports.posix import collectives, futex, segment
from stretto.transports.posix.control import Control
from stretto.transports.posix.copying import copier
from stretto.transports.posix.futex import HALF_RANGE, MASK, NEEDS_FENCE, SharedWord, fence
from stretto.transports.posix.workspace import SharedWorkspace, allocate

__all__ = ["SharedMemoryTransport"]

_CLOSE_LIMIT_S = 5.0


class SharedMemoryTransport(Transport):
    """Puts, signals, waits and collectives between processes of one machine.

    Making one is collective: it returns when every rank has come.

    Parameters
    ----------
    rank, world_size
        Of this process; every rank is a process of its own.
    store
        Where the ranks meet.
    key_prefix
        Begins the one key that is used of the store; every transport on a store needs its own.
    timeout_s
        How long a wait, a part of a collective, or a barrier may take.
    join_timeout_s
        How long ranks wait for each other here and in `allocate`, where they come from work of
        different length.
    directory
        Where segments lie, without a name, if ``memfd_create`` is missing.

    Raises
    ------
    InvalidInput
        If the ranks are not on one machine, or contradict each other.
    PeerLost, WaitTimeout
        If a rank ended, or did not come in time.
    """

    name = "shared_memory"

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        *,
        key_prefix: str = "stretto",
        timeout_s: float = 30.0,
        join_timeout_s: float = 120.0,
        directory: Path = segment.SHARED_DIRECTORY,
    ) -> None:
        if not 0 <= rank < world_size:
            raise InvalidInput(f"There is no rank {rank} among {world_size}.")
        if timeout_s <= 0 or join_timeout_s <= 0:
            raise InvalidInput("A timeout is a number of seconds above 0.")
        self.rank, self.world_size = rank, world_size
        self._directory = directory
        self._workspaces: tuple[SharedWorkspace, ...] = ()
        self._pid = os.getpid()
        self._allocating, self._closing = threading.Lock(), threading.Lock()
        self._released = False
        self._control = Control(
            rank,
            world_size,
            store,
            key=f"{key_prefix}/shared_memory",
            timeout_s=timeout_s,
            join_timeout_s=join_timeout_s,
            directory=directory,
        )

    @classmethod
    def available(cls) -> Availability:
        problem = futex.probe()
        if problem is not None:
            return Availability(False, f"shared_memory cannot be used: {problem}.")
        try:
            descriptor = segment.create("A trial", 4)
            try:
                os.close(segment.open_peer(0, os.getpid(), descriptor))
                segment.reserve(descriptor, 0, 4)
                segment.Mapping(descriptor, 4).close()
            finally:
                os.close(descriptor)
        except (OSError, StrettoError) as error:
            return Availability(False, f"shared_memory cannot be used: {error}")
        return Availability(True, "processes of this machine can share memory")

    @classmethod
    def offered(cls) -> Capabilities:
        return Capabilities(
            transport=cls.name,
            verbs=ALL_VERBS,
            collectives=ALL_COLLECTIVES,
            signal_orders_puts=True,
        )

    def allocate(self, layout: WorkspaceLayout) -> SharedWorkspace:
        with self._allocating:
            try:
                workspace = allocate(self._control, layout, self._directory)
            except StrettoError:
                raise
            except BaseException as error:
                self.abort(f"rank {self.rank}: allocate was interrupted ({type(error).__name__})")
                raise
            kept = [one for one in self._workspaces if one.gate.busy or not one.gate.closed]
            self._workspaces = (*kept, workspace)
        return workspace

    # ---- the verbs ---------------------------------------------------------------------------

    def put(
        self,
        source: Memory,
        destination: Memory,
        *,
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        copy = copier(source, destination)
        owners = [workspace.owner(destination) for workspace in self._open_workspaces()]
        if destination.total_bytes and all(owner is None for owner in owners):
            raise InvalidInput(f"A put needs a destination in a workspace, not {destination}.")

        def launch(call: int) -> Sequence[int]:
            copy()
            return ()

        return self._guarded(launch, source, destination)

    def signal(
        self,
        workspace: Workspace,
        words: Sequence[Word],
        value: Epoch,
        *,
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        own = self._own(workspace)
        steps = [self._signal_one(own, word, value, label) for word in words]
        if len(steps) == 1:
            return own.gate.guarded(steps[0])

        def launch(call: int) -> Sequence[int]:
            for step in steps:
                step(call)
            return ()

        return own.gate.guarded(launch)

    def _signal_one(
        self, workspace: SharedWorkspace, word: Word, value: Epoch, label: Label
    ) -> Launch:
        shared = workspace.word(word)
        kind = workspace.layout.flag(word.flag).kind
        if kind == "counter":
            return _adding(shared, value)
        if kind == "mailbox":
            return self._filling(workspace, word, shared, label)
        cell, wake, at = shared.cell, shared.wake, value.at

        def set_epoch(call: int) -> Sequence[int]:
            if NEEDS_FENCE:
                fence()
            cell.value = at(call) & MASK
            wake()
            return ()

        return set_epoch

    def _filling(
        self, workspace: SharedWorkspace, word: Word, shared: SharedWord, label: Label
    ) -> Launch:
        control, cell = self._control, shared.cell

        def fill(call: int) -> Sequence[int]:
            if cell.value:
                late = self._late("to be emptied", word, label, call, 0)
                control.hold(shared, 0, late, gate=workspace.gate, reached=_equal)
            if NEEDS_FENCE:
                fence()
            cell.value = 1
            shared.wake()
            return ()

        return fill

    def wait(
        self,
        workspace: Workspace,
        words: Sequence[Word],
        value: Epoch,
        *,
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        own = self._own(workspace)
        for word in words:
            if word.home != self.rank:
                raise InvalidInput(
                    f"rank {self.rank} cannot wait for flag {word.flag!r} of rank {word.home}; "
                    "a wait is for words of its own."
                )
        shared = [own.word(word) for word in words]
        mailboxes = [
            one
            for one, word in zip(shared, words, strict=True)
            if own.layout.flag(word.flag).kind == "mailbox"
        ]
        awaited = list(zip(words, shared, [one.cell for one in shared], strict=True))
        control, at, gate = self._control, value.at, own.gate

        def launch(call: int) -> Sequence[int]:
            control.raise_if_aborted()
            expected = at(call) & MASK
            seen = []
            for word, one, cell in awaited:
                held = cell.value
                if (held - expected) & MASK >= HALF_RANGE:
                    late = self._late("for a signal", word, label, call, expected)
                    held = control.hold(one, expected, late, gate=gate)
                seen.append(held)
            if NEEDS_FENCE:
                fence()
            for one in mailboxes:
                one.cell.value = 0
                one.wake()
            return seen

        return gate.guarded(launch)

    def collective(
        self,
        workspace: Workspace,
        kind: CollectiveKind,
        source: Memory,
        destination: Memory,
        *,
        dtype: str,
        blocks: Sequence[int],
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        own = self._own(workspace)
        launch = collectives.prepare(
            self._control, own, kind, source, destination, dtype=dtype, blocks=blocks, label=label
        )
        return self._guarded(launch, source, destination, workspace=own)

    # ---- the end -----------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        try:
            self._control.abort(reason)
        except RunFailed:
            return  # closed: there is nobody to tell any more

    def raise_if_failed(self) -> None:
        self._control.gate.check()
        self._control.raise_if_aborted()
        problem = self._control.problem()
        if problem is not None:
            raise PeerLost(f"rank {self.rank}: {problem}.")

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return self._control.exchange(message)

    def barrier(self) -> None:
        self._control.barrier()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: the transport is its parent's
        with self._closing:
            if self._released:
                return
            if not self._control.gate.closed:
                self._control.say_closed()
            quiet = self._control.gate.shut(_CLOSE_LIMIT_S)
            for workspace in self._workspaces:
                workspace.close()
                quiet = quiet and not workspace.gate.busy
            # Waits look at the control segment too: it goes last, and only when all have left.
            if quiet:
                self._control.release()
            self._released = True

    # ---- helpers -----------------------------------------------------------------------------

    def _open_workspaces(self) -> list[SharedWorkspace]:
        """Return those whose addresses still mean something."""
        return [workspace for workspace in self._workspaces if not workspace.gate.closed]

    def _own(self, workspace: Workspace) -> SharedWorkspace:
        if isinstance(workspace, SharedWorkspace):
            workspace.gate.check()
            if workspace in self._workspaces:
                return workspace
        raise InvalidInput("The workspace was not allocated by this transport.")

    def _guarded(
        self, launch: Launch, *memories: Memory, workspace: SharedWorkspace | None = None
    ) -> Launch:
        """Return the launch that keeps mapped what it touches: `workspace` and the memories'."""
        for one in self._open_workspaces():
            if one is workspace or any(one.holds(memory.address) for memory in memories):
                launch = one.gate.guarded(launch)
        return launch

    def _late(
        self, what: str, word: Word, label: Label, call: int, expected: int
    ) -> Callable[[int, float], str]:
        def late(seen: int, waited_s: float) -> str:
            return (
                f"rank {self.rank}, stream {label.stream!r}, operation {label.operation!r}, "
                f"call {call}: waited {waited_s:g} s {what}: flag {word.flag!r}[{word.position}], "
                f"slot {word.slot}, home rank {word.home}: expected epoch {expected}, seen {seen}"
            )

        return late


def _adding(shared: SharedWord, value: Epoch) -> Launch:
    if value.stride == 0:
        adds = shared.adder(value.offset)

        def add(call: int) -> Sequence[int]:
            for step in adds:
                step()
            return ()

        return add

    def add_growing(call: int) -> Sequence[int]:
        for step in shared.adder(value.at(call)):
            step()
        return ()

    return add_growing


def _equal(seen: int, expected: int) -> bool:
    return seen == expected
