"""Calibration of a CPU host: plan, measure with one process a rank, write a profile."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from typing import Any, Literal

from stretto.runtime.calibration.figures import growing
from stretto.runtime.calibration.probes import HostPlan, RankFigures, Shape, measure_rank, medians
from stretto.runtime.executors.cpu import host_cores
from stretto.runtime.launcher import Rank, launch
from stretto.schedules.language import DTYPE_BYTES, Gemm, Program, Put
from stretto.sim.machine import Machine, host_fingerprint
from stretto.sim.machine.schema import (
    Compute,
    Count,
    Curve,
    Fabric,
    GemmProfile,
    GemmTable,
    Host,
    Interference,
    ModeCosts,
    Profile,
    Provenance,
    Quantity,
    TransportProfile,
)
from stretto.transports import load_transport

__all__ = ["HostPlan", "calibrate_host", "plan_for"]

TRANSPORT = "shared_memory"
GRID_M = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
GRID_NK = ((512, 512), (1024, 1024), (2048, 2048))
PUT_BYTES = tuple(4 << (2 * power) for power in range(5, 12))
"""4 KiB to 16 MiB."""


def plan_for(
    world_size: int, dtype: str, programs: Sequence[Program] = (), *, grid: bool = True
) -> HostPlan:
    """Return what to measure: a grid of shapes, and those of the given Programs exactly."""
    shapes: dict[Shape, None] = {}
    sizes: dict[int, None] = {}
    gathered: dict[int, None] = {}
    if grid:
        shapes |= dict.fromkeys((m, n, k) for n, k in GRID_NK for m in GRID_M)
        sizes |= dict.fromkeys(PUT_BYTES)
        gathered |= dict.fromkeys((PUT_BYTES[0], PUT_BYTES[3], PUT_BYTES[-1]))
    for program in programs:
        for shape, size, full in _needs(program):
            shapes |= dict.fromkeys(shape)
            sizes |= dict.fromkeys(size)
            gathered |= dict.fromkeys(full)
    if not sizes or len(sizes) < 2:
        sizes |= dict.fromkeys((PUT_BYTES[0], PUT_BYTES[-1]))
    if len(gathered) < 2:
        gathered |= dict.fromkeys((PUT_BYTES[0], PUT_BYTES[-1]))
    cores = host_cores()
    return HostPlan(
        world_size=world_size,
        threads=max(1, cores // world_size),
        cores=cores,
        dtype=dtype,
        gemms=tuple(sorted(shapes)),
        put_bytes=tuple(sorted(sizes)),
        collective_bytes=tuple(sorted(gathered)),
    )


def _needs(program: Program) -> list[tuple[list[Shape], list[int], list[int]]]:
    """Return GEMM shapes, push sizes and gathered sizes that a Program has on any rank."""
    world_size = program.world_size
    shapes: list[Shape] = []
    pushed: list[int] = []
    gathered: list[int] = []

    def rectangle(view: Any, rank: int) -> Any:
        return view.resolve(program.buffer[view.buffer], rank=rank, world_size=world_size)

    for phase in program.phases:
        for rank in range(world_size):
            for operation in phase.body(rank).operations:
                if isinstance(operation, Gemm):
                    a, out = rectangle(operation.a, rank), rectangle(operation.out, rank)
                    if a.rows:
                        shapes.append((a.rows, out.columns, a.columns))
                elif isinstance(operation, Put):
                    moved = rectangle(operation.source, rank)
                    element = DTYPE_BYTES[program.buffer[moved.buffer].dtype]
                    if moved.rows:
                        pushed.append(moved.rows * moved.columns * element)
                elif operation.kind == "collective":
                    full = rectangle(operation.writes()[0], rank)
                    element = DTYPE_BYTES[program.buffer[full.buffer].dtype]
                    gathered.append(full.rows * full.columns * element)
    return [(shapes, pushed, gathered)]


def calibrate_host(plan: HostPlan, *, name: str = "host") -> Machine:
    """Measure this host with one process a rank and return its profile.

    Raises
    ------
    Unavailable
        If torch or the shared-memory transport cannot be used here.
    RunFailed
        If a rank fails.
    """
    figures: list[RankFigures] = launch(_measure, plan.world_size, plan)
    return Machine.from_profile(_profile(plan, figures, name))


def _measure(rank: Rank, plan: HostPlan) -> RankFigures:
    cls: Any = load_transport(TRANSPORT)
    transport = cls(rank.index, rank.world_size, rank.store)
    try:
        return measure_rank(transport, plan)
    finally:
        transport.close()


def _profile(plan: HostPlan, figures: Sequence[RankFigures], name: str) -> Profile:
    source = (
        f"stretto calibrate, {plan.world_size} ranks, {plan.threads} thread(s) a GEMM, "
        f"median of {plan.repeats}"
    )

    def measured(value: float) -> Quantity:
        return Quantity(value=value, origin="measured", source=source)

    gemms = medians([one.gemms for one in figures])
    rates = [2.0 * m * n * k / (us * 1e6) for (m, n, k), us in gemms]
    copy_rate = sum(one.copy_gb_per_s for one in figures) / len(figures)
    puts = growing(medians([one.puts for one in figures]))
    put_rate = max(size / (us * 1e3) for size, us in puts) if puts else copy_rate
    signal = sum(one.signal_us for one in figures) / len(figures)
    round_trip = figures[0].round_trip_us
    handover = sum(one.handover_us for one in figures) / len(figures)
    enqueue = sum(one.enqueue_us for one in figures) / len(figures)
    rate = measured(put_rate)
    gathers = medians([one.all_gathers for one in figures])
    return Profile(
        schema_version=1,
        name=name,
        description=f"This host, measured at TP{plan.world_size}",
        kind="cpu",
        domain_size=Count(value=64, origin="assumed", source="a cap, more processes than cores"),
        compute=Compute(
            peak_tflops={plan.dtype: measured(max(rates))},  # type: ignore[dict-item]
            sm_count=Count(value=plan.cores, origin="measured", source="usable cores"),
            hbm_gb_per_s=measured(copy_rate),
            moved_floor_us=measured(1.0),
            gemm={
                plan.dtype: GemmProfile(  # type: ignore[dict-item]
                    tables=(
                        GemmTable.from_rows(
                            [(*shape, us) for shape, us in gemms],
                            origin="measured",
                            source=source,
                        ),
                    )
                )
            },
        ),
        host=Host(
            enqueue_us=ModeCosts(eager=measured(enqueue), graph=measured(enqueue)),
            call_us=ModeCosts(eager=measured(0.0), graph=measured(0.0)),
            handover_us=measured(handover),
            contention=measured(_contention(figures)),
            gemm_threads=plan.threads,
            fingerprint=host_fingerprint(),
        ),
        fabric=Fabric(
            topology="switch",
            egress_gb_per_s=rate,
            ingress_gb_per_s=rate,
            hbm_gb_per_s=measured(copy_rate),
        ),
        transports=_transports(plan, source, puts, gathers, signal, round_trip),
        provenance=Provenance(
            date=date.today().isoformat(),
            versions={
                "torch": version("torch"),
                "numpy": version("numpy"),
                "python": platform.python_version(),
            },
            note=source,
        ),
    )


def _contention(figures: Sequence[RankFigures]) -> float:
    """Return the mean over the ranks that measured it, at least 1."""
    found = [one.contention for one in figures if one.contention != 1.0]
    return max(1.0, sum(found) / len(found)) if found else 1.0


def _transports(
    plan: HostPlan,
    source: str,
    puts: list[tuple[int, float]],
    gathers: list[tuple[int, float]],
    signal_us: float,
    round_trip_us: float,
) -> dict[str, TransportProfile]:
    if plan.world_size == 1:
        puts = [(1, signal_us), (2, signal_us)]
    origin: Literal["measured"] = "measured"

    def measured(value: float) -> Quantity:
        return Quantity(value=value, origin=origin, source=source)

    curves = {}
    if len(gathers) >= 2:
        curves = {
            "all_gather": {
                plan.world_size: Curve(points=tuple(growing(gathers)), origin=origin, source=source)
            }
        }
    none = Quantity(value=0.0, origin="derived", source="cores are shared explicitly instead")
    return {
        TRANSPORT: TransportProfile(
            capabilities=load_transport(TRANSPORT).offered(),
            put=Curve(points=tuple(puts), origin=origin, source=source),
            copy_queues=Count(
                value=64, origin="derived", source="a put is its stream's own thread"
            ),
            signal_us=measured(signal_us),
            wait_us=measured(max(round_trip_us / 2 - signal_us, 0.0)),
            collectives=curves,  # type: ignore[arg-type]
            interference=Interference(
                gemm_slowdown_beside_put=none,
                gemm_slowdown_beside_collective=none,
                sms_held=Count(value=0, origin="derived", source="a CPU"),
            ),
        )
    }
