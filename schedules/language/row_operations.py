"""The named row operations: operands, options, formulas and cost of each, in one table.

A row operation works on each row (token) by itself.  The table says what a `RowOp` of a known name
takes and gives; a name that is not here belongs to the caller, who states its cost and gives its
implementation.  For `n` the columns of the first input, and i a row::

    add(x, ...)               y = x + ..., in the given order
    rms_norm(x; w)            y[i] = x[i] / sqrt(mean(x[i] ** 2) + eps) * w, without w if not given
    add_rms_norm(x, r; w)     s = x + r;  y = rms_norm(s; w), of s before it is rounded
    silu_mul(g, u)            y = g / (1 + exp(-g)) * u
    quantise_fp8(x)           scale[i] = max(max(abs(x[i])) / 448, 2 ** -126);  q = x / scale
    dequantise_fp8(q, scale)  y = q * scale
    top_k(x)                  v[i] = the k largest of x[i], largest first;  j[i] = their columns;
                              of equal ones the first column comes first

Arithmetic is in fp32, in fp64 where an input, a table or an output is fp64; every output is rounded
once, to nearest, ties to even.

Sources: RMSNorm is Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.  SiLU is
Elfwing, Uchibe and Doya, "Sigmoid-Weighted Linear Units", 2017; its product with a second input is
the gate of Shazeer, "GLU Variants Improve Transformer", 2020.  fp8 is E4M3 of the "OCP 8-bit
Floating Point Specification (OFP8)", revision 1.0: no infinities, the largest number is 448.  The
bound 2 ** -126, the smallest normal fp32 number, gives a row of zeros a scale to divide by.

Cost: a row operation is one pass; it reads every input and every table once and writes every output
once.  An addition, a multiplication, a division, a comparison, a square root and an exponential
count as one floating-point operation each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, log2
from typing import NamedTuple

from stretto.schedules.language.buffers import DTYPE_BYTES
from stretto.schedules.language.operations import RowOp

__all__ = [
    "FP8_LARGEST",
    "ROW_OPERATIONS",
    "SMALLEST_SCALE",
    "Matrix",
    "Operand",
    "Option",
    "RowOperation",
    "options_of",
    "row_operation_error",
]

FP8_LARGEST = 448.0
"""The largest number of E4M3."""

SMALLEST_SCALE = 2.0**-126
"""The smallest scale of a quantised row: the smallest normal fp32 number."""

FLOATING = ("bf16", "fp16", "fp32", "fp64")


class Matrix(NamedTuple):
    """Rows, columns and dtype of an operand, as one rank has it."""

    rows: int
    columns: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Operand:
    """An input, a table or an output of a row operation.

    Attributes
    ----------
    name
        As in the formula.
    columns
        ``n`` for the columns of the first input, a number, or the name of an option that gives it.
        Rows are those of the operation; a table has one row.
    dtypes
        Those it may have.
    like
        Name of an operand whose dtype it must have; None for any of `dtypes`.
    repeats
        Whether more operands of the same kind may follow it.
    optional
        Whether it may be left out.
    """

    name: str
    columns: str = "n"
    dtypes: tuple[str, ...] = FLOATING
    like: str | None = None
    repeats: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """A number that an operation takes.

    Attributes
    ----------
    default
        Its value where a RowOp does not state it.
    lowest, highest
        The range, ends included.
    whole
        Whether it must be a whole number.
    up_to_columns
        Whether it must not exceed `n`.
    """

    default: float
    lowest: float = -inf
    highest: float = inf
    whole: bool = False
    up_to_columns: bool = False


Flops = Callable[[int, int, Mapping[str, float]], float]
"""Floating-point operations of one row: of `n`, the number of inputs, and the options."""


@dataclass(frozen=True, slots=True)
class RowOperation:
    """What a RowOp of one name takes and gives, and what a row costs.

    Attributes
    ----------
    name
        `RowOp.function`.
    inputs, outputs
        Operands with a row for each row of the operation.
    flops
        Floating-point operations of one row.
    tables
        Operands of one row, read whole.
    options
        By name.
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    flops: Flops
    tables: tuple[Operand, ...] = ()
    options: tuple[tuple[str, Option], ...] = ()

    def flops_per_row(
        self, columns: int, inputs: int, options: Mapping[str, float] | None = None
    ) -> float:
        """Return the floating-point operations of one row.

        Parameters
        ----------
        columns
            `n`, the columns of the first input.
        inputs
            The number of inputs.
        options
            Those that differ from their defaults.
        """
        return self.flops(columns, inputs, self.completed(options or {}))

    def bytes_per_row(self, operands: Sequence[tuple[int, str]]) -> float:
        """Return the bytes that one row moves, tables left out.

        Parameters
        ----------
        operands
            Columns and dtype of every input and output.
        """
        return float(sum(columns * DTYPE_BYTES[dtype] for columns, dtype in operands))

    def completed(self, options: Mapping[str, float]) -> dict[str, float]:
        """Return all options, with defaults for those that are not stated."""
        return {name: options.get(name, option.default) for name, option in self.options}


def _of_each(count: float) -> Flops:
    """Return the cost of so many operations for each of `n` columns."""
    return lambda n, inputs, options: count * n


_EPS = (("eps", Option(1e-6, lowest=0.0, highest=1.0)),)
_WEIGHT = (Operand("w", optional=True),)

