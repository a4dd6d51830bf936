"""A workspace whose memory only its own rank can address."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from stretto.schedules.language import InvalidInput, RunFailed, Unsupported, Word, WorkspaceLayout
from stretto.transports.interface import DeviceHandle, Workspace
from stretto.transports.posix.gate import Gate

__all__ = ["ALIGNMENT", "LocalWorkspace"]

ALIGNMENT = 512
_CLOSE_LIMIT_S = 5.0


class LocalWorkspace(Workspace):
    """One rank's memory; that of other ranks is not mapped here.

    Parameters
    ----------
    layout
        What it holds; no flags.
    rank
        Of this process.
    tensor
        The memory (torch, uint8), with `ALIGNMENT` bytes to spare.
    """

    def __init__(self, layout: WorkspaceLayout, rank: int, tensor: Any) -> None:
        self.layout, self.rank, self.use_count = layout, rank, 0
        self.gate = Gate("workspace")
        self._tensor = tensor[-tensor.data_ptr() % ALIGNMENT :]
        self._base: int = self._tensor.data_ptr()
        self._staging: dict[tuple[Hashable, Any], list[Any]] = {}
        self._places: dict[tuple[str, int], int] = {}
        place = 0
        for name, slot_bytes, slots in layout.buffers:
            for slot in range(slots):
                self._places[name, slot] = place
                place += _rounded(slot_bytes)

    @staticmethod
    def size_bytes(layout: WorkspaceLayout) -> int:
        """Return the size of one rank's memory."""
        slots = sum(_rounded(slot_bytes) * slots for _, slot_bytes, slots in layout.buffers)
        return slots + ALIGNMENT

    def address(self, buffer: str, *, rank: int, slot: int) -> int:
        self.gate.check()
        place = self._places.get((buffer, slot))
        if place is None or not 0 <= rank < self.layout.world_size:
            raise InvalidInput(f"The workspace has no buffer {buffer!r}, slot {slot}, rank {rank}.")
        if rank != self.rank:
            raise Unsupported(
                f"Transport 'rccl' does not map rank {rank}'s memory on rank {self.rank}; use a "
                "collective, or --transport copy_engine or shared_memory."
            )
        return self._base + place

    def word_address(self, word: Word) -> int:
        raise InvalidInput(f"The workspace has no flag {word.flag!r}.")

    def read_word(self, word: Word) -> int:
        raise InvalidInput(f"The workspace has no flag {word.flag!r}.")

    def device_handle(self) -> DeviceHandle:
        raise Unsupported(
            "No kernel can reach other ranks' memory over 'rccl'; use --transport copy_engine."
        )

    def part(self, address: int, size_bytes: int) -> Any:
        """Return the bytes at an address as a tensor, or None if they are not all in here."""
        begin = address - self._base
        if begin < 0 or begin + size_bytes > self._tensor.numel():
            return None
        return self._tensor[begin : begin + size_bytes]

    def staging(self, key: Hashable, rows: int, columns: int, dtype: Any) -> Any:
        """Return a matrix that lives as long as the workspace.

        Matrices of one key share their memory, whatever their size: what uses them is ordered.
        What it holds outside of what was written is of earlier uses.

        Raises
        ------
        RunFailed
            If it would have to be made while a graph is captured, whose memory is its own.
        """
        needed = max(rows * columns, 1)
        made = self._staging.setdefault((key, dtype), [])
        if not made or made[-1].numel() < needed:
            if self._tensor.is_cuda and _capturing():
                raise RunFailed(
                    "A collective of uneven rows cannot be prepared while a graph is captured; "
                    "call it once before."
                )
            # Twice as large each time, so that smaller ones, which graphs may use, are no more.
            made.append(self._tensor.new_zeros(1 << (needed - 1).bit_length(), dtype=dtype))
        return made[-1][: rows * columns].view(rows, columns)

    def close(self) -> None:
        """Give the memory back; what is still running on a GPU must have ended."""
        self.gate.shut(_CLOSE_LIMIT_S)
        self._staging.clear()
        self._tensor = self._tensor[:0].clone()


def _capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
