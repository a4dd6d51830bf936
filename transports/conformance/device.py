"""What the conformance suite needs of a device: local memory, bytes in and out, streams.

`HostDevice` is the processor itself.  A backend for another device brings a class of its own; the
cases do not change.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from stretto.transports.interface import Launch, Transport

__all__ = ["Device", "HostDevice", "Stream"]


class Stream(Protocol):
    """A FIFO queue of launches."""

    @property
    def handle(self) -> Any:
        """What the verbs get as ``stream``."""

    def run(self, launch: Launch, call: int) -> None:
        """Enqueue a launch; return at once."""

    def synchronise(self) -> list[Sequence[int]]:
        """Wait for all that was enqueued since the last time.

        Return what each launch returned, or raise the first error, of a launch or of a transport
        that the device watches.
        """


class Device(Protocol):
    """One rank's device, in that rank's process."""

    def allocate(self, size_bytes: int) -> int:
        """Return the address of local memory that lives as long as the device."""

    def write(self, address: int, data: bytes) -> None:
        """Store bytes, local or in a workspace."""

    def read(self, address: int, size_bytes: int) -> bytes:
        """Load bytes, local or in a workspace."""

    def stream(self, name: str) -> Stream:
        """Return the stream of this name; the same one for the same name."""

    def watch(self, transport: Transport) -> None:
        """Take note of a transport: `Stream.synchronise` raises what it has run into, too.

        That matters where a launch has returned long before the device gets there.
        """

    def close(self) -> None:
        """Give everything back; running launches may be left behind."""


class HostDevice:
    """The processor: memory of this process, and a thread for every stream."""

    def __init__(self) -> None:
        self._memory: list[Any] = []
        self._streams: dict[str, _HostStream] = {}

    def allocate(self, size_bytes: int) -> int:
        memory = (ctypes.c_uint8 * max(size_bytes, 1))()
        self._memory.append(memory)
        return ctypes.addressof(memory)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, size_bytes: int) -> bytes:
        return ctypes.string_at(address, size_bytes)

    def stream(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = _HostStream(name)
        return self._streams[name]

    def watch(self, transport: Transport) -> None:
        return  # a launch returns when its work is done, or raises

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


class _HostStream:
    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._pending: list[Future[Sequence[int]]] = []

    @property
    def handle(self) -> Any:
        return None

    def run(self, launch: Launch, call: int) -> None:
        self._pending.append(self._thread.submit(launch, call))

    def synchronise(self) -> list[Sequence[int]]:
        pending, self._pending = self._pending, []
        return [future.result() for future in pending]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
