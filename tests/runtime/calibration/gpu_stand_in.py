"""Stand-ins for torch.cuda, the driver and a transport: GPU code runs on a CPU, line by line.

Nothing here is timed and nothing moves between ranks; a graph's replay does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.schedules.language import Capabilities, PeerLost
from stretto.transports import load_transport

ELAPSED_MS = 0.1


class Stream:
    """Of torch, or what a wait for one needs."""

    cuda_stream = 7

    def __init__(self, priority: int = 0) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def record_event(self) -> Event:
        return Event()


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        assert self.timed
        assert end.timed
        return ELAPSED_MS


class Graph:
    def replay(self) -> None:
        pass


class Transport:
    """What the probes ask of a transport; every verb returns a launch that is counted."""

    def __init__(self, rank: int, world_size: int) -> None:
        import torch

        self.rank, self.world_size, self.device_index = rank, world_size, rank
        self.device = torch.device("cpu")
        self.launched, self.aborted = 0, ""

    @classmethod
    def offered(cls) -> Capabilities:
        return load_transport("copy_engine").offered()

    def allocate(self, layout: Any) -> Any:
        return SimpleNamespace(
            period=1,
            layout=layout,
            close=lambda: None,
            address=lambda buffer, *, rank, slot: 4096,
            word_address=lambda word: 4096 + 4 * layout.word_index(word),
            call_address=lambda residue: 4096,
            read_word=lambda word: 1,
        )

    def put(self, source: Any, destination: Any, *, stream: Any) -> Callable[[int], Any]:
        assert source.total_bytes == destination.total_bytes
        return self._launch

    def signal(
        self, workspace: Any, words: Sequence[Any], value: Any, *, stream: Any
    ) -> Callable[[int], Any]:
        assert all(workspace.layout.word_index(word) >= 0 for word in words)
        return self._launch

    def wait(
        self, workspace: Any, words: Sequence[Any], value: Any, *, stream: Any
    ) -> Callable[[int], Any]:
        assert all(word.home == self.rank for word in words)
        return self.signal(workspace, words, value, stream=stream)

    def begin(self, workspace: Any, due: Any, *, stream: Any) -> Callable[[int], Any]:
        assert len(due) == workspace.period
        return self._launch

    def barrier(self) -> None:
        pass

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        if self.aborted:
            raise PeerLost(self.aborted)
        return [message] * self.world_size

    def abort(self, reason: str) -> None:
        self.aborted = reason

    def raise_if_failed(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _launch(self, call: int) -> tuple[int, ...]:
        self.launched += 1
        return ()


class Executor:
    def run(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Driver:
    """Every call succeeds; an elapsed time is `ELAPSED_MS`."""

    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT=40)

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        answers: dict[str, tuple[Any, ...]] = {
            "cuEventCreate": (0, object()),
            "cuStreamCreate": (0, 9),
            "cuEventElapsedTime": (0, ELAPSED_MS),
            "cuDeviceGet": (0, 0),
            "cuDeviceGetAttribute": (0, 3),
        }
        return lambda *arguments: answers.get(name, (0,))


def install(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Put the stand-ins where torch.cuda and torch.distributed are, and the driver of `modules`."""
    import torch
    import torch.distributed as dist

    current = Stream()

    @contextlib.contextmanager
    def using(*arguments: Any, **options: Any) -> Iterator[None]:
        yield

    properties = SimpleNamespace(name="NVIDIA X1", multi_processor_count=10, total_memory=1 << 33)
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": using,
        "stream": using,
        "current_stream": lambda: current,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda device: properties,
        "device_count": lambda: 2,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(dist, "new_group", lambda backend: backend)
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        monkeypatch.setattr(dist, name, lambda *tensors, group: None)
    for module in modules:
        monkeypatch.setattr(module, "bindings", Driver)
