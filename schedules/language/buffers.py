"""Buffers, flags, and the rectangles and words in them that operations name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from stretto.schedules.language.errors import InvalidInput
from stretto.schedules.language.expressions import (
    FORBID_EXTRA,
    SELF,
    WHOLE,
    Extent,
    Interval,
    Peer,
)

__all__ = [
    "DTYPE_BYTES",
    "Buffer",
    "DType",
    "Flag",
    "FlagRef",
    "Rectangle",
    "View",
    "Word",
    "cyclic_reached",
]

DType = Literal["bf16", "fp16", "fp32", "fp64", "fp8", "int32"]
DTYPE_BYTES: dict[str, int] = {
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "fp64": 8,
    "fp8": 1,
    "int32": 4,
}


class Rectangle(NamedTuple):
    """A View with all its numbers: rows and columns in elements of the owner's storage."""

    buffer: str
    owner: int
    slot: int
    row: int
    rows: int
    column: int
    columns: int

    def overlaps(self, other: Rectangle) -> bool:
        """Whether both name at least one common element."""
        return (
            self[:3] == other[:3]
            and self.row < other.row + other.rows
            and other.row < self.row + self.rows
            and self.column < other.column + other.columns
            and other.column < self.column + self.columns
        )


@dataclass(frozen=True, slots=True)
class Buffer:
    """A matrix that every rank has one instance (and `slots` copies) of.

    Attributes
    ----------
    name
        Unique in the Program.
    role
        ``input`` and ``output`` belong to the caller, ``weight`` too but it stays the same from
        call to call, ``workspace`` belongs to the library.
    kind
        ``symmetric``: peers may write into it.  ``local``: this rank alone uses it.
    dtype
        Of one element.
    rows, columns
        The two axes; a row is contiguous, rows are `stored columns` apart.
    slots
        Copies used in turn, ``slot = (call + offset) mod slots``.
    initial
        What it holds before the first call: ``caller`` (the caller's values), ``zero``, or
        ``undefined`` (reading it before a write is an error).
    reuse
        When its content may be overwritten by who owns it: ``caller_stream`` (by work that the
        caller enqueues on its stream after the call), ``release`` (once its readers have
        signalled that they are done), ``never`` (it must stay as it is).
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    name: str
    role: Literal["input", "weight", "output", "workspace"]
    dtype: DType
    rows: Extent
    columns: Extent
    kind: Literal["local", "symmetric"] = "local"
    slots: int = 1
    initial: Literal["caller", "zero", "undefined"] = "undefined"
    reuse: Literal["caller_stream", "release", "never"] = "caller_stream"

    @property
    def of_caller(self) -> bool:
        """Whether the caller owns it, so that accesses are ordered by the caller's stream."""
        return self.role != "workspace"

    def slot_bytes(self, world_size: int) -> int:
        """Return the size of one slot on one rank, in bytes."""
        elements = self.rows.stored(world_size) * self.columns.stored(world_size)
        return elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class View:
    """A rectangle of one rank's instance of a buffer.

    Attributes
    ----------
    buffer
        The buffer's name.
    rows, columns
        Which part of either axis.
    on
        Whose instance.
    slot
        Added to the call's number to find the slot.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    buffer: str
    rows: Interval = WHOLE
    columns: Interval = WHOLE
    on: Peer = SELF
    slot: int = 0

    def resolve(self, buffer: Buffer, *, rank: int, world_size: int, call: int = 0) -> Rectangle:
        """Return the rectangle that `rank` means by this view in use `call` of the workspace."""
        owner = self.on.of(rank, world_size)
        try:
            row, row_stop = buffer.rows.resolve(
                self.rows, rank=rank, owner=owner, world_size=world_size
            )
            column, column_stop = buffer.columns.resolve(
                self.columns, rank=rank, owner=owner, world_size=world_size
            )
        except InvalidInput as error:
            raise InvalidInput(f"view of buffer {self.buffer!r}: {error}") from error
        return Rectangle(
            self.buffer,
            owner,
            (call + self.slot) % buffer.slots,
            row,
            row_stop - row,
            column,
            column_stop - column,
        )


class Word(NamedTuple):
    """A FlagRef with all its numbers: one 32-bit word in the home rank's memory."""

    flag: str
    home: int
    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class Flag:
    """An array of 32-bit words that every rank has an instance of; ranks signal by them.

    Attributes
    ----------
    name
        Unique in the Program.
    kind
        ``epoch``: a signal sets it to a growing value, a wait passes at ``>=`` (compared
        cyclically in 32 bits), nothing is reset.  ``counter``: a signal adds, a wait passes at
        ``>=`` the sum of all adds that can precede it.  ``mailbox``: depth one; a signal waits
        for 0 and writes 1, a wait waits for 1 and writes 0.
    count
        Words in the array; one index may stand for one peer or one block.
    slots
        Copies used in turn, as of a buffer.
    initial
        Value before the first call.
    purpose
        ``arrival`` and ``release`` are the workspace's protocol
        (`stretto.schedules.language.workspace`); ``own`` is the Program's.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    name: str
    kind: Literal["epoch", "counter", "mailbox"] = "epoch"
    count: int = 1
    slots: int = 1
    initial: int = 0
    purpose: Literal["own", "arrival", "release"] = "own"


@dataclass(frozen=True, slots=True)
class FlagRef:
    """One word of a flag array: on whose rank (its home), at which index.

    An index given as a `Peer` is that rank's number.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    flag: str
    index: int | Peer = 0
    on: Peer = SELF
    slot: int = 0

    def resolve(self, flag: Flag, *, rank: int, world_size: int, call: int = 0) -> Word:
        """Return the word that `rank` means by this reference in use `call`."""
        index = self.index if isinstance(self.index, int) else self.index.of(rank, world_size)
        home = self.on.of(rank, world_size)
        return Word(self.flag, home, (call + self.slot) % flag.slots, index)


def cyclic_reached(seen: int, expected: int) -> bool:
    """Whether a 32-bit epoch `seen` has reached `expected`, across the wrap at 2^32.

    True if ``seen - expected`` modulo 2^32 is below 2^31 (serial number arithmetic, RFC 1982).
    """
    return (seen - expected) & 0xFFFFFFFF < 0x80000000
