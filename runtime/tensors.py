"""Memory as torch tensors: dtypes, and views of a Program's rectangles."""

from __future__ import annotations

from typing import Any

from stretto.schedules.language import DTYPE_BYTES, Buffer, Rectangle
from stretto.transports.distributed.memory import bytes_at, torch_dtype
from stretto.transports.interface import Memory

__all__ = ["memory_of", "tensor_at", "torch_dtype"]


def tensor_at(memory: Memory, dtype: str, device: Any = None) -> Any:
    """Return a [rows, columns] tensor over memory that someone else keeps alive.

    Parameters
    ----------
    memory
        The rectangle; its pitch is the tensor's row stride.
    dtype
        Of its elements.
    device
        A ``torch.device``; None is the CPU.
    """
    import torch

    element = DTYPE_BYTES[dtype]
    columns, stride = memory.row_bytes // element, memory.pitch_bytes // element
    if not memory.total_bytes:
        return torch.empty((memory.rows, columns), dtype=torch_dtype(dtype), device=device)
    total = (memory.rows - 1) * memory.pitch_bytes + memory.row_bytes
    flat = bytes_at(memory.address, total, device).view(torch_dtype(dtype))
    return flat.as_strided((memory.rows, columns), (stride, 1))


def memory_of(address: int, buffer: Buffer, rectangle: Rectangle, world_size: int) -> Memory:
    """Return where `rectangle` lies, given where its slot begins."""
    element = DTYPE_BYTES[buffer.dtype]
    pitch = buffer.columns.stored(world_size) * element
    return Memory(
        address + rectangle.row * pitch + rectangle.column * element,
        rectangle.rows,
        rectangle.columns * element,
        pitch,
    )
