"""The library call: overlapped layers inside a program that uses torch.distributed."""

from __future__ import annotations

from stretto.runtime.parallel.operators import AllGatherGemm, Choice
from stretto.runtime.parallel.tensor_parallel import TensorParallel

__all__ = ["AllGatherGemm", "Choice", "TensorParallel"]
