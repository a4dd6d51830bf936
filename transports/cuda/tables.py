"""Arrays of constants on the device, which kernels read: addresses of words, and epochs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from stretto.schedules.language import RunFailed

__all__ = ["DeviceTables"]


class DeviceTables:
    """Makes arrays and keeps them; equal arrays are one, so that schedules may come and go.

    Parameters
    ----------
    device
        The ``torch.device``.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._made: dict[tuple[str, tuple[int, ...]], Any] = {}

    def addresses(self, values: Iterable[int]) -> int:
        """Return the device address of an array of addresses.

        Raises
        ------
        RunFailed
            If it would have to be made while a graph is captured.
        """
        return self._address(tuple(values), "int64")

    def numbers(self, values: Iterable[int]) -> int:
        """Return the device address of an array of 32-bit numbers.

        Raises
        ------
        RunFailed
            If it would have to be made while a graph is captured.
        """
        signed = (ctypes.c_int32(one & 0xFFFFFFFF).value for one in values)
        return self._address(tuple(signed), "int32")

    def clear(self) -> None:
        """Give all arrays back."""
        self._made.clear()

    def _address(self, values: tuple[int, ...], dtype: str) -> int:
        import torch

        table = self._made.get((dtype, values))
        if table is None:
            if torch.cuda.is_current_stream_capturing():
                raise RunFailed(
                    "A schedule cannot be prepared while a graph is captured; call it once before."
                )
            kind = getattr(torch, dtype)
            table = torch.tensor(values or (0,), dtype=kind, device=self._device)
            torch.cuda.current_stream().synchronize()
            self._made[dtype, values] = table
        address: int = table.data_ptr()
        return address
