"""Where GEMMs come from: a provider prepares one for tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["GemmProvider", "TorchGemm"]


class GemmProvider(Protocol):
    """Prepares ``out[m, n] = a[m, k] @ b[n, k].T (+ accumulate[m, n])``."""

    name: str

    def prepare(self, a: Any, b: Any, out: Any, accumulate: Any | None) -> Callable[[], Any]:
        """Return what runs it; operands are read when that is called."""


class TorchGemm:
    """torch's own GEMM: oneDNN or MKL on a CPU, cuBLAS on a GPU."""

    name = "torch"

    def prepare(self, a: Any, b: Any, out: Any, accumulate: Any | None) -> Callable[[], Any]:
        """Return a call of ``torch.mm`` or ``torch.addmm`` with every argument bound."""
        from functools import partial

        import torch

        if not out.numel():
            return _nothing
        if accumulate is None:
            return partial(torch.mm, a, b.t(), out=out)
        return partial(torch.addmm, accumulate, a, b.t(), out=out)


def _nothing() -> None:
    """Do the GEMM of an empty shard."""
