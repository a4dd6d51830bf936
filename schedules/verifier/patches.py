"""What is in memory, as patches of symbols, and arithmetic on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from stretto.schedules.verifier.symbols import Symbols, Value
from stretto.schedules.verifier.world import Access

__all__ = [
    "Block",
    "Corners",
    "Memory",
    "added",
    "clipped",
    "joined",
    "outside",
    "product",
    "runs",
    "stacked",
]

Corners = tuple[int, int, int, int]
"""First row, stop row, first column, stop column."""


class Block(NamedTuple):
    """Something read from memory: its size, and patches placed from its own corner."""

    rows: int
    columns: int
    patches: list[tuple[Corners, Value]]


class Memory:
    """Patches of every storage, in the shape in which they were written last."""

    def __init__(self, symbols: Symbols) -> None:
        self.symbols = symbols
        self._held: dict[int, tuple[int, dict[Corners, Value]]] = {}

    def clear(self, access: Access) -> None:
        """Forget what is in the rectangle."""
        held = self._patches(access)
        self._cut(held, _corners(access))

    def zero(self, access: Access, whole: Corners) -> None:
        """Let the access's storage hold zeros."""
        self._held[access.storage] = (access.shape, {whole: self.symbols.zero})

    def set(self, access: Access, block: Block) -> None:
        """Put a block into the rectangle."""
        held, where = self._patches(access), _corners(access)
        if held.pop(where, None) is None:
            self._cut(held, where)
        for (row, row_stop, column, column_stop), value in block.patches:
            corners = (
                access.row + row,
                access.row + row_stop,
                access.column + column,
                access.column + column_stop,
            )
            held[corners] = self.symbols.moved(value, -access.row, -access.column)

    def get(self, access: Access) -> Block:
        """Return what is in the rectangle."""
        held, where = self._patches(access), _corners(access)
        rows, columns = access.row_stop - access.row, access.column_stop - access.column
        value = held.get(where)
        if value is not None:
            moved = self.symbols.moved(value, access.row, access.column)
            return Block(rows, columns, [((0, rows, 0, columns), moved)])
        patches = []
        for corners, value in held.items():
            common = _common(corners, where)
            if common is not None:
                inside = (
                    common[0] - access.row,
                    common[1] - access.row,
                    common[2] - access.column,
                    common[3] - access.column,
                )
                patches.append((inside, self.symbols.moved(value, access.row, access.column)))
        return Block(rows, columns, patches)

    def _patches(self, access: Access) -> dict[Corners, Value]:
        shape, held = self._held.get(access.storage, (access.shape, {}))
        if shape != access.shape:  # another Program's idea of the same bytes
            held = {}
        self._held[access.storage] = (access.shape, held)
        return held

    def _cut(self, held: dict[Corners, Value], where: Corners) -> None:
        """Take a rectangle out of the patches."""
        row, row_stop, column, column_stop = where
        for corners in [
            one
            for one in held
            if one[0] < row_stop and row < one[1] and one[2] < column_stop and column < one[3]
        ]:
            value = held.pop(corners)
            for rest in outside(corners, where):
                held[rest] = value


# ---- arithmetic ----------------------------------------------------------------------------------


def product(a: Block, b: Block, symbols: Symbols) -> Block:
    """Return ``a @ b.T``."""
    patches = []
    left, right = list(runs(a, symbols)), list(runs(b, symbols))
    for (row, row_stop), one in left:
        for (column, column_stop), other in right:
            value = symbols.sum(
                symbols.dot(x, y, start, stop - start)
                for start, stop, x, y in _side_by_side(one, other)
            )
            # Rows of the product are those of a, columns the rows of b.
            placed = symbols.moved(value, -row, -column)
            patches.append(((row, row_stop, column, column_stop), placed))
    return Block(a.rows, b.rows, patches)


