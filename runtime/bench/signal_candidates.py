"""Ways for one GPU to signal another, and to wait for it: the candidates of ``bench signals``."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from stretto.runtime.calibration.bursts import Bursts
from stretto.runtime.calibration.launches import EPOCH, Enqueue, beginning, in_turn, nothing
from stretto.runtime.calibration.phases import PROBE_ERRORS, reason_of
from stretto.schedules.language import Epoch, Flag, Unavailable, Word, WorkspaceLayout
from stretto.transports.cuda.driver import bindings, failed
from stretto.transports.cuda.kernels import KernelLibrary
from stretto.transports.cuda.stream import CudaStream

__all__ = ["CANDIDATES", "LIMIT_S", "STEPS", "Candidate"]

STEPS = 10
"""Words for ping-pongs: signals there and back in one graph."""

LIMIT_S, RELEASE_S = 10.0, 5.0
"""How long a replay may take; how long what waits is then let go, again and again."""

PROBE_VALUE = 7


class Candidate:
    """A way to signal the other rank and to wait for it; made on both ranks together.

    Words are those of flags ``ping`` (one a step) and ``late``; ``cost`` is one that nobody waits
    for, ``zero`` one that nobody writes.
    """

    name = ""
    signals_by = ""
    waits_by = ""

    def __init__(self, transport: Any) -> None:
        self.transport, self.rank, self.peer = transport, transport.rank, 1 - transport.rank
        flags = (Flag("ping", count=STEPS), Flag("late"), Flag("cost"), Flag("zero"))
        self.workspace = transport.allocate(WorkspaceLayout(2, (), flags))

    def check(self, bursts: Bursts) -> None:
        """Raise `Unavailable` if it does not work here; load what must be before anything waits."""

    def begin(self, stream: Any) -> Enqueue:
        """Return what begins a graph."""
        return nothing

    def signal(self, flag: str, step: int, stream: Any) -> Enqueue:
        """Return the signal to the other rank's word."""
        raise NotImplementedError

    def wait(self, flag: str, step: int, stream: Any) -> Enqueue:
        """Return the wait for the own word, with what empties it."""
        raise NotImplementedError

    def cost(self, stream: Any) -> Enqueue:
        """Return a signal and a wait that both ranks can issue any number of times."""
        return in_turn(self.signal("cost", 0, stream), self.wait("cost", 0, stream))

    def release(self, done: Callable[[], bool]) -> None:
        """Let go what waits; kernels that do give up by themselves."""

    def close(self) -> None:
        """Give the workspace back."""
        self.workspace.close()

    def _word(self, flag: str, step: int, rank: int) -> int:
        address: int = self.workspace.word_address(Word(flag, rank, 0, step))
        return address


class Copied(Candidate):
    """The transport's own."""

    name = "copy, kernel"
    signals_by = "4-byte copy of a device-side epoch"
    waits_by = "polling kernel"

    def begin(self, stream: Any) -> Enqueue:
        return beginning(self.transport, self.workspace, stream)

    def signal(self, flag: str, step: int, stream: Any) -> Enqueue:
        words, where = [Word(flag, self.peer, 0, step)], CudaStream(stream.cuda_stream)
        epoch = _epoch(flag)
        return partial(self.transport.signal(self.workspace, words, epoch, stream=where), 0)

    def wait(self, flag: str, step: int, stream: Any) -> Enqueue:
        words, where = [Word(flag, self.rank, 0, step)], CudaStream(stream.cuda_stream)
        epoch = _epoch(flag)
        return partial(self.transport.wait(self.workspace, words, epoch, stream=where), 0)


class Stored(Copied):
    """A kernel that stores the epoch, instead of a copy."""

    name = "store, kernel"
    signals_by = "kernel that stores with release"

    def __init__(self, transport: Any) -> None:
        import torch

        super().__init__(transport)
        self._kernels = KernelLibrary(torch.cuda.get_device_capability(transport.device))
        self._tables: list[Any] = []

    def check(self, bursts: Bursts) -> None:
        import torch

        self.signal("cost", 0, torch.cuda.current_stream())()  # loads the kernel
        bursts.settle()
        self.transport.barrier()

    def signal(self, flag: str, step: int, stream: Any) -> Enqueue:
        import torch

        address = self._word(flag, step, self.peer)
        table = torch.tensor([address], dtype=torch.int64, device=self.transport.device)
        self._tables.append(table)
        epoch = _epoch(flag)
        kernel = self._kernels.bind(
            "stretto_set",
            1,
            ctypes.c_uint64(table.data_ptr()),
            ctypes.c_uint32(1),
            ctypes.c_uint64(self.workspace.call_address(0)),
            ctypes.c_uint32(epoch.stride),
            ctypes.c_uint32(epoch.offset),
        )
        return partial(kernel.launch, stream.cuda_stream)


class Posted(Candidate):
    """torch's own, a mailbox of depth one."""

    name = "put_signal"
    signals_by = "torch symmetric memory's put_signal"
    waits_by = "its wait_signal"

    def __init__(self, transport: Any) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        super().__init__(transport)
        self._tensor = symmetric.empty(1024, dtype=torch.uint8, device=transport.device)
        self._handle = symmetric.rendezvous(self._tensor, dist.group.WORLD)
        self._limit_ms = int(LIMIT_S * 1e3)

    def check(self, bursts: Bursts) -> None:
        # The put first, on both: neither kernel is loaded while the other one polls.
        import torch

        stream = torch.cuda.current_stream()
        for verb in (self.signal, self.wait):
            verb("cost", 0, stream)()
            bursts.settle()
            self.transport.barrier()

    def signal(self, flag: str, step: int, stream: Any) -> Enqueue:
        return partial(
            self._handle.put_signal, self.peer, self._channel(flag, step), self._limit_ms
        )

    def wait(self, flag: str, step: int, stream: Any) -> Enqueue:
        return partial(
            self._handle.wait_signal, self.peer, self._channel(flag, step), self._limit_ms
        )

    def _channel(self, flag: str, step: int) -> int:
        return {"ping": 0, "late": STEPS, "cost": STEPS + 1}[flag] + step


