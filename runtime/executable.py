"""What a Program becomes for one rank: launches in enqueue order, and the caller's tensors.

Addresses of the workspace are fixed when a Program is lowered.  The caller's tensors may be others
in every call: the launches that touch them are `LateLaunch`, prepared by `Executable.bind`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.schedules.language import FlagEvent, Operation, Program, RunFailed, Sync
from stretto.transports.interface import Launch

__all__ = ["Executable", "LateLaunch", "LoweredOperation", "TensorBinder"]


class LateLaunch:
    """A launch that touches the caller's tensors; `prepare` makes it for those of now."""

    __slots__ = ("launch", "prepare")

    def __init__(self, prepare: Callable[[], Launch]) -> None:
        self.prepare = prepare
        self.launch: Launch = _unbound

    def __call__(self, call: int) -> Sequence[int]:
        return self.launch(call)


def _unbound(call: int) -> Sequence[int]:
    raise RunFailed("The Program has no tensors of the caller's; bind some before a call.")


class TensorBinder:
    """The caller's tensors by buffer, and the launches that depend on them by slot residue."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._late: dict[int, list[LateLaunch]] = {}

    def late(self, slot: int, prepare: Callable[[], Launch]) -> LateLaunch:
        """Return a launch that `bind` prepares."""
        launch = LateLaunch(prepare)
        self._late.setdefault(slot, []).append(launch)
        return launch

    def bind(self, slot: int, tensors: Mapping[str, Any]) -> None:
        """Let the launches of a slot residue use these tensors."""
        self.tensors.update(tensors)
        for one in self._late.get(slot, ()):
            one.launch = one.prepare()

    def release(self, slot: int) -> None:
        """Let go of the tensors; the launches of that slot must be bound again."""
        self.tensors.clear()
        for one in self._late.get(slot, ()):
            one.launch = _unbound


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
        Memory that must live as long as the launches.
    """

    program: Program
    rank: int
    phases: tuple[tuple[LoweredOperation, ...], ...]
    exits: tuple[tuple[int, ...], ...]
    binder: TensorBinder
    keep: tuple[Any, ...] = field(repr=False, default=())

    def bind(self, call: int, tensors: Mapping[str, Any]) -> None:
        """Let a call use other tensors of the caller's, of the shapes that were lowered.

        Nothing is checked: that is the caller's part.  The tensors are kept until `release`.

        Parameters
        ----------
        call
            Its number; launches of its slot are bound.
        tensors
            The caller's, all of them, by buffer.
        """
        self.binder.bind(call % self.program.slot_period, tensors)

    def release(self, call: int) -> None:
        """Let go of the tensors that a call was bound to, once it has been enqueued."""
        self.binder.release(call % self.program.slot_period)

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
