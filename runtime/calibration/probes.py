"""What one rank measures during calibration of a CPU host; times are medians, in microseconds.

Protocol: one process a rank, GEMMs with the threads that a run at this TP uses.  At most as many
ranks as there are cores measure at the same time, the others wait, so that "alone" means: cores
busy, none of them shared (sharing is the simulator's to model).  Every figure is the median over
repeats; the first ones are dropped.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from stretto.runtime.gemm import TorchGemm
from stretto.runtime.tensors import torch_dtype
from stretto.schedules.language import Epoch, Flag, Word, WorkspaceLayout
from stretto.transports.interface import Memory, Transport, Workspace

__all__ = ["HostPlan", "RankFigures", "measure_rank"]

Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What to measure.

    Attributes
    ----------
    world_size, threads, cores
        Ranks, threads of one GEMM, cores of the host.
    dtype
        Of GEMMs and collectives.
    gemms
        Shapes (m, n, k).
    put_bytes, collective_bytes
        Sizes of one push; sizes of the full tensor of an all-gather.
    repeats
        Measurements of each figure.
    """

    world_size: int
    threads: int
    cores: int
    dtype: str
    gemms: tuple[Shape, ...]
    put_bytes: tuple[int, ...]
    collective_bytes: tuple[int, ...]
    repeats: int = 7


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What one rank found; empty lists where it only waited for others."""

    gemms: tuple[tuple[Shape, float], ...]
    puts: tuple[tuple[int, float], ...]
    all_gathers: tuple[tuple[int, float], ...]
    signal_us: float
    round_trip_us: float
    handover_us: float
    enqueue_us: float
    copy_gb_per_s: float
    contention: float


def measure_rank(transport: Transport, plan: HostPlan) -> RankFigures:
    """Do one rank's part of the calibration, together with all others."""
    import torch

    torch.set_num_threads(plan.threads)
    largest = max((*plan.put_bytes, *plan.collective_bytes, 4096))
    layout = WorkspaceLayout(
        plan.world_size, (("probe", largest, 2),), (Flag("ping", count=plan.world_size),)
    )
    workspace = transport.allocate(layout)
    try:
        return RankFigures(
            gemms=_gemms(transport, plan),
            puts=_puts(transport, workspace, plan),
            all_gathers=_all_gathers(transport, workspace, plan),
            signal_us=_signal(transport, workspace, plan),
            round_trip_us=_round_trip(transport, workspace, plan),
            handover_us=_handover(plan.repeats * 50),
            enqueue_us=_enqueue(plan.repeats * 200),
            copy_gb_per_s=_copy_rate(),
            contention=_contention(transport, plan),
        )
    finally:
        transport.barrier()
        workspace.close()


def _active(transport: Transport, plan: HostPlan) -> bool:
    """Whether this rank measures, or waits so that no core is shared."""
    return transport.rank * plan.threads < plan.cores


def _timed(function: Callable[[], Any], repeats: int) -> float:
    clock = time.perf_counter_ns
    times = []
    for _ in range(repeats + 2):
        start = clock()
        function()
        times.append(clock() - start)
    return median(times[2:]) / 1e3


def _gemms(transport: Transport, plan: HostPlan) -> tuple[tuple[Shape, float], ...]:
    import torch

    dtype, provider, found = torch_dtype(plan.dtype), TorchGemm(), []
    for m, n, k in plan.gemms:
        transport.barrier()
        if _active(transport, plan):
            a, b = torch.randn(m, k).to(dtype), (torch.randn(n, k) * k**-0.5).to(dtype)
            out = torch.empty((m, n), dtype=dtype)
            found.append(((m, n, k), _timed(provider.prepare(a, b, out, None), plan.repeats)))
    return tuple(found)


def _puts(
    transport: Transport, workspace: Workspace, plan: HostPlan
) -> tuple[tuple[int, float], ...]:
    import torch

    if plan.world_size == 1:
        return ()
    peer = (transport.rank + 1) % plan.world_size
    found = []
    for size in plan.put_bytes:
        transport.barrier()
        if transport.rank < plan.cores:
            source = torch.randint(0, 255, (size,), dtype=torch.uint8)
            launch = transport.put(
                Memory(source.data_ptr(), 1, size, size),
                Memory(workspace.address("probe", rank=peer, slot=0), 1, size, size),
            )
            found.append((size, _timed(partial(launch, 0), plan.repeats)))
    return tuple(found)


