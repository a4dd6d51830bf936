"""An NVIDIA GPU for the conformance suite; torch and cuda-python are imported when one is made.

A CUDA stream returns at once and a kernel that waited in vain lets it go on, so `synchronise` asks
the transports that the case has made what has failed, all the while.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

from stretto.schedules.language import RunFailed
from stretto.transports.conformance.device import Stream
from stretto.transports.cuda.driver import bindings, called
from stretto.transports.cuda.stream import CudaStream
from stretto.transports.interface import Launch, Transport
from stretto.transports.multicast import switch_multicast_off

__all__ = ["CountingStream", "CudaDevice", "QueuedStream"]

_POLL_S = 1e-4


class CountingStream(CudaStream):
    """Holder of a CUDA stream that knows what begins a call on it.

    Attributes
    ----------
    begins
        Run, in the stream's order, before every launch, with the launch's call: where a transport
        keeps the number of the call on the device, this is what sets it.
    """

    __slots__ = ("begins",)

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        self.begins: list[Launch] = []


class CudaDevice:
    """The process's current GPU, which the transport chooses when it is made."""

    def __init__(self) -> None:
        switch_multicast_off()
        import torch

        self._torch, self._driver = torch, bindings()
        self._memory: list[Any] = []
        self._streams: dict[str, QueuedStream] = {}
        self._transports: list[Transport] = []
        self._copying: Any = None

    def allocate(self, size_bytes: int) -> int:
        memory = self._torch.empty(max(size_bytes, 1), dtype=self._torch.uint8, device="cuda")
        self._memory.append(memory)
        address: int = memory.data_ptr()
        return address

    def write(self, address: int, data: bytes) -> None:
        if data:
            held = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
            size = len(data)
            self._copied(self._driver.cuMemcpyHtoDAsync, address, ctypes.addressof(held), size)

    def read(self, address: int, size_bytes: int) -> bytes:
        held = (ctypes.c_uint8 * max(size_bytes, 1))()
        if size_bytes:
            self._copied(
                self._driver.cuMemcpyDtoHAsync, ctypes.addressof(held), address, size_bytes
            )
        return bytes(held)[:size_bytes]

    def stream(self, name: str) -> Stream:
        if name not in self._streams:
            made = self._torch.cuda.Stream()
            self._memory.append(made)
            self._streams[name] = QueuedStream(CountingStream(made.cuda_stream), self, made)
        return self._streams[name]

    def watch(self, transport: Transport) -> None:
        self._transports.append(transport)

    def close(self) -> None:
        self._streams.clear()
        self._transports.clear()
        self._memory.clear()

    def raise_failures(self) -> None:
        """Raise what any transport of the case has run into."""
        for transport in self._transports:
            transport.raise_if_failed()

    def event(self, stream: Any) -> Any:
        """Return an event at the present end of a stream."""
        event = self._torch.cuda.Event()
        event.record(stream)
        return event

    def _copied(self, copy: Any, to: int, of: int, size_bytes: int) -> None:
        """Copy on a stream of its own, so that it works beside a kernel that waits."""
        if self._copying is None:
            self._copying = self._torch.cuda.Stream()
        handle = self._copying.cuda_stream
        called(copy.__name__, copy(to, of, size_bytes, handle))
        called("cuStreamSynchronize", self._driver.cuStreamSynchronize(handle))


class QueuedStream:
    """A CUDA stream as the cases use it.

    Parameters
    ----------
    handle
        What the verbs get.
    device
        Makes events and knows what has failed.
    stream
        Torch's object of the stream.
    """

    def __init__(self, handle: CountingStream, device: Any, stream: Any) -> None:
        self._handle, self._device, self._stream = handle, device, stream
        self._pending: list[Sequence[int] | RunFailed] = []

    @property
    def handle(self) -> Any:
        return self._handle

    def run(self, launch: Launch, call: int) -> None:
        try:
            for begin in self._handle.begins:
                begin(call)
            self._pending.append(launch(call))
        except RunFailed as error:
            self._pending.append(error)

    def synchronise(self) -> list[Sequence[int]]:
        pending, self._pending = self._pending, []
        end = self._device.event(self._stream)
        while not end.query():
            self._device.raise_failures()
            time.sleep(_POLL_S)
        self._device.raise_failures()
        results = []
        for one in pending:
            if isinstance(one, RunFailed):
                raise one
            results.append(one)
        return results
