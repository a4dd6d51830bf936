"""A run from the outside: processes, workspace, execution, check, and one Timeline of it all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

from stretto.runtime.executors.cpu import CpuExecutor, host_cores
from stretto.runtime.gemm import TorchGemm
from stretto.runtime.hang_report import with_flag_state
from stretto.runtime.launcher import Rank, launch, torchrun_rank
from stretto.runtime.lowering import lower
from stretto.runtime.reference import CheckReport, check_outputs, has_reference, make_inputs
from stretto.schedules.language import InvalidInput, Program, Span, Timeline, WorkspaceLayout
from stretto.transports import load_transport
from stretto.transports.interface import Transport

__all__ = ["RankRun", "RunOptions", "RunResult", "execute", "run_program", "run_programs"]

START_MARGIN_S = 0.01
"""Ranks agree on a start this far ahead, so that all have heard of it when it comes."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run.

    Attributes
    ----------
    iterations
        Measured executions; the Timeline is that of the one with the median makespan.
    warmup
        Executions before.
    check
        Compare the outputs with a float64 reference.
    seed
        Of the inputs.
    timeout_s
        How long a wait may take.
    delay_s
        By rank: sleep that long before every execution (for tests).
    mode
        On a GPU: captured in a graph, or enqueued anew every time.
    """

    iterations: int = 5
    warmup: int = 2
    check: bool = False
    seed: int = 0
    timeout_s: float = 30.0
    delay_s: tuple[tuple[int, float], ...] = ()
    mode: Literal["eager", "graph"] = "graph"


@dataclass(frozen=True, slots=True)
class RankRun:
    """What one rank brings back: spans of every measured execution, and its check.

    `durations_us` are of executions that were not recorded operation by operation, where recording
    disturbs (on a GPU); empty where it does not.
    """

    rank: int
    executions: tuple[tuple[Span, ...], ...]
    check: CheckReport | None
    clock_error_us: float
    host: str
    durations_us: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RunResult:
    """A measured run.

    Attributes
    ----------
    timeline
        Of the execution whose makespan is the median.
    makespans_us
        Of every measured execution, first begin to last end over all ranks.
    checks
        One a rank, empty if not asked for.
    """

    timeline: Timeline
    makespans_us: tuple[float, ...]
    checks: tuple[CheckReport, ...]

    @property
    def makespan_us(self) -> float:
        """Median makespan."""
        return median(self.makespans_us)


def run_program(
    program: Program, options: RunOptions, *, machine: str = "host"
) -> RunResult | None:
    """Run one Program with one process a rank; None on the other ranks of a ``torchrun``."""
    results = run_programs([program], options, machine=machine)
    return results[0] if results else None


def run_programs(
    programs: Sequence[Program], options: RunOptions, *, machine: str = "host"
) -> list[RunResult]:
    """Run Programs one after the other in the same processes, and put the ranks' spans together.

    They may be of different transports.

    Under ``torchrun`` this process is one rank of many: rank 0 returns the results, the others
    return an empty list.

    Raises
    ------
    InvalidInput
        If the Programs do not fit each other, or their transport is not known.
    Unavailable
        If the transport cannot be used here, or torch is missing.
    RunFailed
        If a rank fails; with its own error where it has one.
    """
    world_size = programs[0].world_size
    if any(program.world_size != world_size for program in programs):
        raise InvalidInput("Programs that run together must have one world size.")
    for program in programs:
        _require(program.transport)
        if options.check and not has_reference(program):
            raise InvalidInput(
                f"There is no reference for what {program.name!r} computes; run without --check."
            )
    rank = torchrun_rank()
    if rank is None:
        runs = launch(_run_rank, world_size, tuple(programs), options)
    else:
        if rank.world_size != world_size:
            raise InvalidInput(
                f"torchrun started {rank.world_size} processes, --tp is {world_size}."
            )
        runs = _gather(rank, _run_rank(rank, tuple(programs), options))
        if rank.index:
            return []
    return [
        _joined(program, [run[place] for run in runs], machine)
        for place, program in enumerate(programs)
    ]


def _require(transport: str) -> None:
    """Refuse a transport that cannot be used here before any process starts."""
    from stretto.schedules.language import Unavailable

    availability = load_transport(transport).available()
    if not availability.usable:
        raise Unavailable(f"Transport {transport!r} cannot be used here: {availability.reason}.")


def _run_rank(
    rank: Rank, programs: tuple[Program, ...], options: RunOptions
) -> tuple[RankRun, ...]:
    """Do one rank's part of `run_programs`; Programs of one transport share it."""
    open_transports: dict[str, Transport] = {}

    def transport_of(name: str) -> Transport:
        if name not in open_transports:
            cls: Callable[..., Transport] = load_transport(name)
            open_transports[name] = cls(
                rank.index, rank.world_size, rank.store, timeout_s=options.timeout_s
            )
        return open_transports[name]

    try:
        return tuple(
            execute(
                rank,
                transport_of(program.transport),
                program,
                options,
                key=f"stretto/start/{place}",
            )
            for place, program in enumerate(programs)
        )
    finally:
        for transport in open_transports.values():
            transport.close()


