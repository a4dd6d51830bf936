"""``stretto bench ag-gemm``: our variants beside every peer that is installed, in one run.

Protocol
--------
One process a GPU.  Our variants are called as a model would call them: operators of one
`TensorParallel`, prepared and tuned once for all shapes; ``choice`` is what its dispatch table
takes.  Every method is captured in a CUDA graph of `CALLS` calls; a *burst* is `BURST` replays,
timed by two events on each rank; a method's time in a round is that of the slowest rank, divided
by the calls.  All methods of a shape are captured first, then come `rounds` rounds; in each, the
methods run once in a random order (the same on all ranks), each after a barrier and a warm-up
replay.  Reported are the median over rounds and, for comparisons, that of the ratios of each
round, with its 10th and 90th percentile.  Operands are random normal numbers.  A *sentinel* GEMM
runs in every round; its spread is the noise floor.  SM clock, temperature, power and throttle
reasons are read before and after each shape.

Traps: the same GEMM differs by several percent between clocks and power states, so only ratios of
one round count.  "NCCL without NVLS": multicast is switched off for everything here.  A method that
cannot run is listed with its reason, not left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from stretto.runtime.bench.machine import gpu_machine
from stretto.runtime.bench.predictions import errors_of
from stretto.runtime.calibration.figures import spread
from stretto.runtime.calibration.phases import reason_of
from stretto.runtime.gemm import GemmProvider, GemmShape, TorchGemm
from stretto.runtime.launcher import Rank, launch
from stretto.runtime.parallel import AllGatherGemm, TensorParallel
from stretto.runtime.tensors import torch_dtype
from stretto.schedules import SCHEDULES
from stretto.schedules.language import Unavailable, ceil_div

__all__ = ["BenchPlan", "bench_ag_gemm"]

CALLS, BURST = 4, 5
QUACK_TILES = ((128, 256, False), (128, 192, True), (256, 128, False))
"""Tile m and n, and whether two warp groups take turns; the best of them counts."""
Enqueue = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure: shapes (name, n, k), global rows, rounds, dtype, variants."""

    world_size: int
    shapes: tuple[tuple[str, int, int], ...]
    rows: tuple[int, ...]
    rounds: int = 15
    dtype: str = "bf16"
    variants: tuple[str, ...] = ("ring", "direct", "eager", "unfused")
    partial: Path | None = None
    """Where rank 0 writes the report after every shape, so that a lost run leaves what it had."""
    predicted: tuple[dict[str, Any], ...] = ()
    """What a profile predicted before (`stretto.runtime.bench.predictions`)."""
    profile: str = ""
    """Its name."""


@dataclass(slots=True)
class _Method:
    """One way to do the work, captured; `enqueue` owns the tensors whose addresses are in it."""

    name: str
    graph: Any
    enqueue: Enqueue
    times_us: list[float] = field(default_factory=list)


def bench_ag_gemm(plan: BenchPlan) -> dict[str, Any]:
    """Measure and return the report as plain values (rank 0's view, slowest rank's times)."""
    reports = launch(_rank, plan.world_size, plan)
    report: dict[str, Any] = reports[0]
    return report


def _rank(rank: Rank, plan: BenchPlan) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank.index % torch.cuda.device_count())
    store = dist.PrefixStore("bench", rank.store)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.world_size)
    rows: list[dict[str, Any]] = []
    with TensorParallel() as parallel, torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        if parallel.refusal is not None:
            raise Unavailable(f"bench ag-gemm needs overlapping, and {parallel.refusal}")
        nccl = dist.new_group(backend="nccl")
        operators = {name: _operator(parallel, plan, n, k) for name, n, k in plan.shapes}
        parallel.prepare()
        for name, operator in operators.items():
            for m in plan.rows:
                rows.append(_shape(parallel, nccl, plan, name, operator, m))
                if plan.partial is not None and rank.index == 0:
                    plan.partial.write_text(json.dumps(_report(plan, rows), indent=1))
    return _report(plan, rows)


def _operator(parallel: TensorParallel, plan: BenchPlan, n: int, k: int) -> AllGatherGemm:
    weight = _normal(parallel, plan, n, k) * k**-0.5
    return parallel.all_gather_gemm(weight, max_m=max(plan.rows))


def _normal(parallel: TensorParallel, plan: BenchPlan, *shape: int) -> Any:
    import torch

    generator = torch.Generator(device=parallel.device).manual_seed(parallel.rank)
    normal = torch.randn(shape, device=parallel.device, generator=generator)
    return normal.to(torch_dtype(plan.dtype))