ROW_OPERATIONS: Mapping[str, RowOperation] = {
    entry.name: entry
    for entry in (
        RowOperation(
            "add",
            (Operand("x", dtypes=(*FLOATING, "fp8"), repeats=True),),
            (Operand("y", dtypes=(*FLOATING, "fp8")),),
            lambda n, inputs, options: (inputs - 1) * n,
        ),
        # square, sum, divide, weight; then mean, eps and root once a row
        RowOperation(
            "rms_norm",
            (Operand("x"),),
            (Operand("y"),),
            lambda n, inputs, options: 4 * n + 3,
            _WEIGHT,
            _EPS,
        ),
        RowOperation(
            "add_rms_norm",
            (Operand("x"), Operand("r")),
            (Operand("s"), Operand("y")),
            lambda n, inputs, options: 5 * n + 3,
            _WEIGHT,
            _EPS,
        ),
        # negate, exponential, add, divide, multiply
        RowOperation("silu_mul", (Operand("g"), Operand("u")), (Operand("y"),), _of_each(5)),
        # magnitude, maximum, divide; then scale and its bound once a row
        RowOperation(
            "quantise_fp8",
            (Operand("x", dtypes=("bf16", "fp16", "fp32")),),
            (Operand("q", dtypes=("fp8",)), Operand("scale", "1", ("fp32",))),
            lambda n, inputs, options: 3 * n + 2,
        ),
        RowOperation(
            "dequantise_fp8",
            (Operand("q", dtypes=("fp8",)), Operand("scale", "1", ("fp32",))),
            (Operand("y", dtypes=("bf16", "fp16", "fp32")),),
            _of_each(1),
        ),
        # a heap of k
        RowOperation(
            "top_k",
            (Operand("x"),),
            (Operand("v", "k", like="x"), Operand("j", "k", ("int32",))),
            lambda n, inputs, options: n * (1 + log2(options["k"])),
            options=(("k", Option(1.0, lowest=1.0, whole=True, up_to_columns=True)),),
        ),
    )
}
"""By name."""


def options_of(operation: RowOp) -> dict[str, float]:
    """Return the options of a RowOp by name, with the table's defaults for those left out."""
    stated = dict(operation.options)
    entry = ROW_OPERATIONS.get(operation.function)
    return stated if entry is None else entry.completed(stated)


def row_operation_error(
    operation: RowOp,
    inputs: Sequence[Matrix],
    tables: Sequence[Matrix],
    outputs: Sequence[Matrix],
) -> str | None:
    """Return in a sentence what contradicts the table, or None.

    Parameters
    ----------
    operation
        A RowOp; of a name that is not in the table only the form of its options is checked.
    inputs, tables, outputs
        Its operands as one rank has them.
    """
    names = [name for name, _ in operation.options]
    if names != sorted(set(names)):
        return "options must be sorted by name, each given once"
    for name, value in operation.options:
        if not isfinite(value):
            return f"option {name!r} is {value}; it must be a finite number"
    entry = ROW_OPERATIONS.get(operation.function)
    if entry is None:
        return None
    n = inputs[0].columns if inputs else 0
    return _options_error(entry, operation, n) or _operands_error(
        entry, options_of(operation), n, {"input": inputs, "table": tables, "output": outputs}
    )


def _options_error(entry: RowOperation, operation: RowOp, n: int) -> str | None:
    known = dict(entry.options)
    for name in dict(operation.options):
        if name not in known:
            has = ", ".join(known) or "no options"
            return f"{entry.name!r} has no option {name!r}; it has {has}"
    for name, value in options_of(operation).items():
        option = known[name]
        if not option.lowest <= value <= option.highest:
            most = "" if option.highest == inf else f" and at most {option.highest:g}"
            return f"option {name!r} is {value:g}; it must be at least {option.lowest:g}{most}"
        if option.whole and value != int(value):
            return f"option {name!r} is {value:g}; it must be a whole number"
        if option.up_to_columns and value > n:
            return f"option {name!r} is {value:g}; {entry.name!r} of {n} columns takes at most {n}"
    return None


def _operands_error(
    entry: RowOperation,
    options: Mapping[str, float],
    n: int,
    given: Mapping[str, Sequence[Matrix]],
) -> str | None:
    known = {"input": entry.inputs, "table": entry.tables, "output": entry.outputs}
    dtypes: dict[str, str] = {}
    for what, operands in known.items():
        matrices = given[what]
        wrong = _count_error(entry.name, what, operands, len(matrices))
        if wrong is not None:
            return wrong
        repeated = operands + operands[-1:] * (len(matrices) - len(operands))
        for operand, matrix in zip(repeated, matrices, strict=False):
            who = f"{what} {operand.name!r} of {entry.name!r}"
            columns = _columns(operand, n, options)
            if matrix.columns != columns:
                return f"{who} has {matrix.columns} columns; it must have {columns}"
            if what == "table" and matrix.rows != 1:
                return f"{who} has {matrix.rows} rows; it must have 1"
            allowed = (dtypes[operand.like],) if operand.like else operand.dtypes
            if matrix.dtype not in allowed:
                return f"{who} is {matrix.dtype}; it must be {' or '.join(allowed)}"
            dtypes.setdefault(operand.name, matrix.dtype)
    return None


def _count_error(name: str, what: str, operands: Sequence[Operand], count: int) -> str | None:
    least = sum(not operand.optional for operand in operands)
    most = inf if any(operand.repeats for operand in operands) else len(operands)
    if least <= count <= most:
        return None
    takes = "gives" if what == "output" else "takes"
    if most == inf:
        number = f"at least {least}"
    else:
        number = str(least) if least == most else f"{least} to {most}"
    plural = "" if number in ("1", "at least 1") else "s"
    return f"{name!r} {takes} {number} {what}{plural}, not {count}"


def _columns(operand: Operand, n: int, options: Mapping[str, float]) -> int:
    if operand.columns == "n":
        return n
    return int(options.get(operand.columns, 0)) or int(operand.columns)
