"""Program: what every rank does, as one frozen value.

A Program is a list of *phases*.  Each phase has one body per kind of rank (a symmetric schedule has
one body for all) and a number of repeats; one repeat of one phase is one *call*, and the calls of
a workspace are numbered for ever (its use count).  A body is the total order in which the host
enqueues operations; each operation is on a named FIFO stream, a subsequence of that order.

The caller's stream
-------------------
Inputs and outputs belong to the caller.  Operations on ``caller_stream`` follow the caller's
earlier work.  On every other stream the first operation that touches a caller's buffer starts
after that point (`entries`), and the caller's stream ends only after the last one of each such
stream (`exits`), so that the caller may overwrite an input, or read an output, by enqueuing work
after the call.  Both are derived from the buffers' roles; nobody writes them down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import Field

from stretto.schedules.language.buffers import Buffer, Flag
from stretto.schedules.language.errors import ProgramError
from stretto.schedules.language.expressions import FORBID_EXTRA
from stretto.schedules.language.fused import GatherGemm, GemmAllReduce, GemmReduceScatter
from stretto.schedules.language.operations import (
    Collective,
    Copy,
    Fill,
    Gemm,
    Opaque,
    Put,
    Reduce,
    RowOp,
    Signal,
    Wait,
)
from stretto.schedules.language.workspace import in_slot

__all__ = ["SCHEMA_VERSION", "Body", "Call", "Operation", "Phase", "Program"]

SCHEMA_VERSION = 2
"""Of the JSON form; readers refuse any other."""

Operation = Annotated[
    Put
    | Signal
    | Wait
    | Collective
    | Gemm
    | RowOp
    | Copy
    | Fill
    | Reduce
    | Opaque
    | GatherGemm
    | GemmReduceScatter
    | GemmAllReduce,
    Field(discriminator="op"),
]


@dataclass(frozen=True)
class Body:
    """What one kind of rank does in one call: its operations in enqueue order."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    operations: tuple[Operation, ...]

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of every operation in the enqueue order, by id."""
        return {operation.id: position for position, operation in enumerate(self.operations)}

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams, in order of first use."""
        return tuple(dict.fromkeys(operation.stream for operation in self.operations))

    def __getitem__(self, id: str) -> Operation:
        return self.operations[self.index[id]]


@dataclass(frozen=True, slots=True)
class Phase:
    """One or more calls of the same bodies.

    Attributes
    ----------
    name
        Unique in the Program.
    bodies
        One for all ranks, or several.
    body_of
        Index of each rank's body; empty when there is one body.
    repeats
        Number of calls (a stack of 80 equal layers is 80 repeats).
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    name: str
    bodies: tuple[Body, ...]
    body_of: tuple[int, ...] = ()
    repeats: int = 1

    def body(self, rank: int) -> Body:
        """Return what `rank` does in a call of this phase."""
        return self.bodies[self.body_of[rank]] if self.body_of else self.bodies[0]

    @property
    def symmetric(self) -> bool:
        """Whether one body stands for all ranks."""
        return len(self.bodies) == 1


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a Program: its use count, its phase (and that one's place), the repeat of it."""

    number: int
    phase: Phase
    phase_index: int
    repeat: int


