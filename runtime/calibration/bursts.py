"""Timing of work on GPUs: CUDA graphs of several operations, in bursts, interleaved, slowest rank.

Protocol, that of ``stretto bench ag-gemm``.  Every case is captured in a CUDA graph of several
operations; a *burst* is a replay that is not counted and up to `BURST` that are, between two
events.  All cases of a phase are captured first, then come the rounds; in each, every case runs
once, in a random order that is the same on all ranks, after a barrier.  A *sentinel* GEMM runs in
between; its spread is the noise floor of the phase.  Clock, temperature, power and throttle reasons
are read after every round.

Where something is timed beside something else, both are in one graph, on two streams, with events
in the graph around each; such a graph runs once in a round, after a warm-up.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.runtime.devices import gpu_condition
from stretto.runtime.gemm import TorchGemm
from stretto.schedules.language import RunFailed, StrettoError
from stretto.transports.cuda.driver import bindings, called

__all__ = ["PROBE_ERRORS", "Bursts", "Case", "Clock", "Phase", "calls_in", "reason_of"]

BURST = 5
LEAST_CALLS, MOST_CALLS, GRAPH_US, BURST_US = 4, 64, 500.0, 100_000.0
"""A graph has 4 to 64 operations, lasts half a millisecond if it may, and a burst 0.1 s at most."""

SENTINEL = 4096
"""Rows and columns of the sentinel's square operands."""
SENTINEL_EVERY = 12

PROBE_ERRORS = (
    StrettoError,
    RuntimeError,
    ImportError,
    AttributeError,
    TypeError,
    ValueError,
    AssertionError,
    MemoryError,
)
"""What torch, NCCL, the driver's bindings and our own layers raise when something cannot be."""

Enqueue = Callable[[], Any]


def reason_of(error: BaseException) -> str:
    """Return an error as one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:240]}"


def calls_in(estimate_us: float) -> tuple[int, int]:
    """Return how many operations of that length go into a graph, and how often it is replayed."""
    calls = min(MOST_CALLS, max(LEAST_CALLS, math.ceil(GRAPH_US / estimate_us)))
    if calls * estimate_us > BURST_US / 2:
        calls = max(1, int(BURST_US / 2 / estimate_us))
    return calls, max(1, min(BURST, int(BURST_US / (calls * estimate_us))))


@dataclass(slots=True)
class Case:
    """One thing to time.

    Attributes
    ----------
    key
        Its name among the figures.
    measure
        Times it once; returns microseconds by name ("" for the only one).
    keep
        Tensors and graphs whose addresses are in use.
    """

    key: str
    measure: Callable[[], dict[str, float]]
    keep: Any = None


@dataclass(slots=True)
class Phase:
    """What one rank found in one part of the calibration; plain values, for JSON.

    Attributes
    ----------
    us
        By case, a time for every round.
    sentinel_us
        Of the sentinel GEMM, throughout the phase.
    conditions
        The GPU's clock, temperature, power and throttle reasons, round by round.
    failed
        Cases that could not be timed, and why; "" is the phase itself.
    seconds
        How long it took.
    """

    us: dict[str, list[float]] = field(default_factory=dict)
    sentinel_us: list[float] = field(default_factory=list)
    conditions: list[dict[str, object]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        """Return it for JSON, times to a nanosecond."""
        return {
            "us": {key: [round(one, 3) for one in times] for key, times in self.us.items()},
            "sentinel_us": [round(one, 3) for one in self.sentinel_us],
            "conditions": self.conditions,
            "failed": self.failed,
            "seconds": round(self.seconds, 1),
        }


class Clock:
    """Two events around some work, as nodes of a graph while one is captured."""

    def __init__(self) -> None:
        self._driver = bindings()
        self._events = [called("cuEventCreate", self._driver.cuEventCreate(0)) for _ in range(2)]

    def start(self, stream: Any) -> None:
        """Record the beginning on a torch stream."""
        self._record(self._events[0], stream)

    def stop(self, stream: Any) -> None:
        """Record the end."""
        self._record(self._events[1], stream)

    def us(self) -> float:
        """Return the time in between; the device must have passed both."""
        return self._between(*self._events)

    def until_end_of(self, other: Clock) -> float:
        """Return the time from this beginning to the other's end."""
        return self._between(self._events[0], other._events[1])

    def _record(self, event: Any, stream: Any) -> None:
        import torch

        external = 1 if torch.cuda.is_current_stream_capturing() else 0
        called(
            "cuEventRecordWithFlags",
            self._driver.cuEventRecordWithFlags(event, stream.cuda_stream, external),
        )

    def _between(self, start: Any, end: Any) -> float:
        elapsed = called("cuEventElapsedTime", self._driver.cuEventElapsedTime(start, end))
        return float(elapsed) * 1e3


