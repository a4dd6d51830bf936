"""What a rank enqueues in a call, with everything resolved that does not depend on the call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stretto.schedules.language import (
    DTYPE_BYTES,
    FusedGemm,
    Gemm,
    OperationBase,
    Program,
    Put,
    Signal,
    Sync,
    View,
    Wait,
    ceil_div,
)
from stretto.schedules.verifier.world import Flags, Turn

__all__ = ["Line", "Lines", "Part", "Touch", "Wire", "wired"]


class Touch(NamedTuple):
    """A View of one rank with everything resolved but the call."""

    mode: str
    buffer: str
    memory: tuple[object, str]
    shape: int
    owner: int
    slots: int
    slot: int
    row: int
    row_stop: int
    column: int
    column_stop: int


Wire = tuple[int, int, int, int, int, int]
"""A Sync of one rank with everything resolved but the call: the word's four numbers, the value."""


class Part(NamedTuple):
    """One step of an operation as one rank does it."""

    kind: str
    touches: tuple[Touch, ...] = ()
    signals: tuple[Wire, ...] = ()
    waits: tuple[Wire, ...] = ()
    flies: bool = False


class Line(NamedTuple):
    """One operation as one rank enqueues it in every call."""

    operation: OperationBase
    after: tuple[int, ...]
    entry: bool
    exit: bool
    part: Part
    groups: tuple[tuple[int, tuple[Part, ...]], ...] = ()


class Lines:
    """Resolves operations, once for every Program, phase and rank.

    Attributes
    ----------
    shapes
        Bytes of a row and of an element, as far as they have occurred.
    """

    def __init__(self, programs: Sequence[Program], flags: Flags) -> None:
        self._programs, self._flags = programs, flags
        self.shapes: list[tuple[int, int]] = []
        self._shape_numbers: dict[tuple[int, int], int] = {}
        self._lines: dict[tuple[int, int, int], list[Line]] = {}
        self._spans: dict[tuple[int, View, int], tuple[int, ...]] = {}

    def of(self, turn: Turn, rank: int) -> list[Line]:
        """Return what `rank` enqueues in a call, in order."""
        key = (turn.program, id(turn.phase), rank)
        lines = self._lines.get(key)
        if lines is None:
            program, body = self._programs[turn.program], turn.phase.body(rank)
            entries, exits = set(program.entries(body)), set(program.exits(body))
            lines = self._lines[key] = [
                Line(
                    operation,
                    tuple(body.index[id] for id in operation.after),
                    operation.id in entries,
                    operation.id in exits,
                    Part("kernel")
                    if isinstance(operation, FusedGemm)
                    else self._part(turn.program, operation, rank),
                    tuple(self._groups(turn.program, operation, rank))
                    if isinstance(operation, FusedGemm)
                    else (),
                )
                for operation in body.operations
            ]
        return lines

    def _groups(
        self, program: int, operation: FusedGemm, rank: int
    ) -> Iterator[tuple[int, tuple[Part, ...]]]:
        parts = {part.id: part for part in operation.parts()}
        for number, group in enumerate(operation.groups):
            name = f"{operation.id}/{number}."
            own = [part for id, part in parts.items() if id.startswith(name)]
            out = self.resolved(program, "write", group.out, rank)
            rows, columns = out.row_stop - out.row, out.column_stop - out.column
            tiling = operation.tiling
            tiles = ceil_div(rows, tiling.tile_m) * ceil_div(columns, tiling.tile_n)
            yield tiles, tuple(self._part(program, part, rank) for part in own)

    def _part(self, program: int, operation: OperationBase, rank: int) -> Part:
        if isinstance(operation, Wait):
            return Part("wait", waits=self._wires(operation.waits(), rank))
        if isinstance(operation, Signal):
            return Part("signal", signals=self._wires(operation.signals(), rank))
        mode = "add" if isinstance(operation, Put) and operation.mode == "add" else "write"
        touches = tuple(
            [self.resolved(program, "read", view, rank) for view in operation.reads()]
            + [self.resolved(program, mode, view, rank) for view in operation.writes()]
        )
        flies = isinstance(operation, (Put, Gemm)) and touches[-1].owner != rank
        return Part(operation.kind, touches, self._wires(operation.signals(), rank), flies=flies)

    def _wires(self, syncs: Iterable[Sync], rank: int) -> tuple[Wire, ...]:
        return tuple(
            (*self._flags.number(sync.word, rank), sync.value.stride, sync.value.offset)
            for sync in syncs
        )

    def resolved(self, number: int, mode: str, view: View, rank: int) -> Touch:
        """Return a View of a rank in Program `number` as rows and columns of a memory."""
        program = self._programs[number]
        buffer = program.buffer[view.buffer]
        size = program.world_size
        key = (number, view, rank)
        span = self._spans.get(key)
        if span is None:
            place = view.resolve(buffer, rank=rank, world_size=size)
            span = self._spans[key] = (
                place.owner,
                place.row,
                place.row + place.rows,
                place.column,
                place.column + place.columns,
            )
        element = DTYPE_BYTES[buffer.dtype]
        shape = (buffer.columns.stored(size) * element, element)
        if shape not in self._shape_numbers:
            self._shape_numbers[shape] = len(self.shapes)
            self.shapes.append(shape)
        shared = buffer.role == "workspace" and buffer.kind == "symmetric"
        memory = ("shared" if shared else number, buffer.name)
        return Touch(
            mode,
            view.buffer,
            memory,
            self._shape_numbers[shape],
            span[0],
            buffer.slots,
            view.slot,
            *span[1:],
        )


def wired(wire: Wire, call: int) -> tuple[int, int]:
    """Return the number of the word and the value in a call."""
    base, slots, step, slot, stride, offset = wire
    return base + step * ((call + slot) % slots), call * stride + offset
