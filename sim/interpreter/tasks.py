"""What the hosts enqueue: every operation of every call, and what it waits for before it begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stretto.schedules.language import (
    Call,
    Collective,
    OperationBase,
    Program,
    ProgramError,
    SpanKey,
)

__all__ = [
    "BEGIN",
    "END",
    "CallerWork",
    "Meeting",
    "Task",
    "Turn",
    "check_collectives",
    "enqueued",
    "turns",
]

BEGIN, END = "(begin)", "(end)"
"""Ids of the caller's work before and after the operations of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerWork(OperationBase):
    """What the caller does on its stream before a call (`BEGIN`) or after it (`END`)."""

    op: Literal["caller"] = "caller"


class Meeting(NamedTuple):
    """One collective: which one of which call all ranks meet in."""

    call: int
    number: int


class Turn(NamedTuple):
    """One call: whose it is, and where in the execution of its Program.

    Attributes
    ----------
    program
        Number of the Program among those that take turns.
    execution
        Counts executions of any Program from 0.
    call
        The workspace's use count and the phase.
    first, last
        Whether it is the first and the last call of its execution.
    """

    program: int
    execution: int
    call: Call
    first: bool
    last: bool


class Task(NamedTuple):
    """One operation of one rank in one call.

    Attributes
    ----------
    turn
        The call it belongs to.
    rank, operation
        Who runs what.
    events
        What must have ended before it begins, beside what is before it on its stream.
    meeting
        Of a collective.
    """

    turn: Turn
    rank: int
    operation: OperationBase
    events: tuple[SpanKey, ...]
    meeting: Meeting | None

    @property
    def key(self) -> SpanKey:
        """The operation of that rank and call."""
        return SpanKey(self.turn.call.number, self.rank, self.operation.id)


def turns(programs: Sequence[Program], order: Sequence[int], first_call: int) -> Iterator[Turn]:
    """Yield the calls of `programs`, executed one after another in the given order."""
    number = first_call
    for execution, index in enumerate(order):
        program = programs[index]
        for call in program.call_sequence(number):
            yield Turn(
                index,
                execution,
                call,
                first=call.number == number,
                last=call.number == number + program.calls - 1,
            )
        number += program.calls


def enqueued(program: Program, turn: Turn, rank: int, held_by: Turn | None) -> Iterator[Task]:
    """Yield what the host of `rank` enqueues for one call, in order.

    Parameters
    ----------
    program, turn, rank
        Whose call.
    held_by
        The call that must have ended on this rank before the host enqueues any of it.
    """
    number, body = turn.call.number, turn.call.phase.body(rank)
    stream = program.caller_stream
    entries, exits = set(program.entries(body)), program.exits(body)
    earlier = () if held_by is None else _ends(held_by, rank)

    def keys(*ids: str) -> tuple[SpanKey, ...]:
        return tuple(SpanKey(number, rank, id) for id in ids)

    yield Task(turn, rank, CallerWork(id=BEGIN, stream=stream), earlier, None)
    meetings = 0
    for operation in body.operations:
        entry = (BEGIN,) if operation.id in entries else ()
        meeting = None
        if isinstance(operation, Collective):
            meeting = Meeting(number, meetings)
            meetings += 1
        events = (*earlier, *keys(*operation.after, *entry))
        yield Task(turn, rank, operation, events, meeting)
    yield Task(turn, rank, CallerWork(id=END, stream=stream), (*earlier, *keys(*exits)), None)


def _ends(turn: Turn, rank: int) -> tuple[SpanKey, ...]:
    """Return the last operation of every stream in a call of `rank`."""
    last = {operation.stream: operation.id for operation in turn.call.phase.body(rank).operations}
    return tuple(SpanKey(turn.call.number, rank, id) for id in (*last.values(), END))


def check_collectives(program: Program) -> None:
    """Raise ProgramError unless all ranks issue the same collectives in the same order."""
    for phase in program.phases:
        first = _issued(phase.body(0).operations)
        for rank in range(1, program.world_size):
            issued = _issued(phase.body(rank).operations)
            if issued != first:
                raise ProgramError(
                    f"in phase {phase.name!r} it issues {_listed(issued)} and rank 0 issues "
                    f"{_listed(first)}; all ranks must issue the same collectives in one order",
                    rank=rank,
                )


def _issued(operations: Sequence[OperationBase]) -> list[tuple[str, str, str]]:
    return [
        (operation.collective, operation.source.buffer, operation.destination.buffer)
        for operation in operations
        if isinstance(operation, Collective)
    ]


def _listed(issued: list[tuple[str, str, str]]) -> str:
    return ", ".join(f"{kind} of {source!r} to {to!r}" for kind, source, to in issued) or "nothing"
