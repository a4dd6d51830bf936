"""The copy-engine transport of one rank, with the driver and torch.cuda replaced: no GPU needed.

Copies are made by the processor; kernels are noted, not run.  What two GPUs do with it is in
test_copy_engine_conformance.py.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.schedules.language import (
    Epoch,
    Flag,
    InvalidInput,
    RunFailed,
    WaitTimeout,
    Word,
    WorkspaceLayout,
)
from stretto.transports.interface import Label, Memory

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the transport needs torch"
)

LAYOUT = WorkspaceLayout(
    1, (("data", 4096, 2),), (Flag("arrived", slots=2), Flag("sum", kind="counter"))
)
HERE = Label("send", "put0")


class Driver:
    """Copies are made at once; everything else is noted."""

    CUdeviceptr = int

    def __init__(self) -> None:
        self.log: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.log.append(name)
            if name.startswith("cuMemcpyD"):
                ctypes.memmove(*arguments[:3])
            return (0, 77) if name.endswith("Create") else (0,)

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    import torch
    import torch.distributed._symmetric_memory as symmetric

    from stretto.transports import copy_engine
    from stretto.transports.cuda import kernels, workspace

    made = Driver()
    for module in (copy_engine, kernels, workspace):
        monkeypatch.setattr(module, "bindings", lambda: made)

    class Library:
        def __init__(self, capability: tuple[int, int]) -> None:
            assert capability == (9, 0)

        def bind(self, name: str, threads: int, *arguments: Any) -> Any:
            assert all(isinstance(one, ctypes._SimpleCData) for one in arguments)
            return SimpleNamespace(launch=lambda stream: made.log.append(name))

    processor, zeros = torch.device("cpu"), torch.zeros
    stream = SimpleNamespace(synchronize=lambda: None, cuda_stream=5)
    monkeypatch.setattr(copy_engine, "KernelLibrary", Library)
    monkeypatch.setattr(torch, "device", lambda *_: processor)

    def unpinned(*shape: Any, pin_memory: bool = False, **more: Any) -> Any:
        return zeros(*shape, **more)

    monkeypatch.setattr(torch, "zeros", unpinned)
    for name, answer in {
        "device_count": 1,
        "set_device": None,
        "get_device_capability": (9, 0),
        "mem_get_info": (1 << 34, 1 << 35),
        "is_current_stream_capturing": False,
        "synchronize": None,
        "current_stream": stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(symmetric, "empty", lambda size, **more: zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(
        symmetric,
        "rendezvous",
        lambda tensor, group: SimpleNamespace(buffer_ptrs=[tensor.data_ptr()]),
    )
    return made


@pytest.fixture
def transport(driver: Driver, tmp_path: Path) -> Iterator[Any]:
    import torch.distributed as dist

    from stretto.transports.copy_engine import CopyEngineTransport

    made = CopyEngineTransport(0, 1, dist.FileStore(str(tmp_path / "store"), 1), timeout_s=2)
    yield made
    made.close()
    dist.destroy_process_group()


def buffer_of(workspace: Any, slot: int, size: int = 64) -> Memory:
    return Memory(workspace.address("data", rank=0, slot=slot), 1, size, size)


def test_a_call_of_verbs(transport: Any, driver: Driver) -> None:
    workspace = transport.allocate(LAYOUT)
    data = ctypes.create_string_buffer(b"rows" * 16)
    source = Memory(ctypes.addressof(data), 1, 64, 64)
    arrived, total = Word("arrived", 0, 1, 0), Word("sum", 0, 0, 0)
    verbs = [
        transport.begin(workspace, [[(Word("arrived", 0, 0, 0), Epoch(1, -1))], []], stream=3),
        transport.put(source, buffer_of(workspace, 1), stream=3, label=HERE),
        transport.signal(workspace, [arrived], Epoch(1, 1), stream=3, label=HERE),
        transport.signal(workspace, [total], Epoch(0, 1), stream=3, label=HERE),
        transport.wait(workspace, [arrived], Epoch(1, 1), stream=3, label=HERE),
    ]
    driver.log.clear()
    for verb in verbs:
        assert tuple(verb(1)) == ()
    assert driver.log == [
        "stretto_begin", "cuMemcpyDtoDAsync", "cuMemcpyDtoDAsync", "stretto_add", "stretto_wait",
    ]  # fmt: skip
    assert ctypes.string_at(workspace.address("data", rank=0, slot=1), 8) == b"rowsrows"


def test_counts_and_words_can_be_set_and_read(transport: Any) -> None:
    workspace = transport.allocate(LAYOUT)
    word = Word("arrived", 0, 1, 0)
    assert workspace.latest_calls() == []
    workspace.set_uses(3)
    assert len(workspace.latest_calls()) == workspace.period
    workspace.set_words({word: 2**32 - 1})
    assert workspace.read_word(word) == 2**32 - 1


def test_what_is_outside_is_refused(transport: Any) -> None:
    workspace = transport.allocate(LAYOUT)
    source = Memory(workspace.address("data", rank=0, slot=0), 1, 64, 64)
    for wrong in (
        lambda: transport.put(source, Memory(16, 1, 64, 64)),
        lambda: workspace.word_address(Word("arrived", 1, 0, 0)),
        lambda: workspace.address("data", rank=0, slot=2),
        lambda: transport.allocate(WorkspaceLayout(1, (("data", 1 << 40, 1),), ())),
    ):
        with pytest.raises(InvalidInput):
            wrong()


def test_a_record_of_the_device_becomes_an_error_with_names(transport: Any) -> None:
    workspace = transport.allocate(LAYOUT)
    transport.wait(workspace, [Word("arrived", 0, 0, 0)], Epoch(1, 1), label=HERE)
    transport.raise_if_failed()
    page = transport._watch._page
    page[17] = len(transport._watch._labels) - 1
    page[16] = 1  # a kernel's wait timed out
    with pytest.raises(WaitTimeout, match=r"'put0'.*flag 'arrived'\[0\], slot 0"):
        transport.raise_if_failed()
    with pytest.raises(WaitTimeout):
        transport.raise_if_noted()


def test_nothing_runs_after_the_end(transport: Any) -> None:
    workspace = transport.allocate(LAYOUT)
    put = transport.put(buffer_of(workspace, 0), buffer_of(workspace, 1))
    wait = transport.wait(workspace, [Word("arrived", 0, 0, 0)], Epoch(1, 1))
    transport.close()
    for verb in (put, wait):
        with pytest.raises(RunFailed, match="closed the workspace"):
            verb(0)
