"""Collectives: where all ranks meet, and what each then finds in its destination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stretto.schedules.language import Collective, OperationBase, Program, ProgramError
from stretto.sim.interpreter.memory import Memory, Part
from stretto.sim.interpreter.rounding import Array
from stretto.sim.interpreter.tasks import Meeting, Task

__all__ = ["Gathering", "Meetings"]


@dataclass
class Gathering:
    """One collective in progress.

    Attributes
    ----------
    world_size
        How many ranks must come.
    sources, destinations
        Of those that have come, by rank.
    held
        What they brought; None if it is read only when all are there.
    found
        What each finds afterwards.
    """

    world_size: int
    sources: dict[int, Part] = field(default_factory=dict)
    destinations: dict[int, Part] = field(default_factory=dict)
    held: dict[int, Array | None] = field(default_factory=dict)
    found: list[Array] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all ranks have come."""
        return bool(self.found)

    def scribble(self, rank: int) -> None:
        """Fill the rank's destination with NaN, unless its source is still needed there."""
        source, destination = self.sources[rank], self.destinations[rank]
        if self.held[rank] is not None or not source.overlaps(destination):
            destination.values.fill(np.nan)

    def missing(self, operation: str) -> str:
        """Say who has not come."""
        absent = [str(rank) for rank in range(self.world_size) if rank not in self.sources]
        return f"collective {operation}, at which rank {', '.join(absent)} has not arrived"

    def result(self, rank: int) -> tuple[Part, Array]:
        """Return where a rank's result goes, and the result."""
        return self.destinations[rank], self.found[rank]


class Meetings:
    """All collectives of an interpretation.

    Parameters
    ----------
    programs, memory
        What the views in a collective refer to.
    pushed
        An all-gather writes into the destinations of all ranks as soon as one rank begins (as
        one that is built from puts does), and not only when all are there.
    """

    def __init__(self, programs: Sequence[Program], memory: Memory, *, pushed: bool) -> None:
        self._programs, self._memory, self._pushed = programs, memory, pushed
        self._gatherings: dict[Meeting, Gathering] = {}

    def join(self, task: Task, *, early: bool) -> Gathering:
        """Let a rank arrive; with `early`, what it brings is read now."""
        assert task.meeting is not None
        assert isinstance(task.operation, Collective)
        program = self._programs[task.turn.program]
        gathering = self._gatherings.setdefault(task.meeting, Gathering(program.world_size))
        gathering.sources[task.rank] = self._part(task, task.operation, task.rank, "source")
        gathering.destinations[task.rank] = self._part(
            task, task.operation, task.rank, "destination"
        )
        source = gathering.sources[task.rank]
        gathering.held[task.rank] = source.values.copy() if early else None
        if self._pushed and task.operation.collective == "all_gather":
            self._push(task, source.values)
        if len(gathering.sources) == program.world_size:
            gathering.found = self._results(task, gathering)
        return gathering

    def _push(self, task: Task, block: Array) -> None:
        """Write a rank's block into the destinations of all others, whether they came or not."""
        assert task.meeting is not None
        program = self._programs[task.turn.program]
        counts = []
        for rank in range(program.world_size):
            theirs = _nth_collective(task, rank)
            counts.append(len(self._part(task, theirs, rank, "source").values))
        start = sum(counts[: task.rank])
        for rank in range(program.world_size):
            if rank != task.rank:
                destination = self._part(task, _nth_collective(task, rank), rank, "destination")
                rows = destination.values[start : start + len(block)]
                self._memory.write(Part(rows, destination.dtype), block)

    def _part(self, task: Task, operation: Collective, rank: int, side: str) -> Part:
        view = operation.source if side == "source" else operation.destination
        return self._memory.part(task.turn.program, view, rank=rank, call=task.turn.call.number)

    def _results(self, task: Task, gathering: Gathering) -> list[Array]:
        assert isinstance(task.operation, Collective)
        ranks = range(gathering.world_size)
        brought: list[Array] = []
        for rank in ranks:
            held = gathering.held[rank]
            brought.append(gathering.sources[rank].values.copy() if held is None else held)
        sizes = [len(gathering.destinations[rank].values) for rank in ranks]
        if task.operation.collective == "all_gather":
            whole = np.concatenate(brought)
            found = [whole for _ in ranks]
        else:
            _require_one_shape(task, task.operation, brought)
            whole = np.zeros_like(brought[0])
            for addend in brought:
                whole = whole + addend
            found = [whole for _ in ranks]
            if task.operation.collective == "reduce_scatter":
                found = np.split(whole, np.cumsum(sizes)[:-1])
        for rank, values in enumerate(found):
            if values.shape != gathering.destinations[rank].values.shape:
                raise ProgramError(
                    f"the {task.operation.collective} gives {values.shape[0]} x "
                    f"{values.shape[1]} numbers, its destination has "
                    f"{sizes[rank]} x {gathering.destinations[rank].values.shape[1]}",
                    rank=rank,
                    stream=task.operation.stream,
                    operation=task.operation.id,
                )
        return found


def _require_one_shape(task: Task, operation: OperationBase, arrays: Sequence[Array]) -> None:
    for rank, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise ProgramError(
                f"it adds {array.shape[0]} x {array.shape[1]} numbers to "
                f"{arrays[0].shape[0]} x {arrays[0].shape[1]} of rank 0",
                rank=rank,
                stream=operation.stream,
                operation=operation.id,
            )


def _nth_collective(task: Task, rank: int) -> Collective:
    assert task.meeting is not None
    issued = [
        operation
        for operation in task.turn.call.phase.body(rank).operations
        if isinstance(operation, Collective)
    ]
    return issued[task.meeting.number]
