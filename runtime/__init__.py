"""Real execution: programs lowered onto processes, devices and transports."""

from __future__ import annotations

from stretto.runtime.parallel import AllGatherGemm, Choice, TensorParallel

__all__ = ["AllGatherGemm", "Choice", "TensorParallel"]
