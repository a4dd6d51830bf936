"""What a schedule holds while it is written: streams, events, buffers and parts of them, flags."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stretto.schedules.language.buffers import Buffer, Flag, FlagRef, View
from stretto.schedules.language.errors import ProgramError
from stretto.schedules.language.expressions import (
    SELF,
    WHOLE,
    Block,
    Fixed,
    Interval,
    Peer,
)

__all__ = ["BufferHandle", "Event", "FlagHandle", "Region", "Stream", "ThisRank"]


class ThisRank:
    """The rank that a schedule is written for; ``rank + 1`` and ``rank - step`` are others."""

    def __add__(self, steps: int) -> Peer:
        return SELF + steps

    def __sub__(self, steps: int) -> Peer:
        return SELF - steps


@dataclass(frozen=True)
class Event:
    """An enqueued operation, to be waited for by other streams."""

    id: str


class Stream:
    """A FIFO queue of one rank."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._pending: list[str] = []

    def after(self, *events: Event) -> None:
        """Make the next operation on this stream wait for `events` of other streams."""
        self._pending += [event.id for event in events]

    def take(self) -> tuple[str, ...]:
        """Return and forget the events that the next operation waits for."""
        pending, self._pending = tuple(dict.fromkeys(self._pending)), []
        return pending


@dataclass(frozen=True)
class Region:
    """A rectangle of a buffer while a schedule is written; see `BufferHandle`."""

    buffer: Buffer
    rows: Interval = WHOLE
    column_interval: Interval = WHOLE

    def part(self, start: int, stop: int | None = None) -> Region:
        """Return rows [start, stop) of this block, clipped to its valid rows."""
        if not isinstance(self.rows, Block):
            raise ProgramError("only rows of a block can be cut further; index the buffer first")
        return replace(self, rows=replace(self.rows, start=start, stop=stop))

    def chunk(self, number: int, *, of: int) -> Region:
        """Return chunk `number` of this block, cut into `of` equal ones; the last may be short."""
        if not isinstance(self.rows, Block):
            raise ProgramError("only a block can be cut into chunks; index the buffer first")
        if not 0 <= number < of:
            raise ProgramError(f"there is no chunk {number} of {of}")
        return replace(self, rows=Block(self.rows.of, chunk=number, chunks=of))

    def columns(self, interval: Interval) -> Region:
        """Return the same rows of some columns."""
        return replace(self, column_interval=interval)

    def view(self, on: Peer = SELF) -> View:
        """Return the rectangle on rank `on`."""
        return View(self.buffer.name, self.rows, self.column_interval, on)

    @property
    def shard(self) -> Peer | None:
        """Whose rows these are, if they are one rank's."""
        return self.rows.of if isinstance(self.rows, Block) else None


class BufferHandle(Region):
    """A whole buffer; ``buffer[peer]`` are the rows of that rank's block, ``buffer[a:b]`` rows."""

    def __getitem__(self, rows: Peer | ThisRank | slice) -> Region:
        if isinstance(rows, slice):
            if rows.step is not None or rows.start is None or rows.stop is None:
                raise ProgramError("rows are given as buffer[start:stop]")
            return Region(self.buffer, Fixed(rows.start, rows.stop))
        if not isinstance(rows, (Peer, ThisRank)):
            raise ProgramError(
                f"rows of {self.buffer.name!r} are given as [start:stop] or by whose block they "
                f"are (rank + 1, Peer(0, absolute=True)), not by {rows!r}"
            )
        return Region(self.buffer, Block(rows if isinstance(rows, Peer) else SELF))


@dataclass(frozen=True)
class FlagHandle:
    """A flag array while a schedule is written."""

    flag: Flag

    def word(self, index: int | Peer = 0, *, on: Peer = SELF) -> FlagRef:
        """Return one word of it, at home on rank `on`."""
        return FlagRef(self.flag.name, index, on)