def _all_gathers(
    transport: Transport, workspace: Workspace, plan: HostPlan
) -> tuple[tuple[int, float], ...]:
    import torch

    if plan.world_size == 1:
        return ()
    found = []
    for size in plan.collective_bytes:
        block = max(size // plan.world_size, 1)
        source = torch.zeros(block, dtype=torch.uint8)
        launch = transport.collective(
            workspace,
            "all_gather",
            Memory(source.data_ptr(), 1, block, block),
            Memory(
                workspace.address("probe", rank=transport.rank, slot=1),
                plan.world_size,
                block,
                block,
            ),
            dtype="fp8",
            blocks=[1] * plan.world_size,
        )
        transport.barrier()
        found.append((block * plan.world_size, _timed(partial(launch, 0), plan.repeats)))
    return tuple(found)


def _signal(transport: Transport, workspace: Workspace, plan: HostPlan) -> float:
    """Return the time of a signal that nobody waits for."""
    peer = (transport.rank + 1) % plan.world_size
    launch = transport.signal(workspace, [Word("ping", peer, 0, transport.rank)], Epoch(0, 0))
    transport.barrier()
    return _timed(lambda: launch(0), plan.repeats * 20)


def _round_trip(transport: Transport, workspace: Workspace, plan: HostPlan) -> float:
    """Return the time from a signal to its answer, between ranks 0 and 1."""
    transport.barrier()
    if plan.world_size == 1 or transport.rank > 1:
        return 0.0
    peer = 1 - transport.rank
    signal = transport.signal(workspace, [Word("ping", peer, 0, transport.rank)], Epoch(1, 1))
    wait = transport.wait(workspace, [Word("ping", transport.rank, 0, peer)], Epoch(1, 1))
    first, second = (signal, wait) if transport.rank == 0 else (wait, signal)
    numbers = iter(range(10**6))

    def trip() -> None:
        call = next(numbers)
        first(call)
        second(call)

    return _timed(trip, plan.repeats * 20)


def _handover(repeats: int) -> float:
    """Return the time from one thread's setting an event to another's going on."""
    here, there = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()

    def echo() -> None:
        while (event := there.get()) is not None:
            event.wait()
            here.put(time.perf_counter_ns())

    worker = threading.Thread(target=echo)
    worker.start()
    times = []
    for _ in range(repeats):
        event = threading.Event()
        there.put(event)
        time.sleep(2e-4)  # the other thread waits by now
        start = time.perf_counter_ns()
        event.set()
        times.append(here.get() - start)
    there.put(None)
    worker.join()
    return median(times) / 1e3


def _enqueue(repeats: int) -> float:
    """Return the host's time to hand one operation to a stream."""
    tasks = queue.SimpleQueue[Any]()

    def one() -> None:
        record = [threading.Event(), 0, 0, ()]
        tasks.put((record, 0, [record]))

    return _timed(one, repeats)


def _contention(transport: Transport, plan: HostPlan) -> float:
    """Return what sharing cores costs beyond the sharing: 1 where nothing is lost.

    All ranks run the same GEMM at the same time, after only as many did as there are cores; the
    ratio is held against that of the threads.
    """
    import torch

    sharing = plan.world_size * plan.threads / plan.cores
    if sharing <= 1 or not plan.gemms:
        return 1.0
    m, n, k = sorted(plan.gemms, key=lambda shape: shape[0] * shape[1] * shape[2])[
        len(plan.gemms) // 2
    ]
    dtype = torch_dtype(plan.dtype)
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    run = TorchGemm().prepare(a, b, torch.empty((m, n), dtype=dtype), None)

    def repeated() -> None:
        for _ in range(plan.repeats):
            run()

    transport.barrier()
    alone = _timed(repeated, 3) if _active(transport, plan) else 0.0
    transport.barrier()
    crowded = _timed(repeated, 3)
    transport.barrier()
    return crowded / (alone * sharing) if alone else 1.0


def _copy_rate() -> float:
    """Return the rate of a large local copy, bytes read and written, in 1e9 bytes/s."""
    import torch

    source = torch.ones(32 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / (_timed(lambda: target.copy_(source), 5) * 1e3)


def medians(per_rank: Sequence[Sequence[tuple[Any, float]]]) -> list[tuple[Any, float]]:
    """Return the median over ranks of what each found, by key."""
    by_key: dict[Any, list[float]] = {}
    for found in per_rank:
        for key, value in found:
            by_key.setdefault(key, []).append(value)
    return [(key, median(values)) for key, values in by_key.items()]
