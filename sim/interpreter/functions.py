"""What named row operations and opaque work compute, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from stretto.schedules.language import Opaque, Program, RowOp, Unsupported
from stretto.sim.interpreter.rounding import Array

__all__ = ["FUNCTIONS", "Function", "refuse_unknown", "results"]

Function = Callable[..., Array | Sequence[Array]]
"""Takes the inputs, one array each, and returns the output, or a sequence of them."""


def _add(*inputs: Array) -> Array:
    total = inputs[0]
    for other in inputs[1:]:
        total = total + other
    return total


def _rms_norm(x: Array, weight: Array | None = None) -> Array:
    scaled: Array = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-6)
    return scaled if weight is None else scaled * weight


def _scale(x: Array, factor: Array) -> Array:
    return x * factor


def _copy(x: Array) -> Array:
    return x


FUNCTIONS: Mapping[str, Function] = {
    "add": _add,
    "copy": _copy,
    "rms_norm": _rms_norm,
    "scale": _scale,
}
"""Known by default; ``rms_norm(x[, weight])`` adds 1e-6, ``scale(x, factor)`` multiplies."""


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
    operation: RowOp | Opaque, function: Function, inputs: Sequence[Array]
) -> Sequence[Array]:
    """Return what `function` gives for `inputs`, one array for each output of `operation`."""
    found = function(*inputs)
    arrays = [found] if isinstance(found, np.ndarray) else list(found)
    if len(arrays) != len(operation.outputs):
        raise Unsupported(
            f"Function {operation.function!r} returned {len(arrays)} arrays for the "
            f"{len(operation.outputs)} outputs of operation {operation.id}."
        )
    return arrays
