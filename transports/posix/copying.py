"""Copies and sums of rectangles in memory, prepared once from addresses.

Sums are taken in fp32 (fp64 for fp64) in the given order and rounded once, to nearest even.  numpy
has no bf16: it is the upper half of an fp32, so it is widened by a shift and narrowed by rounding
the bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.schedules.language import DTYPE_BYTES, InvalidInput, Unsupported
from stretto.transports.interface import Memory

__all__ = ["REDUCED_DTYPES", "check_rectangle", "copier", "from_bf16", "summer", "to_bf16", "view"]

Array = npt.NDArray[Any]

_STORED = {"fp32": np.float32, "fp64": np.float64, "fp16": np.float16, "bf16": np.uint16}
REDUCED_DTYPES = tuple(_STORED)


def view(memory: Memory, dtype: type[Any] = np.uint8) -> Array:
    """Return a rectangle as an array [rows, elements of a row]; nothing keeps its memory alive."""
    item = np.dtype(dtype).itemsize
    shape = (memory.rows, memory.row_bytes // item)
    if not memory.total_bytes:
        return np.empty(shape, dtype)
    span = (memory.rows - 1) * memory.pitch_bytes + memory.row_bytes
    raw = (ctypes.c_uint8 * span).from_address(memory.address)
    return np.ndarray(shape, dtype, buffer=memoryview(raw), strides=(memory.pitch_bytes, item))


def check_rectangle(memory: Memory) -> None:
    """Refuse a rectangle whose rows overlap, or with a negative size."""
    if memory.rows < 0 or memory.row_bytes < 0:
        raise InvalidInput(f"{memory} has a negative size.")
    if memory.rows > 1 and memory.pitch_bytes < memory.row_bytes:
        raise InvalidInput(f"Rows of {memory} overlap: the pitch is less than a row.")


def copier(source: Memory, destination: Memory) -> Callable[[], object]:
    """Return a call that copies a rectangle of bytes; both are rows x row_bytes.

    Raises
    ------
    InvalidInput
        If they differ in size.
    """
    check_rectangle(source)
    check_rectangle(destination)
    if (source.rows, source.row_bytes) != (destination.rows, destination.row_bytes):
        raise InvalidInput(f"A copy needs two rectangles of one size, not {source}, {destination}.")
    if not source.total_bytes or source == destination:
        return _nothing
    if _contiguous(source) and _contiguous(destination):
        return partial(
            ctypes.memmove,
            ctypes.c_void_p(destination.address),
            ctypes.c_void_p(source.address),
            source.total_bytes,
        )
    return partial(np.copyto, view(destination), view(source))


def summer(addends: Sequence[Memory], destination: Memory, dtype: str) -> Callable[[], object]:
    """Return a call that leaves the sum of the addends, in their order, in `destination`.

    Raises
    ------
    Unsupported
        If numbers of this type cannot be added here.
    InvalidInput
        If a row is no whole number of elements.
    """
    stored = _STORED.get(dtype)
    if stored is None:
        raise Unsupported(
            f"shared_memory cannot add numbers of type {dtype}; "
            f"it adds {', '.join(REDUCED_DTYPES)}."
        )
    if destination.row_bytes % DTYPE_BYTES[dtype]:
        raise InvalidInput(f"{destination.row_bytes} bytes are no whole number of {dtype}.")
    if not destination.total_bytes:
        return _nothing
    parts, out = [view(addend, stored) for addend in addends], view(destination, stored)
    return partial(_sum_bf16 if dtype == "bf16" else _sum, parts, out)


def _sum(parts: list[Array], out: Array) -> None:
    wide = np.float64 if out.dtype == np.float64 else np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        total = parts[0].astype(wide)
        for part in parts[1:]:
            np.add(total, part, out=total)
        np.copyto(out, total, casting="same_kind")


def _sum_bf16(parts: list[Array], out: Array) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        total = from_bf16(parts[0])
        for part in parts[1:]:
            np.add(total, from_bf16(part), out=total)
    np.copyto(out, to_bf16(total))


def from_bf16(bits: Array) -> npt.NDArray[np.float32]:
    """Widen bf16, given as uint16, to fp32; exact."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def to_bf16(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round fp32 to bf16, as uint16: to nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    # Rounding could carry a NaN's low bits away into infinity: keep its upper half, made quiet.
    return np.where(np.isnan(numbers), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _contiguous(memory: Memory) -> bool:
    return memory.rows == 1 or memory.pitch_bytes == memory.row_bytes


def _nothing() -> None:
    return None
