"""Where GEMMs come from: a provider prepares one for tensors that stay where they are.

Which provider is best depends on the local shape, and is found by measurement (`MeasuredGemm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import log2
from typing import Any, Literal, NamedTuple, Protocol

__all__ = ["GemmProvider", "GemmShape", "MeasuredGemm", "TorchGemm"]


class GemmShape(NamedTuple):
    """One rank's GEMM: ``out[m, n] = a[m, k] @ b[n, k].T``, and the dtype's name in torch."""

    m: int
    n: int
    k: int
    dtype: str


class GemmProvider(Protocol):
    """Prepares ``out[m, n] = a[m, k] @ b[n, k].T (+ accumulate[m, n])``."""

    name: str

    def prepare(self, a: Any, b: Any, out: Any, accumulate: Any | None) -> Callable[[], Any]:
        """Return what runs it; operands are read when that is called."""


class TorchGemm:
    """torch's own GEMM: oneDNN or MKL on a CPU, cuBLAS, cuBLASLt or hipBLASLt on a GPU.

    Parameters
    ----------
    blas
        Which of the GPU's two torch is told to use, for this GEMM alone; None leaves it to torch.
    """

    def __init__(self, blas: Literal["cublas", "cublaslt"] | None = None) -> None:
        self.blas = blas
        self.name = "torch" if blas is None else f"torch {blas}"

    def prepare(self, a: Any, b: Any, out: Any, accumulate: Any | None) -> Callable[[], Any]:
        """Return a call of ``torch.mm`` or ``torch.addmm`` with every argument bound."""
        import torch

        if not out.numel():
            return _nothing
        if accumulate is None:
            call = partial(torch.mm, a, b.t(), out=out)
        else:
            call = partial(torch.addmm, accumulate, a, b.t(), out=out)
        return call if self.blas is None else partial(_with_blas, self.blas, call)


def _with_blas(blas: str, call: Callable[[], Any]) -> None:
    """Run a GEMM with torch's choice of library set, and put the choice back."""
    from torch.backends.cuda import preferred_blas_library

    before = preferred_blas_library()
    preferred_blas_library(blas)
    try:
        call()
    finally:
        preferred_blas_library(before)


def _nothing() -> None:
    """Do the GEMM of an empty shard."""


class MeasuredGemm:
    """The provider that was fastest for a local shape, among several.

    Shapes between measured ones get the choice of the nearest m (in ratio) with the same n, k and
    dtype; shapes of which nothing is known get the first provider.

    Parameters
    ----------
    providers
        To choose among; the first is used until something else has been found better.
    """

    name = "measured"

    def __init__(self, providers: Iterable[GemmProvider]) -> None:
        self.providers = tuple(providers)
        self._best: dict[tuple[int, int, str], dict[int, GemmProvider]] = {}

    def note(self, shape: GemmShape, times_us: Mapping[str, float]) -> None:
        """Remember the fastest provider of a shape.

        A provider that is not the first is chosen only if it is ahead by one percent or more: a
        choice within the noise would differ from run to run.

        Parameters
        ----------
        shape
            That was measured.
        times_us
            By the providers' names.
        """
        first = self.providers[0]
        fastest = min(self.providers, key=lambda one: times_us.get(one.name, float("inf")))
        if times_us[fastest.name] > 0.99 * times_us.get(first.name, float("inf")):
            fastest = first
        self._best.setdefault((shape.n, shape.k, shape.dtype), {})[shape.m] = fastest

    def knows(self, shape: GemmShape) -> bool:
        """Whether exactly this shape has been measured."""
        return shape.m in self._best.get((shape.n, shape.k, shape.dtype), {})

    def choice(self, shape: GemmShape) -> GemmProvider:
        """Return the provider for a shape."""
        measured = self._best.get((shape.n, shape.k, shape.dtype))
        if not measured or not shape.m:
            return self.providers[0]
        return measured[min(measured, key=lambda m: abs(log2(m / shape.m)))]

    def prepare(self, a: Any, b: Any, out: Any, accumulate: Any | None) -> Callable[[], Any]:
        """Return what the provider chosen for this shape prepares."""
        shape = GemmShape(a.shape[0], b.shape[0], a.shape[1], str(a.dtype))
        return self.choice(shape).prepare(a, b, out, accumulate)
