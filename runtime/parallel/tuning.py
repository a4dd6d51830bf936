"""Which GEMM, and which variant, is fastest for how many rows: measured when layers are prepared.

Protocol: rows in powers of two up to the operator's most; normal operands.  GEMMs: a burst of ten
after three, of each provider in turn, three rounds, the least of the three.  Variants: graphs of
four calls (or four calls, eager), three replays after one, three rounds in turn with a barrier
before each, the median; the slowest rank decides for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import log2
from statistics import median
from typing import TYPE_CHECKING, Any

from stretto.runtime.gemm import GemmShape
from stretto.schedules.language import ceil_div

if TYPE_CHECKING:
    from stretto.runtime.parallel.operators import AllGatherGemm
    from stretto.runtime.parallel.tensor_parallel import TensorParallel

__all__ = ["DispatchTable", "load_gemms", "nearest", "tune_gemms", "tune_variants"]

DispatchTable = dict[int, tuple[str, dict[str, float]]]
"""By global rows: the fastest variant, and the microseconds of each."""

SMALLEST_M = 64
ROUNDS, BURST, CALLS, REPLAYS = 3, 10, 4, 3


def nearest(table: DispatchTable, m: int) -> int:
    """Return the measured number of rows that is nearest in ratio."""
    return min(table, key=lambda rows: abs(log2(rows / m)))


def load_gemms(parallel: TensorParallel, operators: list[AllGatherGemm]) -> None:
    """Run the largest GEMMs once, so that their kernels are loaded before anything spins."""
    for one in operators:
        for rows in {ceil_div(one.max_m, parallel.world_size), one.max_m}:
            a = one.weight.new_zeros((rows, one.k))
            parallel.gemm.prepare(a, one.weight, a.new_empty((rows, one.n)), None)()
    if parallel.device.type != "cpu":
        import torch

        torch.cuda.synchronize(parallel.device)


def tune_gemms(parallel: TensorParallel, operators: list[AllGatherGemm]) -> None:
    """Measure the GEMM providers on this rank's local shapes; nothing on a CPU."""
    if parallel.device.type == "cpu":
        return
    for one in operators:
        for m in _grid(one.max_m):
            for rows in {ceil_div(m, parallel.world_size), m}:
                shape = GemmShape(rows, one.n, one.k, str(one.weight.dtype))
                if not parallel.gemm.knows(shape):
                    parallel.gemm.note(shape, _gemm_times(parallel, one, rows))


def _gemm_times(parallel: TensorParallel, operator: AllGatherGemm, rows: int) -> dict[str, float]:
    import torch

    a = torch.randn((rows, operator.k), device=parallel.device).to(operator.weight.dtype)
    out = a.new_empty((rows, operator.n))
    calls = {
        one.name: one.prepare(a, operator.weight, out, None) for one in parallel.gemm.providers
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            best[name] = min(best[name], _burst_us(call, BURST, before=3))
    return best


def tune_variants(
    parallel: TensorParallel, operators: list[AllGatherGemm], *, mode: str
) -> dict[tuple[int, int, str], DispatchTable]:
    """Measure the variants of every operator that may choose; collective.

    Returns
    -------
    dict
        Tables by n, k and dtype, the same on all ranks.
    """
    tables: dict[tuple[int, int, str], DispatchTable] = {}
    largest: dict[tuple[int, int, str], AllGatherGemm] = {}
    for one in operators:
        key = (one.n, one.k, one.dtype)
        if one.variant == "auto" and one.max_m >= largest.get(key, one).max_m:
            largest[key] = one
    for key, one in largest.items():
        tables[key] = {}
        for m in _grid(one.max_m):
            own = _variant_times(parallel, one, m, mode)
            times = {
                variant: max(said[variant] for said in parallel.exchange(own)) for variant in own
            }
            tables[key][m] = (min(times, key=lambda variant: times[variant]), times)
    return tables


def _variant_times(
    parallel: TensorParallel, operator: AllGatherGemm, m: int, mode: str
) -> dict[str, float]:
    """Return this rank's time of one call, by variant."""
    import torch

    x = torch.randn((len(parallel.rows(m)), operator.k), device=parallel.device)
    x = x.to(operator.weight.dtype)
    out = x.new_empty((m, operator.n))

    def calls(variant: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(CALLS):
                parallel.enqueue(operator, variant, m, x, out)

        return run

    runs = {variant: calls(variant) for variant in parallel.variants_of(operator)}
    if parallel.device.type == "cpu":
        return _timed(parallel, runs, _wall_us)
    stream = torch.cuda.Stream(parallel.device)
    stream.wait_stream(torch.cuda.current_stream(parallel.device))
    with torch.cuda.stream(stream):
        for run in runs.values():  # loads the kernels of these rows
            run()
        stream.synchronize()
        if mode == "graph":
            runs = {variant: _captured(run) for variant, run in runs.items()}
        times = _timed(parallel, runs, lambda run: _burst_us(run, REPLAYS, before=1))
        stream.synchronize()
    return times


def _timed(
    parallel: TensorParallel,
    runs: dict[str, Callable[[], None]],
    measure: Callable[[Callable[[], None]], float],
) -> dict[str, float]:
    found: dict[str, list[float]] = {variant: [] for variant in runs}
    for _ in range(ROUNDS):
        for variant, run in runs.items():
            parallel.carrier_of(variant).transport.barrier()
            found[variant].append(measure(run) / CALLS)
    parallel.check()
    return {variant: median(times) for variant, times in found.items()}


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


def _burst_us(call: Callable[[], Any], times: int, *, before: int) -> float:
    """Return the time of one call of a burst on the current stream."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(before):
        call()
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed * 1e3 / times


def _wall_us(call: Callable[[], Any]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def _grid(max_m: int) -> list[int]:
    """Return powers of two up to the most rows, and that number itself."""
    rows = []
    m = SMALLEST_M
    while m < max_m:
        rows.append(m)
        m *= 2
    return [*rows, max_m]
