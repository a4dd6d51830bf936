"""Memory as torch tensors: dtypes, and views of a Program's rectangles."""

from __future__ import annotations

import ctypes
from typing import Any

from stretto.schedules.language import DTYPE_BYTES, Buffer, Rectangle, Unsupported
from stretto.transports.interface import Memory

__all__ = ["memory_of", "tensor_at", "torch_dtype"]


def torch_dtype(name: str) -> Any:
    """Return torch's dtype of this name.

    Raises
    ------
    Unsupported
        If the torch installed here has none for it.
    """
    import torch

    names = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp64": torch.float64,
        "int32": torch.int32,
        "fp8": getattr(torch, "float8_e4m3fn", None),
    }
    found = names.get(name)
    if found is None:
        raise Unsupported(f"PyTorch here has no dtype {name!r}.")
    return found


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
    if device is not None:
        flat = torch.as_tensor(_CudaBytes(memory.address, total), device=device)
        flat = flat.view(torch_dtype(dtype))
    else:
        raw = (ctypes.c_uint8 * total).from_address(memory.address)
        flat = torch.frombuffer(raw, dtype=torch_dtype(dtype))
    return flat.as_strided((memory.rows, columns), (stride, 1))


class _CudaBytes:
    """Device memory in the form that torch takes without copying."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


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
