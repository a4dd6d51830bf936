"""What every flag held when a run failed: the state to look at after a hang.

One line for every wait of every rank: its step, its word, what the word holds, what the latest call
of that slot expects of it, and whether that has come.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stretto.runtime.executable import Executable
from stretto.schedules.language import Operation, RunFailed, cyclic_reached
from stretto.transports.interface import Workspace

__all__ = ["flag_state", "with_flag_state"]


@contextmanager
def with_flag_state(executable: Executable, workspace: Workspace | None) -> Iterator[None]:
    """Add the flag state to a `RunFailed` that passes here, as its details."""
    try:
        yield
    except RunFailed as error:
        if workspace is not None and not error.details:
            error.details = tuple(flag_state(executable, workspace))
        raise


def flag_state(executable: Executable, workspace: Workspace) -> list[str]:
    """Return the lines; a rank's words may be read though the rank is dead."""
    try:
        calls = workspace.latest_calls()
        return list(_lines(executable, workspace, calls))
    except Exception as error:  # noqa: BLE001 (it must not hide the failure that is reported)
        return [f"the flags cannot be read any more: {error}"]


def _lines(executable: Executable, workspace: Workspace, calls: list[int]) -> Iterator[str]:
    program = executable.program
    for rank in range(program.world_size):
        for call in calls:
            for phase in program.phases:
                for operation in phase.body(rank).operations:
                    yield from _waits(executable, workspace, operation, rank, call)


def _waits(
    executable: Executable, workspace: Workspace, operation: Operation, rank: int, call: int
) -> Iterator[str]:
    program = executable.program
    step = "" if operation.tags.step is None else f" step {operation.tags.step}"
    for sync in operation.waits():
        flag = program.flag[sync.word.flag]
        word = sync.word.resolve(flag, rank=rank, world_size=program.world_size, call=call)
        held = workspace.read_word(word)
        expected = (1 if flag.kind == "mailbox" else sync.value.at(call)) & 0xFFFFFFFF
        came = "reached" if cyclic_reached(held, expected) else "NOT reached"
        yield (
            f"rank {rank}{step} {operation.id}, call {call}: {word.flag}[{word.position}] "
            f"slot {word.slot} holds {held}, expected {expected}: {came}"
        )
