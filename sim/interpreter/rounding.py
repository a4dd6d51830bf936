"""How numbers are held: exactly in float64, or rounded to each buffer's dtype in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "rounded"]

Array = NDArray[np.floating[Any]]

_FP8_LARGEST = 448.0
_FP8_SMALLEST_STEP = 2.0**-9
_FP8_FRACTION_BITS = 3


def rounded(values: Array, dtype: str) -> Array:
    """Return float32 `values` rounded to the nearest numbers of `dtype`, ties to even.

    Parameters
    ----------
    values
        float32 numbers.
    dtype
        Of the buffer that will hold them.  fp8 is e4m3 without infinities: what is too large
        becomes NaN.  int32 is the nearest whole number.
    """
    if dtype == "bf16":
        return _bfloat16(values)
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if dtype == "fp8":
        return _float8(values)
    if dtype == "int32":
        return np.rint(values)
    return values


def _bfloat16(values: Array) -> Array:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    upper = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, upper.view(np.float32))


def _float8(values: Array) -> Array:
    _, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
    step = np.maximum(np.ldexp(1.0, exponent - 1 - _FP8_FRACTION_BITS), _FP8_SMALLEST_STEP)
    result = (np.rint(values / step) * step).astype(np.float32)
    return np.where(np.abs(result) > _FP8_LARGEST, np.float32(np.nan), result)