def execute(
    rank: Rank, transport: Transport, program: Program, options: RunOptions, *, key: str
) -> RankRun:
    """Run one Program on an open transport: warm up, measure, check.

    `key` names this execution in the store; it must be one that was not used before.
    """
    if transport.device is not None:
        from stretto.runtime.gpu import execute_on_gpu

        return execute_on_gpu(rank, transport, program, options, key=key)
    threads = max(1, host_cores() // rank.world_size)
    layout = WorkspaceLayout.of(program)
    workspace = transport.allocate(layout) if layout.buffers or layout.flags else None
    tensors = make_inputs(program, rank.index, seed=options.seed)
    executable = lower(
        program, transport=transport, workspace=workspace, tensors=tensors, gemm=TorchGemm()
    )
    executor = CpuExecutor(executable, transport=transport, workspace=workspace, threads=threads)
    delay = dict(options.delay_s).get(rank.index, 0.0)
    executions = []
    try:
        for number in range(options.warmup + options.iterations):
            transport.barrier()
            start_together(rank, f"{key}/{number}")
            time.sleep(delay)
            with with_flag_state(executable, workspace):
                executor.run()
                executor.synchronize()
            spans = executor.take_spans()
            if number >= options.warmup:
                executions.append(tuple(spans))
        check = None
        if options.check:
            check = check_outputs(program, rank.index, tensors, seed=options.seed)
        transport.barrier()
    finally:
        executor.close()
        if workspace is not None:
            workspace.close()
    return RankRun(rank.index, tuple(executions), check, clock_error_us(), host_id())


def start_together(rank: Rank, key: str) -> None:
    """Hold every rank until one moment of the common clock that rank 0 chose."""
    if rank.index == 0:
        rank.store.set(key, str(time.perf_counter() + START_MARGIN_S))
    moment = float(rank.store.get(key).decode())
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(max(left - 1e-4, 0.0))


def clock_error_us() -> float:
    """Return how long one reading of the clock takes: all ranks of a host read the same clock.

    ``CLOCK_MONOTONIC`` is one clock for all processes of a Linux host, so ranks need no alignment;
    what remains is the time between the event and the reading of it.
    """
    clock = time.perf_counter_ns
    readings = [clock() for _ in range(1000)]
    return max(
        median(later - earlier for earlier, later in pairwise(readings)) / 1e3,
        time.get_clock_info("perf_counter").resolution * 1e6,
    )


def host_id() -> str:
    """Return what tells this host's clock from another host's."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import socket

        return socket.gethostname()


def _gather(rank: Rank, run: tuple[RankRun, ...]) -> list[tuple[RankRun, ...]]:
    """Bring the ranks' results to rank 0 through the store."""
    import pickle

    rank.store.set(f"stretto/result/{rank.index}", pickle.dumps(run))
    results: list[tuple[RankRun, ...]] = []
    if rank.index == 0:
        for index in range(rank.world_size):
            results.append(pickle.loads(rank.store.get(f"stretto/result/{index}")))
        rank.store.set("stretto/result/taken", "1")
    else:
        rank.store.get("stretto/result/taken")
    return results


def _joined(program: Program, runs: Sequence[RankRun], machine: str) -> RunResult:
    """Put the ranks' spans of every execution on one time axis; keep the median one."""
    if len({run.host for run in runs}) > 1:
        raise InvalidInput("The ranks ran on different hosts, whose clocks are not aligned.")
    executions = [
        tuple(span for run in runs for span in run.executions[number])
        for number in range(len(runs[0].executions))
    ]
    timelines = [
        Timeline(
            name=program.name,
            variant=program.variant,
            world_size=program.world_size,
            shape=program.shape,
            dtype=program.dtype,
            transport=program.transport,
            origin="measured",
            machine=machine,
            spans=_from_zero(spans),
            clock_error_us=max(run.clock_error_us for run in runs),
        )
        for spans in executions
    ]
    makespans = tuple(timeline.makespan_us for timeline in timelines)
    if all(run.durations_us for run in runs):  # of undisturbed executions: the slowest rank's
        makespans = tuple(
            max(times) for times in zip(*(run.durations_us for run in runs), strict=True)
        )
    chosen = sorted(timelines, key=lambda timeline: timeline.makespan_us)[len(timelines) // 2]
    return RunResult(chosen, makespans, tuple(run.check for run in runs if run.check is not None))


def _from_zero(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Shift times so that the first span begins at 0, and calls so that the first is call 0."""
    start = min(span.start_us for span in spans)
    first = min(span.call for span in spans)
    return tuple(
        replace(
            span,
            call=span.call - first,
            start_us=span.start_us - start,
            end_us=span.end_us - start,
        )
        for span in spans
    )