def _report(plan: BenchPlan, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "what": "ag-gemm beside its peers",
        "protocol": f"graphs of {CALLS} calls, bursts of {BURST}, {plan.rounds} rounds in random "
        "order, slowest rank; median over rounds, ratios per round",
        "date": date.today().isoformat(),
        "machine": gpu_machine() | {"variants": ", ".join(SCHEDULES["ag-gemm"])},
        "world_size": plan.world_size,
        "dtype": plan.dtype,
        "rows": rows,
    } | _prediction(plan, rows)


def _prediction(plan: BenchPlan, rows: list[dict[str, Any]]) -> dict[str, Any]:
    if not plan.predicted:
        return {}
    return {
        "prediction": {
            "profile": plan.profile,
            "made": "before the measurement",
            "rows": list(plan.predicted),
            "errors": errors_of(plan.predicted, rows),
        }
    }


def _shape(
    parallel: TensorParallel,
    nccl: Any,
    plan: BenchPlan,
    name: str,
    operator: AllGatherGemm,
    m: int,
) -> dict[str, Any]:
    import torch

    x, w = _normal(parallel, plan, len(parallel.rows(m)), operator.k), operator.weight
    methods, skipped = [], {}
    makers: dict[str, Callable[[], Enqueue]] = {
        "gemm": lambda: _gemm(TorchGemm(), m, x, w, plan.world_size),
        "gemm, measured": lambda: _gemm(parallel.gemm, m, x, w, plan.world_size),
        "sentinel": lambda: _sentinel(parallel.device, x.dtype),
    }
    for variant in plan.variants:
        makers[variant] = lambda variant=variant: _ours(operator, variant, m, x)  # type: ignore[misc]
    makers["nccl + gemm"] = lambda: _nccl(nccl, x, w, plan.world_size)
    makers["all-gather"] = lambda: _all_gather(nccl, x, plan.world_size)
    makers["torch fused"] = lambda: _torch_fused(x, w)
    for tiles in QUACK_TILES:
        makers[f"quack {tiles[0]}x{tiles[1]}"] = lambda tiles=tiles: _quack(  # type: ignore[misc]
            x, w, plan.world_size, tiles
        )
        makers[f"quack gemm {tiles[0]}x{tiles[1]}"] = lambda tiles=tiles: _quack_gemm(  # type: ignore[misc]
            x, w, plan.world_size, tiles
        )
    for method, make in makers.items():
        try:
            enqueue = make()
            methods.append(_Method(method, _captured(enqueue), enqueue))
        except (ImportError, RuntimeError, AttributeError, TypeError, AssertionError) as error:
            if method in plan.variants:
                raise  # a peer may be missing, we may not
            skipped[method] = reason_of(error)
        torch.cuda.synchronize()
        _meet(parallel)
    agreed = _agreed(parallel, [one.name for one in methods])
    methods = [one for one in methods if one.name in agreed]
    before = _condition(parallel)
    order = random.Random(f"{name}/{m}")
    for _ in range(plan.rounds):
        for one in order.sample(methods, len(methods)):
            one.times_us.append(_burst(parallel, one.graph))
    after = _condition(parallel)
    times = _slowest(parallel, {one.name: one.times_us for one in methods})
    parallel.check()
    return {
        "projection": name,
        "m": m,
        "n": operator.n,
        "k": operator.k,
        "choice": operator.choice(m).variant,
        "gemm_choice": _gemm_choice(parallel, operator, m),
        "us": {method: median(values) for method, values in times.items()},
        "ratio_to_nccl": _ratios(times, "nccl + gemm"),
        "ratio_to_gemm": _ratios(times, "gemm"),
        "sentinel_spread": spread(times.get("sentinel", [])),
        "skipped": skipped,
        "device_before": before,
        "device_after": after,
    }


# ---- methods ---------------------------------------------------------------------------------


def _gemm(provider: GemmProvider, m: int, x: Any, w: Any, world_size: int) -> Enqueue:
    """Return one GEMM over all rows, on one device: no communication at all."""
    full = x.repeat(world_size, 1)[:m].contiguous()
    out = full.new_empty((m, w.shape[0]))
    return provider.prepare(full, w, out, None)


def _sentinel(device: Any, dtype: Any) -> Enqueue:
    import torch

    a = torch.randn((4096, 4096), device=device).to(dtype)
    return TorchGemm().prepare(a, a, torch.empty_like(a), None)


