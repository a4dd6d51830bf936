"""How numbers are held: exactly in float64, or rounded to each buffer's dtype."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "rounded"]

Array = NDArray[np.floating[Any]]

_NUMPY: dict[str, type[Any]] = {
    "bf16": ml_dtypes.bfloat16,
    "fp8": ml_dtypes.float8_e4m3fn,
    "fp16": np.float16,
    "fp32": np.float32,
}


def rounded(values: Array, dtype: str) -> Array:
    """Return `values` rounded to the nearest numbers of `dtype`, ties to even.

    Parameters
    ----------
    values
        float32 or float64 numbers; the result is held in the same.
    dtype
        Of the buffer that will hold them.  fp8 is e4m3 without infinities: what is too large
        becomes NaN.  int32 is the nearest whole number.
    """
    if dtype == "int32":
        return np.rint(values)
    held = _NUMPY.get(dtype)
    if held is None or values.dtype == held:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(held).astype(values.dtype)
