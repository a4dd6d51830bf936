"""``stretto bench host``: what a call costs the host, by operation.

Protocol
--------
One process a GPU; a shape so small that the device is always ahead.

*Enqueue*: the host's time for `CALLS` calls in a row, device idle before, divided by the calls;
median of `ROUNDS`, slowest rank.  It is given per call, per operation of the Program (credits and
releases included), and by kind: each action of a call is timed by itself in further rounds, and the
clock's own cost taken off (rank 0).  *Library*: the same through `AllGatherGemm`, with tensors that
stay and with a new address in every call.  *Graph*: one replay of a graph of four calls, per call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date
from statistics import median
from typing import Any

from stretto.runtime.bench.machine import gpu_machine
from stretto.runtime.gpu import prepare
from stretto.runtime.launcher import Rank, launch
from stretto.schedules import SCHEDULES, schedule_class
from stretto.schedules.language import WorkspaceLayout
from stretto.transports import load_transport

__all__ = ["PROTOCOL", "measure_host"]

PROTOCOL = "host's time of a call, device idle before; median of rounds; slowest rank"
ROWS, N, K = 32, 64, 64
"""Rows of one rank, and the GEMM's other sizes."""

CALLS, ROUNDS = 8, 40


def measure_host(world_size: int = 2) -> dict[str, Any]:
    """Measure and return the report as plain values."""
    reports = launch(_rank, world_size)
    rows = [
        {
            "variant": variant,
            **{
                name: max(report["rows"][variant][name] for report in reports)
                for name in reports[0]["rows"][variant]
                if name != "by_kind_us"
            },
            "by_kind_us": reports[0]["rows"][variant]["by_kind_us"],
        }
        for variant in reports[0]["rows"]
    ]
    return {
        "what": "host cost of a call",
        "protocol": f"{PROTOCOL}; {CALLS} calls in a row, {ROUNDS} rounds, "
        f"m={ROWS * world_size} n={N} k={K}, bf16",
        "date": date.today().isoformat(),
        "machine": reports[0]["machine"],
        "world_size": world_size,
        "rows": rows,
        "library": {
            name: max(report["library"][name] for report in reports)
            for name in reports[0]["library"]
        },
    }


def _rank(rank: Rank) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {}
    torch.cuda.set_device(rank.index % torch.cuda.device_count())
    store = dist.PrefixStore("host", rank.store)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.world_size)
    with torch.no_grad():
        for variant in SCHEDULES["ag-gemm"]:
            name = "rccl" if variant == "unfused" else "copy_engine"
            cls: Any = load_transport(name)
            transport = cls(rank.index, rank.world_size, rank.store, key_prefix=variant)
            with torch.cuda.stream(torch.cuda.Stream()):
                found[variant] = _variant(transport, variant)
            transport.barrier()
            transport.close()
        library = _library()
    return {"rows": found, "library": library, "machine": gpu_machine()}


def _variant(transport: Any, variant: str) -> dict[str, Any]:
    import torch

    program = schedule_class("ag-gemm", variant)(
        world_size=transport.world_size,
        m=ROWS * transport.world_size,
        n=N,
        k=K,
        dtype="bf16",
        capabilities=type(transport).offered(),
    ).build()
    layout = WorkspaceLayout.of(program)
    workspace = transport.allocate(layout) if layout.buffers or layout.flags else None
    shapes = {"x": (ROWS, K), "w": (N, K), "y": (ROWS * transport.world_size, N)}
    tensors = {
        name: torch.zeros(shape, dtype=torch.bfloat16, device=transport.device)
        for name, shape in shapes.items()
    }
    executor = prepare(program, transport, tensors, workspace)

    def settle() -> None:
        executor.synchronize()
        transport.barrier()

    per_call = _host_us(executor.run, settle)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(4):
            executor.run()
    replay = _host_us(graph.replay, settle) / 4
    operations = len(program.phases[0].body(transport.rank).operations)
    kinds = _by_kind(executor, settle)
    settle()
    return {
        "call_us": per_call,
        "operations": operations,
        "operation_us": per_call / operations,
        "graph_call_us": replay,
        "by_kind_us": kinds,
    }


def _host_us(call: Callable[[], Any], settle: Callable[[], None]) -> float:
    """Return the host's time of one call."""
    times = []
    for _ in range(ROUNDS + 3):
        settle()
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter_ns() - start) / (1e3 * CALLS))
    settle()
    return median(times[3:])


def _by_kind(executor: Any, settle: Callable[[], None]) -> dict[str, float]:
    """Return the host's time by kind of operation, summed over one call."""
    program = executor.executable.program
    body = program.phases[0].body(executor.executable.rank)
    kinds = {one.id: one.kind for one in body.operations}
    clock = time.perf_counter_ns
    ticks = sorted(-clock() + clock() for _ in range(1000))
    own = ticks[500] / 1e3
    sums: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        settle()
        spent: dict[str, float] = {}
        for name, elapsed_us in executor.run_timed_on_host():
            kind = kinds.get(name, name)
            spent[kind] = spent.get(kind, 0.0) + max(elapsed_us - own, 0.0)
        for kind, value in spent.items():
            sums.setdefault(kind, []).append(value)
    settle()
    return {kind: median(values) for kind, values in sums.items()}


def _library() -> dict[str, float]:
    """Return the host's time of a library call: addresses known, and new ones."""
    import torch

    from stretto.runtime.parallel import TensorParallel

    with TensorParallel() as parallel:
        weight = torch.zeros((N, K), dtype=torch.bfloat16, device=parallel.device)
        m = ROWS * parallel.world_size
        operator = parallel.all_gather_gemm(weight, max_m=m, variant="eager")
        parallel.prepare(tune=False)
        x, out = weight.new_zeros((ROWS, K)), weight.new_empty((m, N))
        fresh = iter([x.clone() for _ in range(4 * CALLS * ROUNDS)])

        def settle() -> None:
            torch.cuda.synchronize()
            parallel.carrier_of("eager").transport.barrier()

        return {
            "known_us": _host_us(lambda: operator(x, out=out), settle),
            "new_us": _host_us(lambda: operator(next(fresh), out=out), settle),
        }
