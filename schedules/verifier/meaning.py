"""What numbers are where: a run with symbols in place of numbers.

If nothing races, every run gives the same numbers, so one run tells what all compute.  Memory holds
*patches*: rectangles whose element (i, j) is element (i + down, j + right) of one symbolic matrix.
A copy moves patches, a GEMM makes a new symbol out of those of its operands::

    x of call 0             ("input", "x", 0)                 elements by global row
    a[m, k] @ b[n, k].T     a sum of ("dot", a, b, k0, k)     rows those of a, columns rows of b
    a + b                   a sum of both, terms in one order; dots over adjoining k are joined

Two outputs are equal if their symbols are.  What a Program says it computes (`Program.computes`)
is worked out in the same symbols, and every output held against it.  Bytes that nobody wrote are
found on the way: there is no patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from stretto.schedules.language import (
    Buffer,
    Collective,
    Copy,
    Fill,
    FusedGemm,
    Gemm,
    Opaque,
    OperationBase,
    Program,
    Put,
    Reduce,
    RowOp,
)
from stretto.schedules.verifier.formulas import FORMULAS, Expected
from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.report import Reporter
from stretto.schedules.verifier.symbols import Symbols, Value
from stretto.schedules.verifier.unroll import BEGIN, END, NEVER, Access, World

__all__ = ["find_wrong_numbers"]


class Patch(NamedTuple):
    """A rectangle of memory and what is in it."""

    row: int
    row_stop: int
    column: int
    column_stop: int
    value: Value


class Block(NamedTuple):
    """A rectangle read from memory: its size, and what is in it (places count from its corner)."""

    rows: int
    columns: int
    patches: list[Patch]
