"""Symmetric memory on CUDA devices: buffers and flag words of all ranks, mapped into each.

One allocation a rank, by torch symmetric memory (``cuMemCreate`` and peer mappings behind it),
holds the rank's buffers and then its words.  Torch may place several allocations in one block, so
every peer's address is its block's address plus the handle's offset.

Epochs live on the device.  Call c of the workspace uses slot ``c mod slots``; each slot residue r
has its own count of uses u, and the call's number is ``u x slots + r``.  A captured graph replays
the slots that it was captured with, any number of times and between any other calls: what a slot's
flags hold depends on that slot's uses alone.  `begin` counts a use and writes the values that this
call's signals copy; it runs on the caller's stream before anything else of the call, and the end of
a call on that stream follows everything of the call on any stream, so that the values stay while
they are needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

from stretto.schedules.language import Epoch, InvalidInput, RunFailed, Word, WorkspaceLayout
from stretto.transports.cuda.driver import bindings, called
from stretto.transports.cuda.kernels import Kernel, KernelLibrary
from stretto.transports.interface import DeviceHandle, Workspace

__all__ = ["CreditTable", "CudaWorkspace"]

ALIGNMENT = 512
MAX_VALUES = 64
"""Different epochs (stride, offset) that the signals of one workspace may have."""


class CreditTable(NamedTuple):
    """Device addresses of tables, one entry a word: its address, and the epoch to wait for."""

    words: int
    strides: int
    offsets: int
    length: int


class CudaWorkspace(Workspace):
    """One rank's view of a workspace; made by `CopyEngineTransport.allocate`.

    Parameters
    ----------
    layout
        What it holds.
    rank
        Of this process.
    tensor
        This rank's symmetric memory (torch, uint8).
    peers
        Address of every rank's memory as mapped here.
    kernels
        Compiled for this device.
    abort
        Address of the abort word (pinned host memory).
    """

    def __init__(
        self,
        layout: WorkspaceLayout,
        rank: int,
        tensor: Any,
        peers: tuple[int, ...],
        *,
        kernels: KernelLibrary,
        abort: int,
    ) -> None:
        import torch

        self.layout, self.rank, self.use_count = layout, rank, 0
        self.peers, self._tensor, self._abort = peers, tensor, abort
        self._kernels = kernels
        self._offsets, self._words_offset = _places(layout)
        self._values: list[Epoch] = []
        device = tensor.device
        self._state = torch.zeros((self.period, 2 + MAX_VALUES), dtype=torch.int32, device=device)
        self._strides = torch.zeros(MAX_VALUES, dtype=torch.int32, device=device)
        self._value_offsets = torch.zeros(MAX_VALUES, dtype=torch.int32, device=device)
        self._reader: Any = None
        self.closed = False

    @staticmethod
    def size_bytes(layout: WorkspaceLayout) -> int:
        """Return the size of one rank's memory."""
        return _places(layout)[1] + 4 * max(layout.words, 1)

    # ---- addresses ---------------------------------------------------------------------------

    def address(self, buffer: str, *, rank: int, slot: int) -> int:
        self.check_open()
        for name, slot_bytes, slots in self.layout.buffers:
            if name == buffer and 0 <= slot < slots and 0 <= rank < self.layout.world_size:
                return self.peers[rank] + self._offsets[name] + slot * _rounded(slot_bytes)
        raise InvalidInput(f"The workspace has no buffer {buffer!r}, slot {slot}, rank {rank}.")

    def word_address(self, word: Word) -> int:
        self.check_open()
        flag = self.layout.flag(word.flag)
        if not (
            0 <= word.home < self.layout.world_size
            and 0 <= word.slot < flag.slots
            and 0 <= word.position < flag.count
        ):
            raise InvalidInput(f"The workspace has no word {word}.")
        place = self._words_offset + 4 * self.layout.word_index(word)
        return self.peers[word.home] + place

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether bytes lie in one slot of one buffer of any rank."""
        return any(
            0
            <= address - (peer + self._offsets[name] + slot * _rounded(slot_bytes))
            <= slot_bytes - size_bytes
            for peer in self.peers
            for name, slot_bytes, slots in self.layout.buffers
            for slot in range(slots)
        )

    def read_word(self, word: Word) -> int:
        return self._read(self.word_address(word))

    def latest_calls(self) -> list[int]:
        # Graphs are replayed without the host's use count, so the device is asked.
        rows = [4 * residue * (2 + MAX_VALUES) for residue in range(self.period)]
        base = self._state.data_ptr()
        return sorted(self._read(base + row + 4) for row in rows if self._read(base + row))

    def _read(self, address: int) -> int:
        """Return what a word holds now, by a stream of its own: works while kernels spin."""
        driver = bindings()
        value = ctypes.c_uint32()
        if self._reader is None:
            self._reader = called("cuStreamCreate", driver.cuStreamCreate(1))
        called(
            "cuMemcpyDtoHAsync of a flag word",
            driver.cuMemcpyDtoHAsync(ctypes.addressof(value), address, 4, self._reader),
        )
        called("cuStreamSynchronize", driver.cuStreamSynchronize(self._reader))
        return value.value

    def device_handle(self) -> DeviceHandle:
        self.check_open()
        return DeviceHandle(
            peers=self.peers,
            multicast=None,
            words=tuple(peer + self._words_offset for peer in self.peers),
            use_count=self._state.data_ptr(),
            abort=self._abort,
        )

    # ---- calls -------------------------------------------------------------------------------

    def call_address(self, residue: int) -> int:
        """Return where the number of the present call of this residue is, on the device."""
        return self._state.data_ptr() + 4 * (residue * (2 + MAX_VALUES) + 1)

    def value_address(self, residue: int, value: Epoch) -> int:
        """Return where the value of an epoch in the present call is; registers it if it is new.

        Raises
        ------
        InvalidInput
            If there are too many different epochs.
        """
        import torch

        if value not in self._values:
            if len(self._values) == MAX_VALUES:
                raise InvalidInput(f"A workspace knows at most {MAX_VALUES} different epochs.")
            place = len(self._values)
            self._values.append(value)
            mask = 0xFFFFFFFF
            for table, number in (
                (self._strides, value.stride),
                (self._value_offsets, value.offset),
            ):
                signed = ctypes.c_int32(number & mask).value
                table[place] = torch.tensor(signed, dtype=torch.int32)
        place = self._values.index(value)
        return self._state.data_ptr() + 4 * (residue * (2 + MAX_VALUES) + 2 + place)

    def set_uses(self, uses: int) -> None:
        """Let every slot have been used `uses` times (modulo 2^32), for tests."""
        self._state[:, 0] = ctypes.c_int32(uses & 0xFFFFFFFF).value

    def set_words(self, values: Mapping[Word, int]) -> None:
        """Let words of this rank hold other values, for tests."""
        words = self._tensor[self._words_offset :]
        for word, value in values.items():
            at = 4 * self.layout.word_index(word)
            words[at : at + 4].view(_int32())[0] = ctypes.c_int32(value & 0xFFFFFFFF).value

    def initialise(self) -> None:
        """Set this rank's words to their initial values."""
        import torch

        values: list[int] = []
        for flag in self.layout.flags:
            values += [ctypes.c_int32(flag.initial).value] * (flag.count * flag.slots)
        words = self._tensor[self._words_offset :].view(torch.int32)
        words[: len(values)] = torch.tensor(values, dtype=torch.int32)
        torch.cuda.synchronize()

    def close(self) -> None:
        self.closed = True
        self._tensor = None
        reader, self._reader = self._reader, None
        if reader is not None:
            bindings().cuStreamDestroy(reader)

    def begin_kernel(self, residue: int, due: CreditTable, giving_up: tuple[Any, ...]) -> Kernel:
        """Return the kernel that starts a call of slot residue `residue`.

        Parameters
        ----------
        residue
            Which slot of the period.
        due
            What is waited for first: words that earlier calls of other ranks signal.
        giving_up
            The arguments of a wait: abort word, record, label, limit.
        """
        row = self._state.data_ptr() + 4 * residue * (2 + MAX_VALUES)
        return self._kernels.bind(
            "stretto_begin",
            max(MAX_VALUES, due.length),
            ctypes.c_uint64(row),
            ctypes.c_uint64(row + 4),
            ctypes.c_uint64(row + 8),
            ctypes.c_uint64(self._strides.data_ptr()),
            ctypes.c_uint64(self._value_offsets.data_ptr()),
            ctypes.c_uint32(MAX_VALUES),
            ctypes.c_uint32(residue),
            ctypes.c_uint32(self.period),
            ctypes.c_uint64(due.words),
            ctypes.c_uint64(due.strides),
            ctypes.c_uint64(due.offsets),
            ctypes.c_uint32(due.length),
            *giving_up,
        )

    def check_open(self) -> None:
        """Raise `RunFailed` if it has been closed."""
        if self.closed:
            raise RunFailed("This rank has closed the workspace; it can no longer be used.")


def _int32() -> Any:
    import torch

    return torch.int32


def _places(layout: WorkspaceLayout) -> tuple[dict[str, int], int]:
    """Return where each buffer begins in a rank's memory, and where the words do."""
    places, at = {}, 0
    for name, slot_bytes, slots in layout.buffers:
        places[name] = at
        at += _rounded(slot_bytes) * slots
    return places, at


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
