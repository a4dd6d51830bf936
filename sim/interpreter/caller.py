"""The caller: whose inputs and outputs they are, and what it does to them between calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from stretto.schedules.language import Buffer, InvalidInput, Program
from stretto.sim.interpreter.memory import Memory
from stretto.sim.interpreter.rounding import Array
from stretto.sim.interpreter.tasks import BEGIN, Task, Turn

__all__ = ["Caller", "Inputs", "Outputs"]

Inputs = Mapping[str, Sequence[Array]]
"""By name, one array for each rank."""

Outputs = dict[str, list[Array]]
"""By name, one array for each rank."""


class Caller:
    """Writes inputs before a call, reads outputs after it, all on its own stream.

    Parameters
    ----------
    programs, memory
        What it calls, and where.
    inputs
        What goes into each execution.
    executions
        How many there are.
    hostile
        Whether it overwrites inputs and outputs with NaN as soon as it may.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        memory: Memory,
        inputs: Callable[[int], Inputs],
        *,
        executions: int,
        hostile: bool,
    ) -> None:
        self._programs, self._memory, self._hostile = programs, memory, hostile
        self._inputs = inputs
        self._given: dict[int, Inputs] = {}
        self._begun: set[tuple[int, int, str]] = set()
        self.outputs: list[Outputs] = [{} for _ in range(executions)]

    def work(self, task: Task) -> None:
        """Do what the caller does before or after a call; between repeats it does nothing."""
        if task.operation.id == BEGIN:
            if task.turn.first:
                self._write_inputs(task.turn, task.rank)
        elif task.turn.last:
            self._read_outputs(task.turn, task.rank)

    def _write_inputs(self, turn: Turn, rank: int) -> None:
        program = self._programs[turn.program]
        given = self._given.get(turn.execution)
        if given is None:
            given = self._given[turn.execution] = self._inputs(turn.execution)
            _check_names(program, given)
        for buffer in program.buffers:
            before = (turn.program, rank, buffer.name) in self._begun
            if buffer.initial == "caller":
                if before and buffer.reuse == "never":
                    continue
                whole = self._memory.whole(turn.program, buffer, rank)
                values = _given(program, buffer, given, rank)
                whole.values.fill(np.nan)
                rows, columns = values.shape
                self._memory.write(whole._replace(values=whole.values[:rows, :columns]), values)
                self._begun.add((turn.program, rank, buffer.name))
            elif buffer.role == "output" and buffer.initial == "undefined":
                self._memory.whole(turn.program, buffer, rank).values.fill(np.nan)

    def _read_outputs(self, turn: Turn, rank: int) -> None:
        program = self._programs[turn.program]
        for buffer in program.buffers:
            whole = self._memory.whole(turn.program, buffer, rank)
            if buffer.role == "output":
                rows, columns = _valid(program, buffer, rank)
                into = self.outputs[turn.execution].setdefault(
                    buffer.name, [np.empty((0, 0))] * program.world_size
                )
                into[rank] = whole.values[:rows, :columns].copy()
            if self._hostile and buffer.role != "workspace" and buffer.reuse == "caller_stream":
                whole.values.fill(np.nan)


def _valid(program: Program, buffer: Buffer, rank: int) -> tuple[int, int]:
    """Return how many rows and columns of a buffer mean something on `rank`."""
    sizes = []
    for extent in (buffer.rows, buffer.columns):
        sharded = extent.layout == "shard"
        sizes.append(extent.valid(rank, program.world_size) if sharded else extent.size)
    return sizes[0], sizes[1]


def _check_names(program: Program, given: Inputs) -> None:
    wanted = {buffer.name for buffer in program.buffers if buffer.initial == "caller"}
    unknown = sorted(set(given) - wanted)
    if unknown:
        raise InvalidInput(
            f"Program {program.name} takes no {unknown[0]!r} from its caller; "
            f"it takes {', '.join(sorted(wanted)) or 'nothing'}."
        )


def _given(program: Program, buffer: Buffer, given: Inputs, rank: int) -> Array:
    arrays = given.get(buffer.name)
    if arrays is None or len(arrays) != program.world_size:
        count = "none" if arrays is None else str(len(arrays))
        raise InvalidInput(
            f"Input {buffer.name!r} needs one array for each of {program.world_size} ranks; "
            f"there are {count}."
        )
    values = arrays[rank]
    stored = (buffer.rows.stored(program.world_size), buffer.columns.stored(program.world_size))
    valid = _valid(program, buffer, rank)
    if values.shape not in (valid, stored):
        raise InvalidInput(
            f"Input {buffer.name!r} of rank {rank} has shape {values.shape}, not {valid}."
        )
    return values
