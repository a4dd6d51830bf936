"""Calibration of the GPUs of one host: plan, measure with one process a GPU, write a profile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.runtime.calibration.gpu_probes import GpuPlan, measure_gpu
from stretto.runtime.calibration.gpu_profile import gpu_profile
from stretto.runtime.launcher import Rank, launch, require_torch
from stretto.schedules.language import InvalidInput, RunFailed, Unavailable
from stretto.schedules.presets import PRESETS, projection
from stretto.sim.machine import Machine
from stretto.transports import load_transport

__all__ = ["GpuPlan", "calibrate_gpus", "gpu_plan"]

TRANSPORT = "copy_engine"
ROWS = tuple(1 << power for power in range(6, 16))
"""64 to 32768."""

MORE_SITES = ((4096, 4096), (2048, 2048), (5120, 2048), (7168, 1536), (7168, 3584))
"""Weights (n, k) beside those of the presets: square ones, and narrow ones as after attention."""

PUSH_BYTES = (4, *(1 << power for power in range(12, 29)))
"""Four bytes, then 4 KiB to 256 MiB."""

COLLECTIVE_BYTES = tuple(1 << power for power in range(16, 30))
"""64 KiB to 512 MiB."""

WAIT_S, JOIN_S = 30.0, 60.0


def gpu_plan(
    world_size: int,
    dtypes: Sequence[str] = ("bf16", "fp16"),
    *,
    partial: str | None = None,
    progress: bool = True,
) -> GpuPlan:
    """Return what to measure: the presets' weights and a few more, pushes and collectives by size.

    Raises
    ------
    InvalidInput
        If there are fewer than two ranks, or the dtype has no GEMM to be measured here.
    """
    if world_size < 2:
        raise InvalidInput(
            f"--tp is {world_size}; GPUs are calibrated with at least 2, since pushes go between "
            "two."
        )
    for dtype in dtypes:
        if dtype not in ("bf16", "fp16", "fp32"):
            raise InvalidInput(f"--dtype is {dtype}; on GPUs choose bf16, fp16 or fp32.")
    sites = dict.fromkeys([*(projection(name, world_size) for name in PRESETS), *MORE_SITES])
    return GpuPlan(
        world_size=world_size,
        dtypes=tuple(dtypes),
        sites=tuple(sites),
        rows=ROWS,
        push_bytes=PUSH_BYTES,
        collective_bytes=COLLECTIVE_BYTES,
        partial=partial,
        progress=progress,
    )


def calibrate_gpus(plan: GpuPlan, *, name: str | None = None) -> Machine:
    """Measure this host's GPUs with one process each, and return their profile.

    With `GpuPlan.partial`, every figure is kept as well, in ``PARTIAL.figures.json``; of a run that
    is lost, ``PARTIAL.rank0.json`` and so on remain.

    Raises
    ------
    Unavailable
        If the GPUs cannot be used, or are fewer than the ranks.
    RunFailed
        If a rank failed, or what a profile cannot do without was not measured.
    """
    torch = require_torch()
    state = load_transport(TRANSPORT).available()
    if not state.usable:
        raise Unavailable(f"Calibrating GPUs is not possible here: {state.reason}.")
    if plan.world_size > torch.cuda.device_count():
        raise InvalidInput(
            f"--tp is {plan.world_size}, there are {torch.cuda.device_count()} GPUs; ranks that "
            "share one would spoil every figure, so give at most that many (or --transport "
            "shared_memory, to measure the CPU)."
        )
    figures = launch(_measure, plan.world_size, plan)
    if plan.partial is not None:
        _keep(plan.partial, figures)
    return Machine.from_profile(gpu_profile(figures, name=name))


def _measure(rank: Rank, plan: GpuPlan) -> dict[str, Any]:
    cls: Any = load_transport(TRANSPORT)
    transport = cls(
        rank.index, rank.world_size, rank.store, timeout_s=WAIT_S, join_timeout_s=JOIN_S
    )
    try:
        return measure_gpu(transport, plan)
    finally:
        transport.close()


def _keep(base: str, figures: list[dict[str, Any]]) -> None:
    """Write all figures to one file and remove what the ranks wrote on the way."""
    path = Path(f"{base}.figures.json")
    try:
        path.write_text(json.dumps(figures))
    except OSError as error:
        raise RunFailed(f"{path} cannot be written: {error.strerror}.") from error
    for rank in range(len(figures)):
        Path(f"{base}.rank{rank}.json").unlink(missing_ok=True)
