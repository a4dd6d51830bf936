"""The CUDA executor on stand-ins for driver, device and transport: what is enqueued, and when."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.schedules import schedule_class
from stretto.schedules.language import RunFailed, WorkspaceLayout
from stretto.transports import load_transport

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the executor needs torch"
)

CALLER = 99


class Driver:
    """Notes every call; what creates something gives a number."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.capture, self.made, self.destroyed = log, 0, 0, 0

    def cuEventCreate(self, flags: int) -> tuple[int, int]:  # noqa: N802 (the driver's names)
        self.made += 1
        return 0, self.made

    def cuEventDestroy(self, event: int) -> tuple[int]:  # noqa: N802
        self.destroyed += 1
        return (0,)

    def cuEventRecord(self, event: int, stream: int) -> tuple[int]:  # noqa: N802
        self.log.append(f"record {event} on {stream}")
        return (0,)

    def cuEventRecordWithFlags(self, event: int, stream: int, flags: int) -> tuple[int]:  # noqa: N802
        return (0,)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[int]:  # noqa: N802
        self.log.append(f"{stream} waits for {event}")
        return (0,)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        return 0, int(self.capture > 0), self.capture, None, ["node"], None, 1

    def cuStreamUpdateCaptureDependencies(self, *arguments: Any) -> tuple[int]:  # noqa: N802
        self.log.append("dependencies")
        return (0,)

    def cuEventElapsedTime(self, start: int, end: int) -> tuple[int, float]:  # noqa: N802
        return 0, 0.001 * (end - start)


class Workspace:
    period, use_count = 2, 0

    def address(self, buffer: str, *, rank: int, slot: int) -> int:
        return 1 << 20


class Transport:
    """Every verb notes the operation that it was prepared for."""

    rank, world_size, device = 0, 2, None

    def __init__(self, log: list[str]) -> None:
        self.log, self.aborted = log, ""

    def _verb(self, *_: Any, label: Any, **more: Any) -> Callable[[int], Sequence[int]]:
        def launch(call: int) -> Sequence[int]:
            self.log.append(label.operation)
            return ()

        return launch

    put = signal = wait = collective = _verb

    def begin(self, workspace: Any, due: Any, *, stream: Any) -> Callable[[int], Sequence[int]]:
        self.due = due

        def launch(call: int) -> Sequence[int]:
            self.log.append("begin")
            return ()

        return launch

    def abort(self, reason: str) -> None:
        self.aborted = reason

    def raise_if_failed(self) -> None:
        pass


class Gemms:
    """A provider whose GEMMs only note that they ran, or fail."""

    name = "noted"

    def __init__(self, log: list[str]) -> None:
        self.log, self.fails = log, False

    def prepare(self, a: Any, b: Any, out: Any, accumulate: Any) -> Callable[[], Any]:
        def run() -> None:
            if self.fails:
                raise RuntimeError("CUDA error: out of memory\nCompile with this and that")
            self.log.append("gemm")

        return run


class Bench:
    """One executor and everything that it stands on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, variant: str = "ring") -> None:
        import torch

        from stretto.runtime.executors import cuda
        from stretto.runtime.lowering import lower
        from stretto.transports.cuda.stream import CudaStream

        self.log: list[str] = []
        self.driver, self.capturing = Driver(self.log), False
        monkeypatch.setattr(cuda, "bindings", self.bindings)
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=CALLER)
        )
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        self.transport, self.gemms = Transport(self.log), Gemms(self.log)
        name = "rccl" if variant == "unfused" else "copy_engine"
        program = schedule_class("ag-gemm", variant)(
            world_size=2, m=8, n=4, k=4, dtype="fp32", capabilities=load_transport(name).offered()
        ).build()
        WorkspaceLayout.of(program)
        tensors = {"x": torch.zeros(4, 4), "w": torch.zeros(4, 4), "y": torch.zeros(8, 4)}
        streams = {"compute": CudaStream(), "send": CudaStream(1), "receive": CudaStream(2)}
        self.workspace = Workspace()
        executable = lower(
            program,
            transport=self.transport,  # type: ignore[arg-type]
            workspace=self.workspace,  # type: ignore[arg-type]
            tensors=tensors,
            gemm=self.gemms,
            streams=streams,
        )
        self.executor = cuda.CudaExecutor(
            executable,
            transport=self.transport,  # type: ignore[arg-type]
            workspace=self.workspace,  # type: ignore[arg-type]
            streams=streams,
        )
        self.log.clear()

    def bindings(self) -> Any:
        return self.driver


def test_a_call_begins_pushes_multiplies_and_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.executor.run()
    done = [one for one in bench.log if "record" not in one and "waits" not in one]
    assert done[0] == "begin"
    # the credit is awaited by what begins the call, and so is not launched again
    assert done[1:] == ["put0", "put0", "gemm", "wait0", "gemm", done[-1]]
    assert len(bench.transport.due[0]) > 0
    assert bench.log[-1].startswith(f"{CALLER} waits for")
    assert bench.workspace.use_count == 1


def test_a_capture_leaves_the_releases_out_of_the_callers_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    bench.driver.capture, bench.capturing = 5, True
    for _ in range(3):
        bench.executor.run()
    assert bench.log.count("dependencies") == 3
    begins = [place for place, one in enumerate(bench.log) if one == "begin"]
    before = [bench.log[place - 1] for place in begins[1:]]
    # the second call has the other slot; the third one first joins what the first one left
    assert before[0] == "dependencies"
    assert before[1].startswith(f"{CALLER} waits for")


def test_what_the_device_reports_names_the_operation_and_ends_the_run_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    bench.gemms.fails = True
    with pytest.raises(RunFailed, match=r"operation 'gemm0', call 0: CUDA error: out of memory"):
        bench.executor.run()
    assert "gemm0" in bench.transport.aborted
    assert bench.workspace.use_count == 0
    capturing = Bench(monkeypatch)
    capturing.gemms.fails = capturing.capturing = True
    with pytest.raises(RunFailed, match="gemm0"):
        capturing.executor.run()
    assert not capturing.transport.aborted


def test_events_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto.runtime.executors.clock import ClockBase

    bench = Bench(monkeypatch)
    for _ in range(3):
        bench.executor.run(timed=True)
    spans = bench.executor.take_spans(ClockBase(0, 10.0, 0.5))
    assert {span.call for span in spans} == {0, 1, 2}
    assert all(span.end_us > span.start_us for span in spans)
    assert next(name for name, _ in bench.executor.run_timed_on_host()) == "begin"
    bench.executor.close()
    bench.executor.close()
    assert bench.driver.destroyed == bench.driver.made


def test_one_stream_alone_needs_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, "unfused")

    def missing() -> Any:
        raise ImportError("no cuda-python here")

    monkeypatch.setattr("stretto.runtime.executors.cuda.bindings", missing)
    bench.executor.run()
    assert [one for one in bench.log if one != "begin"] == ["all_gather0", "gemm"]
