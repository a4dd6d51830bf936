"""What a Program becomes for one rank: launches in enqueue order, and the caller's tensors.

Addresses of the workspace are fixed when a Program is lowered.  The caller's tensors may be others
in every call: the launches that touch them are `LateLaunch`, prepared anew by `Executable.bind` and
remembered by address, since allocators give the same few addresses again and again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.schedules.language import FlagEvent, Operation, Program, RunFailed, Sync
from stretto.transports.interface import Launch

__all__ = ["Executable", "LateLaunch", "LoweredOperation", "TensorBinder"]

_BINDINGS_KEPT = 512
"""Sets of addresses whose launches are remembered, per slot."""


class LateLaunch:
    """A launch that touches the caller's tensors; `prepare` makes it for those of now."""

    __slots__ = ("launch", "prepare")

    def __init__(self, prepare: Callable[[], Launch]) -> None:
        self.prepare = prepare
        self.launch: Launch = _unbound

    def __call__(self, call: int) -> Sequence[int]:
        return self.launch(call)


def _unbound(call: int) -> Sequence[int]:
    raise RunFailed("The Program was lowered without tensors; bind some before a call.")


class TensorBinder:
    """Addresses of the caller's tensors, and the launches that depend on them, by slot residue."""

    def __init__(self) -> None:
        self.addresses: dict[str, int] = {}
        self._late: dict[int, list[LateLaunch]] = {}
        self._bound: dict[int, tuple[int, ...]] = {}
        self._known: dict[int, OrderedDict[tuple[int, ...], tuple[Launch, ...]]] = {}

    def late(self, slot: int, prepare: Callable[[], Launch]) -> LateLaunch:
        """Return a launch that `bind` prepares again."""
        launch = LateLaunch(prepare)
        self._late.setdefault(slot, []).append(launch)
        return launch

    def bind(self, slot: int, addresses: Mapping[str, int]) -> None:
        """Let the launches of a slot residue use these addresses."""
        key = tuple(addresses.values())
        if self._bound.get(slot) == key:
            return
        known = self._known.setdefault(slot, OrderedDict())
        late = self._late.get(slot, [])
        launches = known.get(key)
        if launches is None:
            self.addresses.update(addresses)
            launches = tuple(one.prepare() for one in late)
            known[key] = launches
            if len(known) > _BINDINGS_KEPT:
                known.popitem(last=False)
        for one, launch in zip(late, launches, strict=True):
            one.launch = launch
        self._bound[slot] = key


@dataclass(frozen=True, slots=True)
class LoweredOperation:
    """One operation of one rank, ready to be launched.

    Attributes
    ----------
    operation
        What it is in the Program.
    launches
        By slot residue of the call.
    moved_bytes, flops, peer
        For the record.
    after
        Places, in enqueue order, of the operations of other streams that it waits for.
    entry
        Whether it starts only after the caller's earlier work.
    """

    operation: Operation
    launches: tuple[Launch, ...]
    moved_bytes: int
    flops: float
    peer: int | None
    after: tuple[int, ...]
    entry: bool


@dataclass(frozen=True, slots=True)
class Executable:
    """A Program lowered for one rank and one workspace.

    Attributes
    ----------
    program, rank
        What was lowered, for whom.
    phases
        The operations of each phase, in enqueue order.
    exits
        For each phase, places of the operations that the caller's later work follows.
    binder
        Of the caller's tensors.
    keep
        What must live as long as the launches: scratch memory, and the tensors that it was lowered
        with.
    """

    program: Program
    rank: int
    phases: tuple[tuple[LoweredOperation, ...], ...]
    exits: tuple[tuple[int, ...], ...]
    binder: TensorBinder
    keep: tuple[Any, ...] = field(repr=False, default=())

    def bind(self, call: int, addresses: Mapping[str, int]) -> None:
        """Let a call use other tensors of the caller's, of the shapes that were lowered.

        Nothing is checked and nothing kept alive: both are the caller's part.  The launches of that
        slot point there until they are bound again.

        Parameters
        ----------
        call
            Its number; launches of its slot are bound.
        addresses
            Of the caller's buffers, all of them, by name and always in the same order.
        """
        self.binder.bind(call % self.program.slot_period, addresses)

    def sync_events(
        self, operation: Operation, call: int, seen: Sequence[int] = ()
    ) -> tuple[tuple[FlagEvent, ...], tuple[FlagEvent, ...]]:
        """Return what an operation signalled and awaited in a call, for the record."""
        signalled = tuple(self._event(sync, call, None) for sync in operation.signals())
        waits = operation.waits()
        values: Sequence[int | None] = seen if len(seen) == len(waits) else [None] * len(waits)
        awaited = tuple(
            self._event(sync, call, value) for sync, value in zip(waits, values, strict=True)
        )
        return signalled, awaited

    def _event(self, sync: Sync, call: int, seen: int | None) -> FlagEvent:
        program = self.program
        word = sync.word.resolve(
            program.flag[sync.word.flag],
            rank=self.rank,
            world_size=program.world_size,
            call=call,
        )
        value = sync.value.at(call) & 0xFFFFFFFF
        return FlagEvent(word.flag, word.home, word.slot, word.position, value, seen)
