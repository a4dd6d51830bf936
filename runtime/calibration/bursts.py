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
from dataclasses import dataclass
from typing import Any

from stretto.runtime.calibration.phases import PROBE_ERRORS, Phase, reason_of
from stretto.runtime.devices import gpu_condition
from stretto.runtime.gemm import TorchGemm
from stretto.schedules.language import RunFailed
from stretto.transports.cuda.driver import bindings, called

__all__ = ["Bursts", "Case", "Clock", "DeviceHung", "calls_in"]

BURST = 5
LEAST_CALLS, MOST_CALLS, GRAPH_US, BURST_US = 4, 64, 500.0, 100_000.0
"""A graph has 4 to 64 operations, lasts half a millisecond if it may, and a burst 0.1 s at most."""

SENTINEL = 4096
"""Rows and columns of the sentinel's square operands."""
SENTINEL_EVERY = 12

Enqueue = Callable[[], Any]


def calls_in(estimate_us: float) -> tuple[int, int]:
    """Return how many operations of that length go into a graph, and how often it is replayed."""
    calls = min(MOST_CALLS, max(LEAST_CALLS, math.ceil(GRAPH_US / estimate_us)))
    if calls * estimate_us > BURST_US / 2:
        calls = max(1, int(BURST_US / 2 / estimate_us))
    return calls, max(1, min(BURST, int(BURST_US / (calls * estimate_us))))


class DeviceHung(RunFailed):
    """The device was not done in time; what the ranks were at is out of step."""


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
        Called when it does, to let go what waits, until what it is given says that the device is
        done; the replay is then given up.
    """

    def __init__(
        self,
        transport: Any,
        *,
        seed: int = 0,
        limit_s: float = 60.0,
        release: Callable[[Callable[[], bool]], None] | None = None,
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
        lead: Enqueue | None = None,
        after: Enqueue | None = None,
        again: bool = True,
    ) -> Case:
        """Return the case of `main` on the current stream and `side` on the side stream, at once.

        It gives the times of one operation of each (``main``, ``side``) and ``cover``: the time
        from the beginning of main to the end of side, over the time of main.

        Parameters
        ----------
        main_count, side_count
            Operations in each.
        before, lead, after
            Run on the current stream, in no measured time: first of all; when `side` may already
            have begun, before `main`; after `main`.
        again
            Warm up by a replay of the graph itself, with nothing in between; else by the sentinel.
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
            if lead is not None:
                lead()
            mine.start(current)
            main()
            mine.stop(current)
            if after is not None:
                after()
            if side is not None:
                current.wait_stream(self.side)

        for work in (lead, main):  # its kernels must be loaded before anything waits beside them
            if work is not None:
                work()
        self.settle()
        graph = self.captured(enqueue, warm=1)

        def measure() -> dict[str, float]:
            (graph if again or self._sentinel is None else self._sentinel[0]).replay()
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
        """Make cases, leaving out those that cannot be made on every rank, with the reason.

        Raises
        ------
        DeviceHung
            If trying one out does not end; all ranks are told to give up.
        """
        import torch

        made: list[Case] = []
        failed: dict[str, str] = {}
        for key, make in cases:
            try:
                made.append(make())
            except DeviceHung as error:
                self.transport.abort(f"{key}: {reason_of(error)}")
                raise
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
            If a rank was lost, a wait gave up, or the device did not get done.  Ranks may then be
            out of step, so all are told to give up.
        """
        try:
            self._run(cases, phase, name=name, rounds=rounds, budget_s=budget_s)
        except PROBE_ERRORS as error:
            self.transport.abort(reason_of(error))
            raise

    def _run(
        self, cases: Sequence[Case], phase: Phase, *, name: str, rounds: int, budget_s: float
    ) -> None:
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
        DeviceHung
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
                    self._release(event.query)
                raise DeviceHung(f"The GPU was not done within {self._limit_s:g} s.")

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
