"""The values of a Program that depend on the rank or on the call, kept symbolic.

A schedule is written once for all ranks.  Whose rows, which neighbour, which epoch: these stay
expressions in the Program (`Peer`, `Block`, `Epoch`), so that one body stands for every rank and
one call for a thousand.  Each expression has one method that gives its number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stretto.schedules.language.errors import InvalidInput

__all__ = [
    "SELF",
    "WHOLE",
    "Block",
    "Epoch",
    "Extent",
    "Fixed",
    "Interval",
    "Peer",
    "Whole",
    "ceil_div",
]

FORBID_EXTRA: dict[str, str] = {"extra": "forbid"}
"""Read by the JSON codec: unknown fields are an error, not noise."""


def ceil_div(numerator: int, denominator: int) -> int:
    """Round the quotient of two non-negative integers up."""
    return -(-numerator // denominator)


@dataclass(frozen=True, slots=True, order=True)
class Peer:
    """A rank: relative to the rank that runs the operation, or absolute.

    ``Peer(1)`` is the next rank (modulo the world size), ``Peer(3, absolute=True)`` is rank 3.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    offset: int = 0
    absolute: bool = False

    def of(self, rank: int, world_size: int) -> int:
        """Return the rank that this stands for when `rank` runs the operation."""
        return self.offset if self.absolute else (rank + self.offset) % world_size

    def __add__(self, steps: int) -> Peer:
        return Peer(self.offset + steps, self.absolute)

    def __sub__(self, steps: int) -> Peer:
        return Peer(self.offset - steps, self.absolute)

    def within(self, world_size: int) -> Peer:
        """Return the same rank with its offset in 0 .. world_size - 1; an absolute one as it is."""
        return self if self.absolute else Peer(self.offset % world_size)

    def __str__(self) -> str:
        if self.absolute:
            return f"rank {self.offset}"
        return f"rank{self.offset:+d}" if self.offset else "rank"


SELF = Peer(0)
"""The rank that runs the operation."""


@dataclass(frozen=True, slots=True)
class Block:
    """The part [start, stop) of one rank's block of an axis, clipped to the block's valid size.

    `stop` None is the end of the block.  A trailing block may be short or empty.  With `chunks`
    above 1 it is chunk number `chunk` of so many equal ones, of ``ceil(block / chunks)`` elements,
    clipped likewise; then start and stop say nothing.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    of: Peer
    start: int = 0
    stop: int | None = None
    chunk: int = 0
    chunks: int = 1
    form: Literal["block"] = "block"


@dataclass(frozen=True, slots=True)
class Fixed:
    """The elements [start, stop) of the axis as stored, the same on every rank."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    start: int
    stop: int
    form: Literal["fixed"] = "fixed"


@dataclass(frozen=True, slots=True)
class Whole:
    """All valid elements of the axis (of a sharded axis: of the owner's block)."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    form: Literal["whole"] = "whole"


WHOLE = Whole()
Interval = Annotated[Block | Fixed | Whole, Field(discriminator="form")]


@dataclass(frozen=True, slots=True)
class Extent:
    """One axis of a buffer: its global size, and how much of it a rank stores.

    Attributes
    ----------
    size
        Global number of elements, at least 0.
    layout
        ``full``: every rank stores all `size` elements.  ``padded``: every rank stores
        world_size equal blocks of ``ceil(size / world_size)``, of which the first `size` elements
        are valid.  ``shard``: every rank stores its own block alone, at 0.  ``exchange``: every
        rank stores world_size blocks at equal steps, each as long as its *owner's* block: block j
        on rank r is what rank j has for rank r's rows.

    An axis of `size` elements is split into contiguous blocks of ``ceil(size / world_size)``:
    with 9 elements and 8 ranks 2, 2, 2, 2, 1, 0, 0, 0.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    size: int
    layout: Literal["full", "padded", "shard", "exchange"] = "full"

    def block(self, world_size: int) -> int:
        """Return the number of elements of an unclipped block."""
        return ceil_div(self.size, world_size)

    def valid(self, block_of: int, world_size: int) -> int:
        """Return how many elements the block of rank `block_of` really has."""
        block = self.block(world_size)
        return min(max(self.size - block_of * block, 0), block)

    def stored(self, world_size: int) -> int:
        """Return how many elements a rank stores."""
        if self.layout == "full":
            return self.size
        block = self.block(world_size)
        return block if self.layout == "shard" else block * world_size

    def resolve(
        self, interval: Interval, *, rank: int, owner: int, world_size: int
    ) -> tuple[int, int]:
        """Return start and stop, in elements of the owner's storage.

        Parameters
        ----------
        interval
            Which part of the axis.
        rank
            The rank that runs the operation (relative ranks count from it).
        owner
            The rank whose buffer is meant.
        world_size
            Number of ranks.

        Raises
        ------
        InvalidInput
            If the owner does not store that part.
        """
        if isinstance(interval, Fixed):
            if not 0 <= interval.start <= interval.stop <= self.stored(world_size):
                raise InvalidInput(
                    f"[{interval.start}, {interval.stop}) is outside the "
                    f"{self.stored(world_size)} stored elements"
                )
            return interval.start, interval.stop
        if isinstance(interval, Whole):
            if self.layout == "exchange":
                raise InvalidInput("an exchange is used block by block; name a rank's block")
            return 0, self.valid(owner, world_size) if self.layout == "shard" else self.size
        of = interval.of.of(rank, world_size)
        if self.layout == "shard" and of != owner:
            raise InvalidInput(f"rank {owner} stores its own block alone, not that of rank {of}")
        valid = self.valid(owner if self.layout == "exchange" else of, world_size)
        if interval.chunks > 1:
            length = ceil_div(self.block(world_size), interval.chunks)
            start = min(interval.chunk * length, valid)
            stop = min(start + length, valid)
        else:
            start = min(interval.start, valid)
            stop = valid if interval.stop is None else min(interval.stop, valid)
        if not 0 <= start <= stop or not 0 <= interval.chunk < interval.chunks:
            raise InvalidInput(f"{interval} is no part of a block")
        base = 0
        if self.layout == "exchange":
            base = of * self.block(world_size)
        elif self.layout != "shard":
            base = min(of * self.block(world_size), self.size)
        return base + start, base + stop


@dataclass(frozen=True, slots=True)
class Epoch:
    """A value that grows with the calls: ``call * stride + offset``.

    `call` is the use count of the workspace, which never goes back, so nothing has to be reset.
    ``Epoch(0, v)`` is the constant v.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    stride: int = 1
    offset: int = 1

    def at(self, call: int) -> int:
        """Return the value at the given use of the workspace (not reduced to 32 bits)."""
        return call * self.stride + self.offset
