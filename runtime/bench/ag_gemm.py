"""``stretto bench ag-gemm``: our variants beside every peer that is installed, in one run.

Protocol
--------
One process a GPU.  Every method is captured in a CUDA graph of `CALLS` calls; a *burst* is `BURST`
replays, timed by two events on each rank; a method's time in a round is that of the slowest rank,
divided by the calls.  All methods of a shape are captured first, then come `rounds` rounds; in
each, the methods run once in a random order (the same on all ranks), each after a barrier and a
warm-up replay.  Reported are the median over rounds and, for comparisons, that of the ratios
of each round, with its 10th and 90th percentile.  Operands are random normal numbers.  A
*sentinel* GEMM runs in every round; its spread is the noise floor.  SM clock, temperature, power
and throttle reasons are read before and after each shape.

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

from stretto.runtime.gemm import TorchGemm
from stretto.runtime.gpu import prepare
from stretto.runtime.launcher import Rank, launch
from stretto.runtime.tensors import torch_dtype
from stretto.schedules import SCHEDULES, schedule_class
from stretto.transports import load_transport
from stretto.transports.interface import WorkspaceLayout

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
    variants: tuple[str, ...] = ("ring", "direct", "eager")
    peers: bool = True
    seed: int = 0
    partial: Path | None = None
    """Where rank 0 writes the report after every shape, so that a lost run leaves what it had."""


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

    cls: Any = load_transport("copy_engine")
    transport = cls(rank.index, rank.world_size, rank.store)
    nccl = dist.new_group(backend="nccl") if plan.peers else None
    rows: list[dict[str, Any]] = []
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            for name, n, k in plan.shapes:
                for m in plan.rows:
                    rows.append(_shape(transport, nccl, plan, name, m, n, k))
                    if plan.partial is not None and rank.index == 0:
                        plan.partial.write_text(json.dumps(_report(plan, rows), indent=1))
    finally:
        transport.close()
    return _report(plan, rows)


def _report(plan: BenchPlan, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "what": "ag-gemm beside its peers",
        "protocol": f"graphs of {CALLS} calls, bursts of {BURST}, {plan.rounds} rounds in random "
        "order, slowest rank; median over rounds, ratios per round",
        "date": date.today().isoformat(),
        "machine": _machine(),
        "world_size": plan.world_size,
        "dtype": plan.dtype,
        "rows": rows,
    }


def _shape(
    transport: Any, nccl: Any, plan: BenchPlan, name: str, m: int, n: int, k: int
) -> dict[str, Any]:
    import torch

    dtype = torch_dtype(plan.dtype)
    local = -(-m // plan.world_size)
    generator = torch.Generator(device=transport.device).manual_seed(transport.rank)
    x = torch.randn((local, k), device=transport.device, generator=generator).to(dtype)
    w = (torch.randn((n, k), device=transport.device, generator=generator) * k**-0.5).to(dtype)
    methods, skipped = [], {}
    makers: dict[str, Callable[[], Enqueue]] = {
        "gemm": lambda: _gemm(m, x, w, plan.world_size),
        "sentinel": lambda: _sentinel(transport.device, dtype),
    }
    workspaces: list[Any] = []
    for variant in plan.variants:
        makers[variant] = lambda variant=variant: _ours(  # type: ignore[misc]
            transport, plan, variant, m, n, k, x, w, workspaces
        )
    if plan.peers:
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
            skipped[method] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        torch.cuda.synchronize()
        transport.barrier()
    agreed = _agreed(transport, [one.name for one in methods])
    methods = [one for one in methods if one.name in agreed]
    before = _condition(transport)
    order = random.Random(f"{plan.seed}/{name}/{m}")
    for _ in range(plan.rounds):
        for one in order.sample(methods, len(methods)):
            one.times_us.append(_burst(transport, one.graph))
    after = _condition(transport)
    times = _slowest(transport, {one.name: one.times_us for one in methods})
    for workspace in workspaces:
        workspace.close()
    return {
        "projection": name,
        "m": m,
        "n": n,
        "k": k,
        "us": {method: median(values) for method, values in times.items()},
        "ratio_to_nccl": _ratios(times, "nccl + gemm"),
        "ratio_to_gemm": _ratios(times, "gemm"),
        "sentinel_spread": _spread(times.get("sentinel", [])),
        "skipped": skipped,
        "device_before": before,
        "device_after": after,
    }


# ---- methods ---------------------------------------------------------------------------------


def _gemm(m: int, x: Any, w: Any, world_size: int) -> Enqueue:
    """Return one GEMM over all rows, on one device: no communication at all."""
    full = x.repeat(world_size, 1)[:m].contiguous()
    out = full.new_empty((m, w.shape[0]))
    return TorchGemm().prepare(full, w, out, None)


def _sentinel(device: Any, dtype: Any) -> Enqueue:
    import torch

    a = torch.randn((4096, 4096), device=device).to(dtype)
    return TorchGemm().prepare(a, a, torch.empty_like(a), None)


def _ours(
    transport: Any,
    plan: BenchPlan,
    variant: str,
    m: int,
    n: int,
    k: int,
    x: Any,
    w: Any,
    workspaces: list[Any],
) -> Enqueue:
    program = schedule_class("ag-gemm", variant)(
        world_size=plan.world_size,
        m=m,
        n=n,
        k=k,
        dtype=plan.dtype,  # type: ignore[arg-type]
        capabilities=type(transport).offered(),
    ).build()
    workspace = transport.allocate(WorkspaceLayout.of(program))
    workspaces.append(workspace)
    y = x.new_empty((m, n))
    executor = prepare(program, transport, {"x": x, "w": w, "y": y}, workspace)
    executor.run()
    executor.synchronize()
    return executor.run


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
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD.group_name
    symmetric.enable_symm_mem_for_group(group)
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


def _burst(transport: Any, graph: Any) -> float:
    """Return the time of one call, from a burst of replays after a barrier and one more."""
    import torch

    transport.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(BURST):
        graph.replay()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed * 1e3 / (BURST * CALLS)


def _agreed(transport: Any, names: Sequence[str]) -> set[str]:
    """Return the methods that every rank has."""
    answers = transport.exchange({"names": list(names)})
    return set.intersection(*(set(one["names"]) for one in answers))


def _slowest(transport: Any, times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return, by method and round, the slowest rank's time."""
    merged: dict[str, list[float]] = {}
    for method, own in times.items():
        answers = transport.exchange({"us": [round(one, 3) for one in own]})
        merged[method] = [
            max(values) for values in zip(*(one["us"] for one in answers), strict=True)
        ]
    return merged


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


def _spread(values: Sequence[float]) -> float | None:
    """Return the 10th to 90th percentile range over the median."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return (ordered[round(last * 0.9)] - ordered[round(last * 0.1)]) / median(ordered)


def _condition(transport: Any) -> dict[str, Any]:
    """Return clock, temperature, power and throttle reasons of this rank's GPU."""
    from stretto.runtime.devices import gpu_condition

    return gpu_condition(transport.device_index)


def _machine() -> dict[str, str]:
    import platform

    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": f"{torch.cuda.device_count()} x {properties.name}",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
        "python": platform.python_version(),
        "variants": ", ".join(SCHEDULES["ag-gemm"]),
    }
