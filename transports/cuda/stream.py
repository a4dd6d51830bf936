"""Where launches go: a stream that may be another one in every call."""

from __future__ import annotations

from typing import Any

__all__ = ["CudaStream", "stream_of"]


class CudaStream:
    """Holder of a CUDA stream's handle; the caller's stream is a new one in every call.

    (On a ROCm build of torch it holds a HIP stream.)
    """

    __slots__ = ("handle",)

    def __init__(self, handle: int = 0) -> None:
        self.handle = handle


def stream_of(stream: Any) -> CudaStream:
    """Return the holder that a verb was given, or a new one of a plain handle (0 if None)."""
    return stream if isinstance(stream, CudaStream) else CudaStream(int(stream or 0))