@dataclass(frozen=True)
class Program:
    """A schedule made concrete: validated, serialisable, the same for every executor.

    Attributes
    ----------
    name, variant
        Of the schedule that built it.
    world_size
        Number of ranks, at least 1.
    shape
        Sizes it was built for, by name (m rows in all; n and k of one rank).
    dtype
        Of inputs and outputs.
    transport
        Name of the backend whose capabilities it was built against.
    buffers, flags
        Every rank has an instance of each.
    phases
        In the order in which they run.
    caller_stream
        The stream that is the caller's own.
    computes
        Name of the function it computes (``all_gather_gemm``), for references; None if it has
        no name.
    schema_version
        Of the JSON form.

    Raises
    ------
    ProgramError
        If it contradicts itself; the message names rank, stream and operation.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    name: str
    variant: str
    world_size: int
    shape: tuple[tuple[str, int], ...]
    dtype: str
    transport: str
    buffers: tuple[Buffer, ...]
    flags: tuple[Flag, ...]
    phases: tuple[Phase, ...]
    caller_stream: str = "compute"
    computes: str | None = None
    schema_version: int = field(default=SCHEMA_VERSION)

    def __post_init__(self) -> None:
        from stretto.schedules.language.validation import validate

        if self.schema_version != SCHEMA_VERSION:
            raise ProgramError(
                f"this Program has schema version {self.schema_version}, "
                f"this Stretto reads version {SCHEMA_VERSION}; build it again"
            )
        validate(self)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The shape as a mapping."""
        return dict(self.shape)

    @cached_property
    def buffer(self) -> dict[str, Buffer]:
        """Buffers by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def flag(self) -> dict[str, Flag]:
        """Flags by name."""
        return {flag.name: flag for flag in self.flags}

    @cached_property
    def release(self) -> Flag | None:
        """The flag by which ranks give their slots back; None if they do not."""
        return next((flag for flag in self.flags if flag.purpose == "release"), None)

    @cached_property
    def slots(self) -> int:
        """Number of slots of the workspace; 0 if the Program uses none."""
        if self.release is not None:
            return self.release.slots
        return next((buffer.slots for buffer in self.buffers if in_slot(buffer)), 0)

    @property
    def symmetric(self) -> bool:
        """Whether every phase has one body for all ranks."""
        return all(phase.symmetric for phase in self.phases)

    @property
    def calls(self) -> int:
        """Number of calls in one execution of the Program."""
        return sum(phase.repeats for phase in self.phases)

    @property
    def operations(self) -> int:
        """Number of operations in one execution, over all ranks and calls."""
        return sum(
            phase.repeats * len(phase.body(rank).operations)
            for phase in self.phases
            for rank in range(self.world_size)
        )

    def call_sequence(self, first: int = 0) -> Iterator[Call]:
        """Yield the calls in order, counting uses of the workspace from `first`."""
        number = first
        for index, phase in enumerate(self.phases):
            for repeat in range(phase.repeats):
                yield Call(number, phase, index, repeat)
                number += 1

    def repeated(self, repeats: int) -> Program:
        """Return the Program that runs its only phase `repeats` times back to back."""
        if len(self.phases) != 1:
            raise ProgramError("only a Program of one phase can be repeated as a whole")
        phase = self.phases[0]
        return replace(self, phases=(replace(phase, repeats=phase.repeats * repeats),))

    def without(self, *ids: str) -> Program:
        """Return the Program with these operations, and every edge to them, taken out.

        Nothing repairs what they ordered: this is for showing what an operation is good for.
        """
        gone = set(ids)
        phases = []
        for phase in self.phases:
            bodies = tuple(
                Body(
                    tuple(
                        replace(
                            operation, after=tuple(id for id in operation.after if id not in gone)
                        )
                        for operation in body.operations
                        if operation.id not in gone
                    )
                )
                for body in phase.bodies
            )
            phases.append(replace(phase, bodies=bodies))
        return replace(self, phases=tuple(phases))

    def touches_caller(self, operation: Operation) -> bool:
        """Whether the operation reads or writes a buffer that the caller owns."""
        views = (*operation.reads(), *operation.writes())
        return any(self.buffer[view.buffer].of_caller for view in views)

    def entries(self, body: Body) -> tuple[str, ...]:
        """Return the operations that start after the caller's earlier work, one a side stream."""
        first: dict[str, str] = {}
        for operation in body.operations:
            if operation.stream != self.caller_stream and self.touches_caller(operation):
                first.setdefault(operation.stream, operation.id)
        return tuple(first.values())

    def exits(self, body: Body) -> tuple[str, ...]:
        """Return the operations that the caller's later work follows, one a side stream."""
        last: dict[str, str] = {}
        for operation in body.operations:
            if operation.stream != self.caller_stream and self.touches_caller(operation):
                last[operation.stream] = operation.id
        return tuple(last.values())

    @cached_property
    def slot_period(self) -> int:
        """Number of calls after which every buffer and flag is back at the same slot."""
        from math import lcm

        return lcm(
            *(buffer.slots for buffer in self.buffers), *(flag.slots for flag in self.flags), 1
        )
