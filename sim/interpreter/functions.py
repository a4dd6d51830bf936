"""What named row operations and opaque work compute, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from stretto.schedules.language import Opaque, Program, RowOp, Unsupported, options_of
from stretto.schedules.language.row_operations import FP8_LARGEST, SMALLEST_SCALE
from stretto.sim.interpreter.rounding import Array

__all__ = ["FUNCTIONS", "Function", "refuse_unknown", "results"]

Function = Callable[..., Array | Sequence[Array]]
"""Takes the inputs and the tables, one array each, and the options by name.

Returns the output, or a sequence of them, in the numbers it was given; the memory rounds them.
"""


def _add(*inputs: Array) -> Array:
    total = inputs[0]
    for other in inputs[1:]:
        total = total + other
    return total


def _rms_norm(x: Array, weight: Array | None = None, *, eps: float) -> Array:
    mean = np.mean(x * x, axis=1, keepdims=True)
    normed: Array = x / np.sqrt(mean + mean.dtype.type(eps))
    return normed if weight is None else normed * weight


def _add_rms_norm(x: Array, residual: Array, *weight: Array, eps: float) -> Sequence[Array]:
    total = x + residual
    return total, _rms_norm(total, *weight, eps=eps)


def _silu_mul(gate: Array, up: Array) -> Array:
    product: Array = gate / (1 + np.exp(-gate)) * up
    return product


def _quantise_fp8(x: Array) -> Sequence[Array]:
    number = x.dtype.type
    largest = np.max(np.abs(x), axis=1, keepdims=True)
    scale = np.maximum(largest / number(FP8_LARGEST), number(SMALLEST_SCALE))
    return x / scale, scale


def _dequantise_fp8(q: Array, scale: Array) -> Array:
    return q * scale


def _top_k(x: Array, *, k: float) -> Sequence[Array]:
    columns = np.argsort(-x, axis=1, kind="stable")[:, : int(k)]
    return np.take_along_axis(x, columns, axis=1), columns.astype(x.dtype)


FUNCTIONS: Mapping[str, Function] = {
    "add": _add,
    "add_rms_norm": _add_rms_norm,
    "dequantise_fp8": _dequantise_fp8,
    "quantise_fp8": _quantise_fp8,
    "rms_norm": _rms_norm,
    "silu_mul": _silu_mul,
    "top_k": _top_k,
}
"""Known by default: all of `stretto.schedules.language.ROW_OPERATIONS`, which has the formulas."""


def refuse_unknown(programs: Iterable[Program], functions: Mapping[str, Function]) -> None:
    """Raise Unsupported if a Program names a function that is not in the table."""
    for program in programs:
        for phase in program.phases:
            for body in phase.bodies:
                for operation in body.operations:
                    if (
                        isinstance(operation, (RowOp, Opaque))
                        and operation.function not in functions
                    ):
                        raise Unsupported(
                            f"Operation {operation.id} needs the function "
                            f"{operation.function!r}, which numpy is not told; "
                            "give it in functions=."
                        )


def results(
    operation: RowOp | Opaque, function: Function, operands: Sequence[Array]
) -> Sequence[Array]:
    """Return what `function` gives for `operands`, one array for each output of `operation`.

    `operands` are the inputs of the operation and, after them, its tables.  A function of the
    caller in the place of one of the table gets only the options that the operation states.
    """
    known = FUNCTIONS.get(operation.function) is function
    options: Mapping[str, float] = {}
    if isinstance(operation, RowOp):
        options = options_of(operation) if known else dict(operation.options)
    found = function(*operands, **options)
    arrays = [found] if isinstance(found, np.ndarray) else list(found)
    if len(arrays) != len(operation.outputs):
        raise Unsupported(
            f"Function {operation.function!r} returned {len(arrays)} arrays for the "
            f"{len(operation.outputs)} outputs of operation {operation.id}."
        )
    return arrays
