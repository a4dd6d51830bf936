"""Operators that a layer calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from stretto.runtime.parallel.carrier import Form
from stretto.schedules.language import Extent, InvalidInput

if TYPE_CHECKING:
    from stretto.runtime.parallel.tensor_parallel import TensorParallel

__all__ = ["AllGatherGemm", "Choice"]

DTYPES = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.float64": "fp64",
}


class Choice(NamedTuple):
    """How a call of so many rows is done, and why.

    Attributes
    ----------
    variant
        Of the schedule.
    transport
        Name of the backend.
    reason
        One sentence; where an overlapped schedule was refused it says what for.
    """

    variant: str
    transport: str
    reason: str


class AllGatherGemm:
    """``y[m, n] = all_gather(x)[m, k] @ weight[n, k].T`` on every rank of a group.

    Made by `TensorParallel.all_gather_gemm`.

    Parameters
    ----------
    parallel
        The group and its workspace.
    weight
        [n, k], contiguous, this rank's own; kept, and read in every call.
    max_m
        Most global rows of a call.
    variant
        A variant of ``ag-gemm``, or ``auto``: the fastest by measurement.
    """

    def __init__(
        self, parallel: TensorParallel, weight: Any, *, max_m: int, variant: str = "auto"
    ) -> None:
        dtype = DTYPES.get(str(weight.dtype))
        if dtype is None:
            raise InvalidInput(
                f"A weight is of {', '.join(DTYPES.values())}, not of {weight.dtype}."
            )
        if weight.dim() != 2:
            raise InvalidInput(f"A weight is a matrix [n, k], not {list(weight.shape)}.")
        if not weight.is_contiguous():
            raise InvalidInput("The weight is not contiguous; pass weight.contiguous().")
        if weight.device != parallel.device:
            raise InvalidInput(f"The weight is on {weight.device}, the group on {parallel.device}.")
        if not isinstance(max_m, int) or not 1 <= max_m < 2**31:
            raise InvalidInput(f"max_m is {max_m}; give the most rows that a call may have.")
        self.weight, self.max_m, self.variant, self.dtype = weight.detach(), max_m, variant, dtype
        self._learns = weight.requires_grad
        self.n, self.k = weight.shape
        self.prepared = False
        self.parallel = parallel

    def choice(self, m: int) -> Choice:
        """Return how a call of `m` global rows is done, and why."""
        return self.parallel.choice(self, m)

    def __call__(self, x: Any, *, m: int | None = None, out: Any | None = None) -> Any:
        """Return all rows times the weight, enqueued on the current stream.

        Every rank makes the same calls in the same order.  The call may be captured in a CUDA
        graph.  `x` may be freed or overwritten, by work on the same stream, as soon as this
        returns.

        Parameters
        ----------
        x
            This rank's rows, [rows, k]: rank r has the rows from ``r * ceil(m / tp)`` on, at most
            ``ceil(m / tp)`` of them.  What is not contiguous is copied first.
        m
            Global rows, the same on all ranks; by default the rows of `x` times the number of
            ranks.  The first call with a number compares it with the other ranks'.
        out
            [m, n], contiguous, to be written; by default a new tensor.

        Returns
        -------
        torch.Tensor
            [m, n]; the same on all ranks but for their weights.

        Raises
        ------
        InvalidInput
            If shapes, dtype or device do not fit, `m` is above `max_m`, gradients are asked for,
            or the workspace is in use on another stream.
        RunFailed
            If an earlier call, or another rank, has failed.
        """
        parallel = self.parallel
        if x.dim() != 2:
            raise InvalidInput(f"x must be a matrix [rows, {self.k}], not {list(x.shape)}.")
        rows = x.shape[0] * parallel.world_size if m is None else m
        self._check(x, rows)
        if out is None:
            out = x.new_empty((rows, self.n))
        else:
            self._check_out(out, rows)
        if not x.is_contiguous():
            x = x.contiguous()
        parallel.run(self, rows, x, out)
        return out

    def form(self, variant: str, m: int) -> Form:
        """Return what executors are found by."""
        return Form(variant, m, self.n, self.k, self.dtype)

    def _check(self, x: Any, m: int) -> None:
        parallel, weight = self.parallel, self.weight
        if not 1 <= m <= self.max_m:
            raise InvalidInput(
                f"A call of {m} rows; this operator takes 1 to {self.max_m} (its max_m)."
            )
        rows = parallel.rows(m)
        if x.shape[1] != self.k:
            raise InvalidInput(f"x has {x.shape[1]} columns, the weight's k is {self.k}.")
        if x.shape[0] != len(rows):
            raise InvalidInput(
                f"Of {m} rows rank {parallel.rank} has {len(rows)}, so x must have shape "
                f"[{len(rows)}, {self.k}], not {list(x.shape)}; where ranks differ in rows, pass m."
            )
        if x.dtype != weight.dtype or x.device != weight.device:
            raise InvalidInput(
                f"x is {x.dtype} on {x.device}, the weight {weight.dtype} on {weight.device}; "
                "they must agree."
            )
        import torch

        if torch.is_grad_enabled() and (x.requires_grad or self._learns):
            raise InvalidInput("There is no backward pass; call it under torch.no_grad().")

    def _check_out(self, out: Any, m: int) -> None:
        x = self.weight
        fits = tuple(out.shape) == (m, self.n) and out.is_contiguous()
        if not fits or out.dtype != x.dtype or out.device != x.device:
            raise InvalidInput(
                f"out must be a contiguous [{m}, {self.n}] of {x.dtype} on {x.device}, "
                f"not {list(out.shape)} of {out.dtype} on {out.device}."
            )


def block_of(m: int, rank: int, world_size: int) -> range:
    """Return which of `m` rows a rank has."""
    extent = Extent(m, "shard")
    start = min(rank * extent.block(world_size), m)
    return range(start, start + extent.valid(rank, world_size))
