"""What one rank asks of a collective, and whether its rectangles fit."""

from __future__ import annotations

from typing import NamedTuple

from stretto.schedules.language import (
    DTYPE_BYTES,
    CollectiveKind,
    InvalidInput,
    Unsupported,
)
from stretto.transports.interface import Memory
from stretto.transports.posix.copying import check_rectangle

__all__ = ["SUMMED_IN", "Shape", "span_bytes"]

SUMMED_IN = {"bf16": "fp32", "fp16": "fp32", "fp32": "fp32", "fp64": "fp64", "int32": "int32"}
"""Types whose numbers can be added, and the type that they are added in."""


class Shape(NamedTuple):
    """One rank's part of a collective, as it was asked for.

    Block b begins at row ``b * blocks[0]``: blocks are full, then one may be short, then empty.
    """

    kind: CollectiveKind
    source: Memory
    destination: Memory
    dtype: str
    blocks: tuple[int, ...]
    rank: int

    @property
    def full(self) -> int:
        """Rows of a full block."""
        return self.blocks[0] if self.blocks else 0

    @property
    def own(self) -> int:
        """Valid rows of this rank's block."""
        return self.blocks[self.rank]

    @property
    def valid(self) -> int:
        """Valid rows of all blocks."""
        return sum(self.blocks)

    @property
    def stored(self) -> int:
        """Rows of all blocks when every one of them is full."""
        return self.full * len(self.blocks)

    @property
    def signature(self) -> str:
        """What must be the same on all ranks."""
        return repr((self.kind, self.dtype, self.source.row_bytes, self.blocks))

    @property
    def overlapping(self) -> bool:
        """Whether source and destination may have a byte in common."""
        begin, end = self.source.address, self.source.address + span_bytes(self.source)
        other = self.destination.address
        return begin < other + span_bytes(self.destination) and other < end

    def check(self, world_size: int) -> None:
        """Refuse blocks that are no Program's, and rectangles that do not fit them.

        Raises
        ------
        InvalidInput
            If they do not fit.
        Unsupported
            If numbers of that type cannot be added.
        """
        left = [max(self.valid - peer * self.full, 0) for peer in range(world_size)]
        if self.blocks != tuple(min(rows, self.full) for rows in left):
            raise InvalidInput(
                f"Blocks {self.blocks} are not {world_size} full ones, then one short, then empty."
            )
        part, whole = (self.own, self.full), (self.valid, self.stored)
        self._check_rows(self.source, part if self.kind == "all_gather" else whole)
        self._check_rows(self.destination, part if self.kind == "reduce_scatter" else whole)
        if self.source.row_bytes != self.destination.row_bytes:
            raise InvalidInput(f"{self.kind}: source and destination differ in the bytes of a row.")
        if self.dtype not in DTYPE_BYTES:
            raise InvalidInput(f"{self.kind}: there is no type {self.dtype!r}.")
        if self.kind != "all_gather":
            self._check_numbers()

    def _check_rows(self, memory: Memory, rows: tuple[int, int]) -> None:
        check_rectangle(memory)
        if not rows[0] <= memory.rows <= rows[1]:
            raise InvalidInput(
                f"{self.kind} of blocks {self.blocks}: {memory.rows} rows do not fit on rank "
                f"{self.rank}, which needs {rows[0]}."
            )

    def _check_numbers(self) -> None:
        if self.dtype not in SUMMED_IN:
            raise Unsupported(
                f"rccl cannot add numbers of type {self.dtype}; it adds {', '.join(SUMMED_IN)}."
            )
        size = DTYPE_BYTES[self.dtype]
        for memory in (self.source, self.destination):
            if any(one % size for one in (memory.address, memory.row_bytes, memory.pitch_bytes)):
                raise InvalidInput(
                    f"{self.kind}: {memory} does not hold whole numbers of type {self.dtype}."
                )


def span_bytes(memory: Memory) -> int:
    """Return the bytes from the first to the last one that a rectangle names."""
    if not memory.total_bytes:
        return 0
    return (memory.rows - 1) * memory.pitch_bytes + memory.row_bytes
