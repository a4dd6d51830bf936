"""One rank's part of a run on a GPU: tensors on the device, graph or eager, timelines by events.

What is measured twice
----------------------
Recording an event before and after every operation disturbs short ones, so an execution is timed as
a whole first (two events on the caller's stream; as a graph, one of its own), and operation by
operation afterwards.  The makespan reported is that of the undisturbed executions, slowest rank;
the Timeline is of a recorded one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from stretto.runtime.executors.clock import clock_base
from stretto.runtime.executors.cpu import host_cores
from stretto.runtime.executors.cuda import CudaExecutor
from stretto.runtime.gemm import GemmProvider, TorchGemm
from stretto.runtime.hang_report import with_flag_state
from stretto.runtime.launcher import Rank
from stretto.runtime.lowering import lower
from stretto.runtime.reference import check_outputs, make_inputs
from stretto.schedules.language import Program, Span, WorkspaceLayout
from stretto.transports.cuda.stream import CudaStream

if TYPE_CHECKING:
    from stretto.runtime.session import RankRun, RunOptions

__all__ = ["execute_on_gpu", "prepare", "side_streams"]


def side_streams(
    program: Program, known: dict[str, CudaStream] | None = None
) -> dict[str, CudaStream]:
    """Return a holder for each stream of a Program, side streams with CUDA streams of their own.

    Streams that carry communication get the highest priority: their kernels are tiny, and whole
    ranks wait for them.

    Parameters
    ----------
    program
        Whose streams.
    known
        Holders by name that are used, and added to: streams of one name are one stream for all
        Programs of a workspace.
    """
    import torch

    names = dict.fromkeys(
        stream for phase in program.phases for body in phase.bodies for stream in body.streams
    )
    holders = {} if known is None else known
    for name in (program.caller_stream, *names):
        if name in holders:
            continue
        handle = 0
        if name != program.caller_stream:
            handle = _keep(torch.cuda.Stream(priority=-5)).cuda_stream
        holders[name] = CudaStream(handle)
    return holders


_streams: list[Any] = []


def _keep(stream: Any) -> Any:
    """Keep a stream for the life of the process: graphs and events may refer to it."""
    _streams.append(stream)
    return stream


def prepare(
    program: Program,
    transport: Any,
    tensors: dict[str, Any] | None,
    workspace: Any,
    *,
    gemm: GemmProvider | None = None,
    streams: dict[str, CudaStream] | None = None,
) -> CudaExecutor:
    """Lower a Program for this rank's GPU.

    Parameters
    ----------
    program, transport, tensors, workspace
        As for `lower`.
    gemm
        Provider of GEMMs; by default torch's.
    streams
        Of other Programs on the workspace (`side_streams`).
    """
    holders = side_streams(program, streams)
    executable = lower(
        program,
        transport=transport,
        workspace=workspace,
        tensors=tensors,
        gemm=gemm or TorchGemm(),
        streams=holders,
    )
    return CudaExecutor(executable, transport=transport, workspace=workspace, streams=holders)


def execute_on_gpu(
    rank: Rank, transport: Any, program: Program, options: RunOptions, *, key: str
) -> RankRun:
    """Run one Program on this rank's GPU: warm up, measure whole, record, check."""
    import torch

    from stretto.runtime.session import RankRun, host_id, start_together

    torch.set_num_threads(max(1, host_cores() // rank.world_size))  # for the reference
    layout = WorkspaceLayout.of(program)
    workspace = transport.allocate(layout) if layout.buffers or layout.flags else None
    tensors = {
        name: tensor.to(transport.device)
        for name, tensor in make_inputs(program, rank.index, seed=options.seed).items()
    }
    executor = prepare(program, transport, tensors, workspace)
    delay = dict(options.delay_s).get(rank.index, 0.0)
    stream = torch.cuda.Stream()
    with with_flag_state(executor.executable, workspace), torch.cuda.stream(stream):
        transport.barrier()
        executor.run()  # loads every kernel before anything else waits
        executor.synchronize()
        run, recorded = _both(executor, options.mode)
        durations: list[float] = []
        executions: list[tuple[Span, ...]] = []
        error_us = 0.0
        for number in range(options.warmup + options.iterations):
            transport.barrier()
            start_together(rank, f"{key}/whole/{number}")
            time.sleep(delay)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            executor.synchronize()
            if number >= options.warmup:
                durations.append(start.elapsed_time(end) * 1e3)
        for number in range(options.iterations):
            base = clock_base()
            error_us = max(error_us, base.error_us)
            transport.barrier()
            start_together(rank, f"{key}/recorded/{number}")
            recorded()
            executor.synchronize()
            executions.append(tuple(executor.take_spans(base)))
            if options.mode == "eager":
                executor.forget_spans()
        check = None
        if options.check:
            outputs = {name: tensor.cpu() for name, tensor in tensors.items()}
            check = check_outputs(program, rank.index, outputs, seed=options.seed)
        transport.barrier()
    executor.close()
    if workspace is not None:
        workspace.close()
    return RankRun(rank.index, tuple(executions), check, error_us, host_id(), tuple(durations))


def _both(executor: CudaExecutor, mode: str) -> tuple[Any, Any]:
    """Return how to execute once, undisturbed and recorded."""
    import torch

    if mode == "eager":
        return executor.run, lambda: executor.run(timed=True)
    plain, recorded = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(plain, stream=torch.cuda.current_stream()):
        executor.run()
    with torch.cuda.graph(recorded, stream=torch.cuda.current_stream()):
        executor.run(timed=True)
    return plain.replay, recorded.replay