class Bursts:
    """Captures and times cases, together with all other ranks.

    To be used on a stream of its own (``with torch.cuda.stream(...)``), the same throughout.

    Parameters
    ----------
    transport
        For barriers and small messages; its device is measured.
    limit_s
        How long one replay may take before it counts as hung.
    release
        Called when it does, to let go what waits; the replay is then given up.
    """

    def __init__(
        self,
        transport: Any,
        *,
        seed: int = 0,
        limit_s: float = 60.0,
        release: Callable[[], None] | None = None,
    ) -> None:
        import torch

        self.transport, self._seed, self._limit_s, self._release = transport, seed, limit_s, release
        self.side = torch.cuda.Stream(priority=-5)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._sentinel: Any = None

    # ---- cases -------------------------------------------------------------------------------

    def captured(self, enqueue: Enqueue, calls: int = 1, *, warm: int = 2) -> Any:
        """Return a graph of `calls` times `enqueue`, which has run before."""
        import torch

        for _ in range(warm):
            enqueue()
        self.settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(calls):
                enqueue()
        return graph

    def case(self, key: str, enqueue: Enqueue | None, estimate_us: float) -> Case:
        """Return the case of one operation; None takes part in barriers only, and is 0 us."""
        if enqueue is None:
            return Case(key, dict)
        calls, burst = calls_in(estimate_us)
        graph = self.captured(enqueue, calls)
        return Case(key, lambda: {"": self._burst(graph, burst, calls)}, (graph, enqueue))

    def chain(self, key: str, enqueue: Enqueue | None, operations: int) -> Case:
        """Return the case of a call that is a chain of `operations`; the time is that of one."""
        if enqueue is None:
            return Case(key, dict)
        graph = self.captured(enqueue)
        return Case(key, lambda: {"": self._burst(graph, BURST, operations)}, (graph, enqueue))

    def beside(
        self,
        key: str,
        main: Enqueue,
        main_count: int,
        side: Enqueue | None,
        side_count: int,
        *,
        before: Enqueue | None = None,
        after: Enqueue | None = None,
    ) -> Case:
        """Return the case of `main` on the current stream and `side` on the side stream, at once.

        It gives the times of one operation of each (``main``, ``side``) and ``cover``: the time
        from the beginning of main to the end of side, over the time of main.

        Parameters
        ----------
        main_count, side_count
            Operations in each.
        before
            Runs first, on the current stream, in no measured time.
        after
            Runs on the current stream after `main`, in no measured time.
        """
        import torch

        mine, other = Clock(), Clock()

        def enqueue() -> None:
            current = torch.cuda.current_stream()
            if before is not None:
                before()
            if side is not None:
                self.side.wait_stream(current)
                other.start(self.side)
                with torch.cuda.stream(self.side):
                    side()
                other.stop(self.side)
            mine.start(current)
            main()
            mine.stop(current)
            if after is not None:
                after()
            if side is not None:
                current.wait_stream(self.side)

        graph = self.captured(enqueue, warm=1)

        def measure() -> dict[str, float]:
            for _ in range(2):  # the first one warms up
                graph.replay()
            self.settle()
            whole_us = mine.us()
            found = {"main": whole_us / main_count}
            if side is not None:
                found["side"] = other.us() / side_count
                found["cover"] = mine.until_end_of(other) / whole_us
            return found

        return Case(key, measure, (graph, enqueue, mine, other))

    # ---- rounds ------------------------------------------------------------------------------

    def gather(self, cases: Iterator[tuple[str, Callable[[], Case]]], phase: Phase) -> list[Case]:
        """Make cases, leaving out those that cannot be made on every rank, with the reason."""
        import torch

        made: list[Case] = []
        failed: dict[str, str] = {}
        for key, make in cases:
            try:
                made.append(make())
            except PROBE_ERRORS as error:
                failed[key] = reason_of(error)
        torch.cuda.synchronize()
        for answer in self.transport.exchange({"failed": list(failed)[:40]}):
            for key in answer["failed"]:
                failed.setdefault(key, "it failed on another rank")
        phase.failed |= failed
        return [one for one in made if one.key not in failed]

    def run(
        self, cases: Sequence[Case], phase: Phase, *, name: str, rounds: int, budget_s: float
    ) -> None:
        """Time every case once a round; stop after three rounds if the budget is used up.

        Raises
        ------
        RunFailed
            If a rank was lost, a wait gave up, or the device did not get done.
        """
        if not cases:
            return
        begun = time.monotonic()
        order = random.Random(f"{self._seed}/{name}")
        for number in range(rounds):
            for place, case in enumerate(order.sample(list(cases), len(cases))):
                if place % SENTINEL_EVERY == 0:
                    phase.sentinel_us.append(self.sentinel())
                self.transport.barrier()
                for part, us in case.measure().items():
                    key = f"{case.key}/{part}" if part else case.key
                    phase.us.setdefault(key, []).append(us)
            phase.conditions.append(gpu_condition(self.transport.device_index))
            self.transport.raise_if_failed()
            late = number >= 2 and time.monotonic() - begun > budget_s
            if any(one["late"] for one in self.transport.exchange({"late": late})):
                break

    def sentinel(self) -> float:
        """Return the time of one sentinel GEMM, from a burst."""
        if self._sentinel is None:
            self._sentinel = self._make_sentinel()
        self.transport.barrier()
        return self._burst(self._sentinel[0], BURST, LEAST_CALLS)

    def warm_up(self, seconds: float) -> None:
        """Multiply until the clocks have settled."""
        end = time.monotonic() + seconds
        self.sentinel()
        while time.monotonic() < end:
            self._burst(self._sentinel[0], BURST, LEAST_CALLS)

    def settle(self) -> None:
        """Wait until the device is done.

        Raises
        ------
        RunFailed
            If it is not in time; what waits has been let go.
        """
        import torch

        event = torch.cuda.Event()
        event.record()
        self._await(event)

    def _await(self, event: Any) -> None:
        end = time.monotonic() + self._limit_s
        while not event.query():
            if time.monotonic() > end:
                if self._release is not None:
                    self._release()
                raise RunFailed(f"The GPU was not done within {self._limit_s:g} s.")

    def _burst(self, graph: Any, replays: int, operations: int) -> float:
        graph.replay()
        self._start.record()
        for _ in range(replays):
            graph.replay()
        self._end.record()
        self._await(self._end)
        return float(self._start.elapsed_time(self._end)) * 1e3 / (replays * operations)

    def _make_sentinel(self) -> tuple[Any, ...]:
        import torch

        a = torch.randn((SENTINEL, SENTINEL), device=self.transport.device).to(torch.bfloat16)
        multiply = TorchGemm().prepare(a, a, torch.empty_like(a), None)
        return self.captured(multiply, LEAST_CALLS), a, multiply