def _ours(operator: AllGatherGemm, variant: str, m: int, x: Any) -> Enqueue:
    out = x.new_empty((m, operator.n))
    return lambda: operator.parallel.enqueue(operator, variant, m, x, out)


def _gemm_choice(parallel: TensorParallel, operator: AllGatherGemm, m: int) -> dict[str, str]:
    """Return the providers of the full GEMM and of this rank's part."""
    shapes = {"full": m, "local": ceil_div(m, parallel.world_size)}
    dtype = str(operator.weight.dtype)
    return {
        name: parallel.gemm.choice(GemmShape(rows, operator.n, operator.k, dtype)).name
        for name, rows in shapes.items()
    }


def _all_gather(group: Any, x: Any, world_size: int) -> Enqueue:
    import torch.distributed as dist

    full = x.new_empty((x.shape[0] * world_size, x.shape[1]))
    return lambda: dist.all_gather_into_tensor(full, x, group=group)


def _nccl(group: Any, x: Any, w: Any, world_size: int) -> Enqueue:
    import torch
    import torch.distributed as dist

    full = x.new_empty((x.shape[0] * world_size, x.shape[1]))
    out = x.new_empty((full.shape[0], w.shape[0]))

    def call() -> None:
        dist.all_gather_into_tensor(full, x, group=group)
        torch.mm(full, w.t(), out=out)

    return call


def _torch_fused(x: Any, w: Any) -> Enqueue:
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD.group_name
    weight = w.t()
    return lambda: torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], 0, group)


def _quack(x: Any, w: Any, world_size: int, tiles: tuple[int, int, bool]) -> Enqueue:
    """Return QuACK's all-gather GEMM: copy-engine pushes, and a kernel that waits for its rows."""
    from quack.distributed import AllGatherRunner
    from quack.gemm import gemm

    runner = AllGatherRunner(x.shape[0], x.shape[1], x.dtype, device=x.device)
    out = x.new_empty((x.shape[0] * world_size, w.shape[0]))
    tile_m, tile_n, pingpong = tiles

    def call() -> None:
        with runner.gather(x) as (gathered, arguments):
            gemm(
                gathered, w, out, None, None, tile_m, tile_n, 2, 1,
                pingpong=pingpong, ag_args=arguments,
            )  # fmt: skip

    return call


def _quack_gemm(x: Any, w: Any, world_size: int, tiles: tuple[int, int, bool]) -> Enqueue:
    from quack.gemm import gemm

    full = x.repeat(world_size, 1).contiguous()
    out = x.new_empty((full.shape[0], w.shape[0]))
    tile_m, tile_n, pingpong = tiles
    return lambda: gemm(
        full, w, out, None, None, tile_m, tile_n, 2, 1, pingpong=pingpong
    )  # fmt: skip


# ---- measuring -------------------------------------------------------------------------------


def _captured(enqueue: Enqueue) -> Any:
    import torch

    for _ in range(3):
        enqueue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(CALLS):
            enqueue()
    return graph


def _meet(parallel: TensorParallel) -> None:
    parallel.carrier_of("ring").transport.barrier()


def _burst(parallel: TensorParallel, graph: Any) -> float:
    """Return the time of one call, from a burst of replays after a barrier and one more."""
    import torch

    _meet(parallel)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(BURST):
        graph.replay()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed * 1e3 / (BURST * CALLS)


def _agreed(parallel: TensorParallel, names: Sequence[str]) -> set[str]:
    """Return the methods that every rank has."""
    return set.intersection(*(set(one) for one in parallel.exchange(list(names))))


def _slowest(parallel: TensorParallel, times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return, by method and round, the slowest rank's time."""
    answers = parallel.exchange(times)
    return {
        method: [max(values) for values in zip(*(one[method] for one in answers), strict=True)]
        for method in times
    }


def _ratios(times: dict[str, list[float]], base: str) -> dict[str, list[float]]:
    """Return, by method, 10th percentile, median and 90th of ``base / method`` over rounds."""
    if base not in times:
        return {}
    found = {}
    for method, own in times.items():
        ratios = sorted(one / other for one, other in zip(times[base], own, strict=True))
        last = len(ratios) - 1
        found[method] = [ratios[round(last * 0.1)], median(ratios), ratios[round(last * 0.9)]]
    return found


def _condition(parallel: TensorParallel) -> dict[str, Any]:
    """Return clock, temperature, power and throttle reasons of this rank's GPU."""
    from stretto.runtime.devices import gpu_condition

    return gpu_condition(parallel.device.index)