class CopiedDriver(Candidate):
    """The driver's wait for a 1 that a copy brings; a memset empties the word."""

    name = "copy, driver"
    signals_by = "4-byte copy of a 1"
    waits_by = "cuStreamWaitValue32, then a memset"

    def __init__(self, transport: Any) -> None:
        import torch

        super().__init__(transport)
        self._driver = bindings()
        self._one = torch.ones(1, dtype=torch.int32, device=transport.device)

    def check(self, bursts: Bursts) -> None:
        """Load what copies and memsets need, on words that nobody waits for."""
        import torch

        stream = torch.cuda.current_stream()
        self.signal("cost", 0, stream)()
        self._empty("cost", 0, stream)()
        bursts.settle()
        self.transport.barrier()

    def signal(self, flag: str, step: int, stream: Any) -> Enqueue:
        return self._call(
            self._driver.cuMemcpyDtoDAsync,
            self._word(flag, step, self.peer),
            self._one.data_ptr(),
            4,
            stream.cuda_stream,
        )

    def wait(self, flag: str, step: int, stream: Any) -> Enqueue:
        at_least = 0 if flag == "cost" else 1  # compared as >=, cyclically: flag 0
        hold = self._call(
            self._driver.cuStreamWaitValue32,
            stream.cuda_stream,
            self._word(flag, step, self.rank),
            at_least,
            0,
        )
        return in_turn(hold, self._empty(flag, step, stream))

    def release(self, done: Callable[[], bool]) -> None:
        """Set all own words by copies from the host until the device is done.

        Should even that not help, this process ends: a stream that waits for ever would hold up
        whoever synchronises with it.
        """
        driver, count = self._driver, STEPS + 1
        ones = (ctypes.c_uint32 * count)(*[1] * count)
        (code, stream) = driver.cuStreamCreate(1)
        end = time.monotonic() + RELEASE_S
        while not int(code) and not done() and time.monotonic() < end:
            driver.cuMemcpyHtoDAsync(
                self._word("ping", 0, self.rank), ctypes.addressof(ones), 4 * count, stream
            )
            driver.cuStreamSynchronize(stream)
            time.sleep(0.01)
        if not done():
            sys.stderr.write(f"rank {self.rank}: {self.name}: a wait could not be let go\n")
            os._exit(1)

    def _empty(self, flag: str, step: int, stream: Any) -> Enqueue:
        word = self._word(flag, step, self.rank)
        return self._call(self._driver.cuMemsetD32Async, word, 0, 1, stream.cuda_stream)

    def _call(self, function: Any, *arguments: Any) -> Enqueue:
        """Return a driver call whose code is looked at."""
        what = f"{self.name}: {getattr(function, '__name__', 'a driver call')}"

        def enqueue() -> None:
            (code,) = function(*arguments)
            if int(code):
                raise failed(what, code)

        return enqueue


class CopiedDriverCopy(CopiedDriver):
    """The same; the word is emptied by a copy of the peer's zero, which needs no multiprocessor."""

    name = "copy, driver, copy"
    waits_by = "cuStreamWaitValue32, then a copy of the peer's zero"

    def _empty(self, flag: str, step: int, stream: Any) -> Enqueue:
        return self._call(
            self._driver.cuMemcpyDtoDAsync,
            self._word(flag, step, self.rank),
            self._word("zero", 0, self.peer),
            4,
            stream.cuda_stream,
        )


class WrittenDriver(CopiedDriver):
    """The driver's write to the peer, instead of a copy."""

    name = "write, driver"
    signals_by = "cuStreamWriteValue32 to the peer"

    def check(self, bursts: Bursts) -> None:
        """Write once, and look on the other side before anything waits for such a write."""
        import torch

        stream = torch.cuda.current_stream()
        problem, seen = "", 0
        try:
            self._write(PROBE_VALUE, "cost", 0, stream)()
            bursts.settle()
        except PROBE_ERRORS as error:
            problem = reason_of(error)
        self.transport.barrier()
        if not problem:
            seen = self.workspace.read_word(Word("cost", self.rank, 0, 0))
        for one in self.transport.exchange({"seen": seen, "problem": problem}):
            if one["problem"] or one["seen"] != PROBE_VALUE:
                raise Unavailable(
                    one["problem"]
                    or "cuStreamWriteValue32 returned success, but the peer's memory is unchanged."
                )
        self._empty("cost", 0, stream)()
        bursts.settle()
        self.transport.barrier()

    def signal(self, flag: str, step: int, stream: Any) -> Enqueue:
        return self._write(1, flag, step, stream)

    def _write(self, value: int, flag: str, step: int, stream: Any) -> Enqueue:
        word = self._word(flag, step, self.peer)
        return self._call(self._driver.cuStreamWriteValue32, stream.cuda_stream, word, value, 0)


def _epoch(flag: str) -> Epoch:
    """Return what is signalled and awaited; that of ``cost`` has always been reached."""
    return Epoch(0, 0) if flag == "cost" else EPOCH


CANDIDATES: tuple[type[Candidate], ...] = (
    Copied,
    Stored,
    Posted,
    CopiedDriver,
    CopiedDriverCopy,
    WrittenDriver,
)
