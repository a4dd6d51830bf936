"""How fast the simulator is.

Protocol: ``ag-gemm`` of 9216 x 6288 x 7168 on ``gb300-nvl72``, built and simulated in one process;
the median of five, timed with ``perf_counter``, garbage collection left on.  "symmetric" lets one
rank stand for all where that is exact; "every rank" does not; "skewed" has one rank 10 % slower and
5 % jitter.  Operations are those of all ranks, also where one stands for all.  The Timeline's spans
are not made, as in a sweep.
"""

from __future__ import annotations

import platform
import time
from datetime import date
from statistics import median
from typing import Any

from stretto.schedules import schedule_class
from stretto.sim import Machine, Skew, simulate

__all__ = ["PROTOCOL", "measure_simulator"]

PROTOCOL = "ag-gemm 9216 x 6288 x 7168 on gb300-nvl72, one process, median of 5"
WORLD_SIZES = (2, 8, 16, 72)
REPEATS = 5
SKEW = Skew(slowdown={1: 1.1}, jitter=0.05)


def measure_simulator() -> dict[str, Any]:
    """Return the table as plain values."""
    machine = Machine.load("gb300-nvl72")
    rows = [
        _measure(machine, variant, world_size, case, skew, fold)
        for variant in ("ring", "eager")
        for case, skew, fold in (
            ("symmetric", Skew(), True),
            ("every rank", Skew(), False),
            ("skewed", SKEW, False),
        )
        for world_size in WORLD_SIZES
    ]
    return {
        "protocol": PROTOCOL,
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "processor": _processor(),
        "rows": rows,
    }


def _measure(
    machine: Machine, variant: str, world_size: int, case: str, skew: Skew, fold: bool
) -> dict[str, Any]:
    transport = machine.transport("copy_engine")
    builds, runs = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        program = schedule_class("ag-gemm", variant)(
            world_size=world_size, m=9216, n=6288, k=7168, capabilities=transport.capabilities
        ).build()
        built = time.perf_counter()
        makespan_us = simulate(program, machine, mode="graph", skew=skew, fold=fold).makespan_us
        runs.append(time.perf_counter() - built)
        builds.append(built - start)
    return {
        "case": f"{variant}, {case}",
        "tp": world_size,
        "operations": program.operations,
        "build_ms": median(builds) * 1e3,
        "simulate_ms": median(runs) * 1e3,
        "operations_per_s": program.operations / median(runs),
        "makespan_us": makespan_us,
    }


def _processor() -> str:
    from stretto.sim.machine import host_fingerprint

    return host_fingerprint().cpu_model
