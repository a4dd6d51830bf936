"""What the numbers should be: inputs, float64 references, and how far off is still right.

The bound on every element is the standard one for a dot product of length k accumulated in float32
and rounded once to the output's dtype (Higham, Accuracy and Stability of Numerical Algorithms,
section 3.1)::

    |out - ref| <= u * |ref| + (1 + u) * gamma_k * (|a| @ |b|.T),   gamma_k = k e / (1 - k e)

with u the unit roundoff of the output's dtype and e = 2^-24 that of float32 (2^-53 for float64).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.runtime.tensors import torch_dtype
from stretto.schedules.language import Buffer, CheckFailed, InvalidInput, Program

__all__ = ["CheckReport", "check_outputs", "has_reference", "make_inputs"]

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "fp64": 2.0**-53}


@dataclass(frozen=True, slots=True)
class CheckReport:
    """How far one rank's output is from the reference.

    Attributes
    ----------
    rank
        Whose output.
    largest_error
        Largest ``|out - ref|`` over its bound; at most 1 is right.
    relative_error
        ``norm(out - ref) / norm(ref)``.
    """

    rank: int
    largest_error: float
    relative_error: float


def make_inputs(program: Program, rank: int, *, seed: int = 0) -> dict[str, Any]:
    """Return this rank's tensors for the caller's buffers: normal inputs and weights, NaN outputs.

    Weights are scaled by ``1 / sqrt(k)``.  The same seed gives every process the same tensor for
    the same rank, so that a reference needs no communication.
    """
    return {
        buffer.name: _tensor(program, buffer, rank, seed)
        for buffer in program.buffers
        if buffer.of_caller
    }


def _tensor(program: Program, buffer: Buffer, rank: int, seed: int) -> Any:
    import torch

    world_size = program.world_size
    rows = buffer.rows.stored(world_size)
    if buffer.rows.layout == "shard":
        rows = buffer.rows.valid(rank, world_size)
    columns = buffer.columns.stored(world_size)
    dtype = torch_dtype(buffer.dtype)
    if buffer.role == "output":
        return torch.full((rows, columns), float("nan"), dtype=dtype)
    place = [one.name for one in program.buffers].index(buffer.name)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank * 101 + place)
    scale = max(columns, 1) ** -0.5 if buffer.role == "weight" else 1.0
    return (torch.randn((rows, columns), generator=generator) * scale).to(dtype)


def has_reference(program: Program) -> bool:
    """Whether `check_outputs` knows what the Program computes."""
    return program.computes in _REFERENCES


def check_outputs(
    program: Program, rank: int, outputs: Mapping[str, Any], *, seed: int = 0
) -> CheckReport:
    """Compare one rank's outputs with the float64 reference.

    Raises
    ------
    InvalidInput
        If there is no reference for what the Program computes.
    CheckFailed
        If an element is further off than its bound; the message names the first such element.
    """
    if program.computes is None or program.computes not in _REFERENCES:
        raise InvalidInput(
            f"There is no reference for what {program.name!r} computes; run it without --check."
        )
    if program.dtype not in UNIT_ROUNDOFF:
        raise InvalidInput(f"--check has no error bound for dtype {program.dtype!r}.")
    inputs = [make_inputs(program, one, seed=seed) for one in range(program.world_size)]
    reference, magnitude, length = _REFERENCES[program.computes](inputs, rank)
    return _compare(program, rank, outputs["y"].double(), reference, magnitude, length)


def _compare(
    program: Program, rank: int, out: Any, reference: Any, magnitude: Any, length: int
) -> CheckReport:
    import torch

    unit = UNIT_ROUNDOFF[program.dtype]
    roundoff = min(2.0**-24, unit) if program.dtype == "fp64" else 2.0**-24
    gamma = length * roundoff / (1.0 - length * roundoff)
    bound = unit * reference.abs() + (1 + unit) * gamma * magnitude
    difference = (out - reference).abs()
    over = torch.where(bound > 0, difference / bound, torch.where(difference > 0, 2.0, 0.0))
    wrong = ~(over <= 1.0)  # NaN is wrong, too
    if bool(wrong.any()):
        row, column = (int(one) for one in wrong.nonzero()[0])
        raise CheckFailed(
            f"rank {rank}: y[{row}, {column}] is {float(out[row, column]):.6g}, the reference is "
            f"{float(reference[row, column]):.6g}, allowed difference "
            f"{float(bound[row, column]):.2g}; {int(wrong.sum())} of {wrong.numel()} are off."
        )
    norm = float(reference.norm())
    return CheckReport(
        rank,
        float(over.max()) if over.numel() else 0.0,
        float((out - reference).norm()) / norm if norm else 0.0,
    )


def _all_gather_gemm(inputs: Sequence[Mapping[str, Any]], rank: int) -> tuple[Any, Any, int]:
    """Return ``all_gather(x) @ w.T``, the same of absolute values, and the dot products' length."""
    import torch

    x = torch.cat([one["x"] for one in inputs]).double()
    w = inputs[rank]["w"].double()
    return x @ w.t(), x.abs() @ w.abs().t(), x.shape[1]


_REFERENCES: dict[str, Callable[[Sequence[Mapping[str, Any]], int], tuple[Any, Any, int]]] = {
    "all_gather_gemm": _all_gather_gemm,
}
