"""What named row operations compute, in torch; `stretto.schedules.language` has the formulas.

Every form writes into its outputs, which may be the very rectangles that it reads.  It computes in
fp32 (fp64 if an operand or an output is fp64) and rounds every output once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stretto.schedules.language.row_operations import FP8_LARGEST, SMALLEST_SCALE

__all__ = ["TORCH_FORMS", "TorchForm", "sum_into"]

TorchForm = Callable[..., None]
"""Takes the outputs as a sequence, then the inputs and the tables, then the options by name.

All are [rows, columns] tensors on one device; the outputs are written in place.
"""

_CHUNK = 1 << 16
"""Elements that a CPU sums at a time: 256 KiB in fp32 stay in a core's cache."""


def sum_into(terms: Sequence[Any], out: Any) -> None:
    """Write the sum of `terms`, added in their order in fp32 (fp64 with fp64) and rounded once.

    One or two terms of the dtype of `out` take one pass over memory on any device.  A CPU sums
    more terms, or terms of other dtypes, block of rows by block of rows, which is one pass over
    memory, too: the fp32 sum of a block stays in the cache.  A GPU keeps the whole fp32 sum and
    converts each term as it is added.

    Parameters
    ----------
    terms
        At least one tensor [rows, columns].
    out
        [rows, columns]; it may be one of the terms.
    """
    import torch

    alike = all(term.dtype == out.dtype for term in terms)
    if alike and len(terms) == 1:
        out.copy_(terms[0])
    elif alike and len(terms) == 2 and out.dtype != torch.float8_e4m3fn:
        # Exact: torch adds two numbers of a narrow dtype in fp32 and rounds their sum.
        torch.add(terms[0], terms[1], out=out)
    elif out.device.type == "cpu":
        rows = max(1, _CHUNK // max(1, out.shape[1]))
        for start in range(0, out.shape[0], rows):
            block = slice(start, start + rows)
            out[block].copy_(_total([term[block] for term in terms], out))
    else:
        out.copy_(_total(terms, out))


def _total(terms: Sequence[Any], out: Any) -> Any:
    wide = _wide((*terms, out))
    total = terms[0].to(wide, copy=True)
    for term in terms[1:]:
        total.add_(term.to(wide) if term.element_size() == 1 else term)
    return total


def _wide(tensors: Iterable[Any]) -> Any:
    """Return the dtype to compute in."""
    import torch

    doubles = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if doubles else torch.float32


def _widened(outputs: Sequence[Any], *operands: Any) -> list[Any]:
    """Return the operands in the dtype to compute in."""
    wide = _wide((*outputs, *operands))
    return [operand.to(wide) for operand in operands]


def _add(outputs: Sequence[Any], *inputs: Any) -> None:
    sum_into(inputs, outputs[0])


def _rms_norm(outputs: Sequence[Any], *operands: Any, eps: float) -> None:
    x, *weight = _widened(outputs, *operands)
    outputs[0].copy_(_normed(x, weight, eps))


def _add_rms_norm(outputs: Sequence[Any], *operands: Any, eps: float) -> None:
    x, residual, *weight = _widened(outputs, *operands)
    total = x + residual
    normed = _normed(total, weight, eps)
    outputs[0].copy_(total)
    outputs[1].copy_(normed)


def _normed(x: Any, weight: Sequence[Any], eps: float) -> Any:
    normed = x / (x * x).mean(dim=1, keepdim=True).add_(eps).sqrt_()
    return normed.mul_(weight[0]) if weight else normed


def _silu_mul(outputs: Sequence[Any], gate: Any, up: Any) -> None:
    gate, up = _widened(outputs, gate, up)
    outputs[0].copy_(gate.div(gate.neg().exp_().add_(1)).mul_(up))


def _quantise_fp8(outputs: Sequence[Any], x: Any) -> None:
    (x,) = _widened(outputs, x)
    largest = x.abs().amax(dim=1, keepdim=True)
    # By a tensor: a GPU divides by a number with its reciprocal, which rounds differently.
    scale = largest.div_(largest.new_full(largest.shape, FP8_LARGEST)).clamp_(min=SMALLEST_SCALE)
    outputs[0].copy_(x / scale)
    outputs[1].copy_(scale)


def _dequantise_fp8(outputs: Sequence[Any], q: Any, scale: Any) -> None:
    q, scale = _widened(outputs, q, scale)
    outputs[0].copy_(q * scale)


def _top_k(outputs: Sequence[Any], x: Any, *, k: float) -> None:
    values, columns = x.sort(dim=1, descending=True, stable=True)
    outputs[0].copy_(values[:, : int(k)])
    outputs[1].copy_(columns[:, : int(k)])


TORCH_FORMS: Mapping[str, TorchForm] = {
    "add": _add,
    "add_rms_norm": _add_rms_norm,
    "dequantise_fp8": _dequantise_fp8,
    "quantise_fp8": _quantise_fp8,
    "rms_norm": _rms_norm,
    "silu_mul": _silu_mul,
    "top_k": _top_k,
}
"""By name: all of `stretto.schedules.language.ROW_OPERATIONS`."""
