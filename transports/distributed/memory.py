"""Memory at an address as torch tensors, and torch's names of dtypes."""

from __future__ import annotations

import ctypes
from typing import Any

from stretto.schedules.language import Unsupported

__all__ = ["bytes_at", "torch_dtype"]


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


def bytes_at(address: int, size_bytes: int, device: Any = None) -> Any:
    """Return memory that someone else keeps alive as a tensor of bytes.

    `device` is a ``torch.device``; None is the CPU.
    """
    import torch

    if device is None:
        raw = (ctypes.c_uint8 * size_bytes).from_address(address)
        return torch.frombuffer(raw, dtype=torch.uint8)
    return torch.as_tensor(_DeviceBytes(address, size_bytes), device=device)


class _DeviceBytes:
    """Device memory in the form that torch takes without copying."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