def added(blocks: Sequence[Block], symbols: Symbols) -> Block:
    """Return the sum of blocks of one size."""
    if len(blocks) == 1:
        return blocks[0]
    first = blocks[0]
    row_cuts = sorted({edge for block in blocks for one, _ in block.patches for edge in one[:2]})
    column_cuts = sorted({edge for block in blocks for one, _ in block.patches for edge in one[2:]})
    patches = []
    for row, row_stop in pairwise(row_cuts):
        for column, column_stop in pairwise(column_cuts):
            corners = (row, row_stop, column, column_stop)
            values = [
                value
                for block in blocks
                for one, value in block.patches
                if _common(one, corners) is not None
            ]
            if len(values) == len(blocks):
                patches.append((corners, symbols.sum(values)))
    return Block(first.rows, first.columns, patches)


# ---- rectangles ----------------------------------------------------------------------------------


def _corners(access: Access) -> Corners:
    return access.row, access.row_stop, access.column, access.column_stop


def _common(one: Corners, other: Corners) -> Corners | None:
    row, row_stop = max(one[0], other[0]), min(one[1], other[1])
    column, column_stop = max(one[2], other[2]), min(one[3], other[3])
    return (row, row_stop, column, column_stop) if row < row_stop and column < column_stop else None


def outside(one: Corners, hole: Corners) -> Iterator[Corners]:
    """Yield the up to four rectangles that are left of `one` without `hole`."""
    common = _common(one, hole)
    if common is None:
        yield one
        return
    row, row_stop, column, column_stop = common
    if one[0] < row:
        yield one[0], row, one[2], one[3]
    if row_stop < one[1]:
        yield row_stop, one[1], one[2], one[3]
    if one[2] < column:
        yield row, row_stop, one[2], column
    if column_stop < one[3]:
        yield row, row_stop, column_stop, one[3]


def runs(
    block: Block, symbols: Symbols
) -> Iterator[tuple[tuple[int, int], list[tuple[int, int, Value]]]]:
    """Yield runs of rows between which no patch begins or ends, each with its patches.

    Rows of a patch's value count from the first row of the run.
    """
    cuts = sorted({edge for corners, _ in block.patches for edge in corners[:2]})
    for row, row_stop in pairwise(cuts):
        pieces = [
            (corners[2], corners[3], symbols.moved(value, row, 0))
            for corners, value in block.patches
            if corners[0] <= row and row_stop <= corners[1]
        ]
        yield (row, row_stop), sorted(pieces)


def _side_by_side(
    one: Sequence[tuple[int, int, Value]], other: Sequence[tuple[int, int, Value]]
) -> Iterator[tuple[int, int, Value, Value]]:
    """Yield the parts of k in which both operands are of one piece."""
    for start, stop, left in one:
        for first, last, right in other:
            if max(start, first) < min(stop, last):
                yield max(start, first), min(stop, last), left, right


def stacked(blocks: Sequence[Block], symbols: Symbols) -> Block:
    """Return blocks one below the other."""
    patches = []
    row = 0
    for block in blocks:
        for (first, stop, column, column_stop), value in block.patches:
            corners = (first + row, stop + row, column, column_stop)
            patches.append((corners, symbols.moved(value, -row, 0)))
        row += block.rows
    return Block(row, blocks[0].columns, patches)


def clipped(block: Block, row: int, rows: int, columns: int, symbols: Symbols) -> Block:
    """Return some rows of a block as a block of their own."""
    patches = []
    for corners, value in block.patches:
        common = _common(corners, (row, row + rows, 0, columns))
        if common is not None:
            inside = (common[0] - row, common[1] - row, common[2], common[3])
            patches.append((inside, symbols.moved(value, row, 0)))
    return Block(rows, columns, patches)


def joined(patches: Sequence[tuple[Corners, Value]]) -> list[tuple[Corners, Value]]:
    """Return patches with those joined that go on with the same value in the rows below."""
    found: list[tuple[Corners, Value]] = []
    for corners, value in sorted(patches, key=lambda patch: (patch[0][2:], patch[0][:2])):
        last = found[-1] if found else None
        if last is not None and (last[0][1:], last[1]) == ((corners[0], *corners[2:]), value):
            found[-1] = ((last[0][0], *corners[1:]), value)
        else:
            found.append((corners, value))
    return found
