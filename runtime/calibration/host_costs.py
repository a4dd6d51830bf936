"""What small things cost on a GPU: nodes of graphs, launches, eager calls; cases for `Bursts`."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

from stretto.runtime.calibration.bursts import Bursts, Case
from stretto.runtime.calibration.launches import Enqueue, beginning, in_turn, one_gemm, pushing
from stretto.schedules.ag_gemm import AllGatherGemm
from stretto.schedules.language import Epoch, Program, RankBuilder, Word, WorkspaceLayout
from stretto.transports.cuda.stream import CudaStream

__all__ = ["LADDER", "eager_launch", "eager_run", "graph_launch", "ladder", "verbs"]

LADDER = 32
"""Kernels in a chain, levels of a ladder."""

SMALL = (128, 256, 256)
TRIES = 5


def ladder(bursts: Bursts, small: Any) -> Enqueue:
    """Return two chains of small kernels that wait for each other after every kernel."""
    import torch

    def enqueue() -> None:
        main, side = torch.cuda.current_stream(), bursts.side
        side.wait_stream(main)
        for _ in range(LADDER):
            small[0].add_(1)
            with torch.cuda.stream(side):
                small[1].add_(1)
            mine, other = main.record_event(), side.record_event()
            main.wait_event(other)
            side.wait_event(mine)
        main.wait_stream(side)

    return enqueue


def graph_launch(bursts: Bursts, key: str, workspace: Any, kernel: Enqueue) -> Case:
    """Return the case of one replay on an idle device, between two events.

    The graph holds what begins a call, and one kernel.
    """
    import torch

    begin = beginning(bursts.transport, workspace, torch.cuda.current_stream())
    graph = bursts.captured(in_turn(begin, kernel))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def measure() -> dict[str, float]:
        taken = []
        for _ in range(5 * TRIES):
            torch.cuda.synchronize()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) * 1e3)
        return {"": median(taken)}

    return Case(key, measure, (graph, begin, kernel))


def eager_run(bursts: Bursts, key: str, rounds: int) -> Case:
    """Return the case of the host's time for one call of a Program, and how many operations it has.

    It has `rounds` (1 or 4) of a push, a wait and two small GEMMs each.
    """
    import torch

    from stretto.runtime.gpu import prepare

    transport = bursts.transport
    program = _program(rounds, transport)
    m, n, k = SMALL
    make = partial(torch.zeros, dtype=torch.bfloat16, device=transport.device)
    tensors = {"x": make((m // transport.world_size, k)), "w": make((n, k)), "y": make((m, n))}
    workspace = transport.allocate(WorkspaceLayout.of(program))
    executor = prepare(program, transport, tensors, workspace)
    executor.run()
    executor.synchronize()
    operations = len(program.phases[0].body(transport.rank).operations)

    def measure() -> dict[str, float]:
        taken = [_host_us(executor.run, 8, executor.synchronize) for _ in range(TRIES)]
        return {"": median(taken), "operations": float(operations)}

    return Case(key, measure, (executor, tensors, workspace))


def eager_launch(key: str, launch: Enqueue) -> Case:
    """Return the case of the host's time for one launch."""
    import torch

    launch()
    torch.cuda.synchronize()

    def measure() -> dict[str, float]:
        return {"": median(_host_us(launch, 100, torch.cuda.synchronize) for _ in range(TRIES))}

    return Case(key, measure, launch)


def verbs(transport: Any, workspace: Any) -> dict[str, Enqueue]:
    """Return one launch of each kind, none of which has to wait for anything."""
    import torch

    stream = torch.cuda.current_stream()
    where, rank = CudaStream(stream.cuda_stream), transport.rank
    peer = (rank + 1) % transport.world_size
    source = torch.zeros(4096, dtype=torch.uint8, device=transport.device)
    reached = Epoch(0, 0)
    signal = transport.signal(workspace, [Word("ping", peer, 0, 0)], reached, stream=where)
    wait = transport.wait(workspace, [Word("ping", rank, 0, 0)], reached, stream=where)
    return {
        "verb/put": pushing(transport, source, workspace, 4096, peer, 0, stream),
        "verb/signal": partial(signal, 0),
        "verb/wait": partial(wait, 0),
        "verb/gemm": one_gemm(transport, SMALL),
    }


def _host_us(launch: Enqueue, count: int, settle: Enqueue) -> float:
    """Return the host's time for one of `count` launches; then let the device get done."""
    start = time.perf_counter_ns()
    for _ in range(count):
        launch()
    taken_us = (time.perf_counter_ns() - start) / count / 1e3
    settle()
    return taken_us


class _Exchange(AllGatherGemm):
    """Rounds of: push to the next rank, multiply, wait, multiply."""

    rounds = 1

    def enqueue(self, rank: RankBuilder) -> None:
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        compute, send = rank.streams("compute", "send")
        for number in range(self.rounds):
            gathered = rank.workspace(f"gathered{number}", rows=self.m, columns=self.k)
            rank.put(x[rank], to=rank + 1, into=gathered[rank + 0], on=send)
            rank.gemm(x[rank], w, y[rank], on=compute)
            rank.wait(gathered[rank - 1], on=compute)
            rank.gemm(gathered[rank - 1], w, y[rank - 1], on=compute)


class _OneRound(_Exchange):
    variant = "one-round"


class _FourRounds(_Exchange):
    variant = "four-rounds"
    rounds = 4


def _program(rounds: int, transport: Any) -> Program:
    m, n, k = SMALL
    cls = _OneRound if rounds == 1 else _FourRounds
    return cls(
        world_size=transport.world_size,
        m=m,
        n=n,
        k=k,
        capabilities=type(transport).offered(),
    ).build()
