"""``stretto bench signals``: ways to signal and to wait between two GPUs, side by side.

Protocol
--------
One process a GPU, two ranks.  *One way* is half a ping-pong: signal and wait in turn between the
ranks, `STEPS` times in a CUDA graph, each with a word of its own; bursts of replays after a
barrier, slowest rank, median over rounds in random order.  It is taken on idle devices, and on a
stream of high priority beside GEMMs on both, timed by events in the graph: GEMMs of *one wave* (one
tile of 128 x 256 for each multiprocessor) and *large* ones (8192 x 6288 x 7168).  *Eager* is the
same ping-pong without a graph, *host* the host's time to enqueue one signal and one wait.

*Pending* is what decides: GEMMs alone, and the same GEMMs while a wait is pending from before the
first to after the last; the peer signals when its own GEMMs are done.  Given is the ratio of the
times of each round, median, 10th and 90th percentile.  A wait that is a kernel holds a place on a
multiprocessor, so that a GEMM with one block on each may run in two waves instead of one.

The candidates are described in `stretto.runtime.bench.signal_candidates`:

======================  =====================================  =================================
``copy, kernel``        4-byte copy of a device-side epoch     polling kernel (the transport's)
``store, kernel``       kernel that stores with release        the same
``put_signal``          torch symmetric memory, a mailbox      its wait_signal, which empties it
``copy, driver``        4-byte copy of a 1                     cuStreamWaitValue32, a memset
``copy, driver, copy``  the same                               the same, emptied by a copy
``write, driver``       cuStreamWriteValue32 to the peer       cuStreamWaitValue32, a memset
======================  =====================================  =================================

Nothing can hang: kernels that wait give up, and where the driver waits, a replay that is not done
in `LIMIT_S` has its words set from the host.  Whether cuStreamWriteValue32 reaches a peer's memory
is tried once before anything waits for it (CUDA 13.1 and later are reported not to), and last of
all, since a write that fails may take the context with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from stretto.runtime.bench.signal_candidates import CANDIDATES, LIMIT_S, STEPS, Candidate
from stretto.runtime.calibration.bursts import Bursts, Case
from stretto.runtime.calibration.figures import Figures
from stretto.runtime.calibration.gpu_probes import versions
from stretto.runtime.calibration.host_costs import eager_launch
from stretto.runtime.calibration.launches import (
    Enqueue,
    Shape,
    gemm_guess_us,
    in_turn,
    one_gemm,
    times,
)
from stretto.runtime.calibration.phases import Phase, Phases
from stretto.runtime.launcher import Rank, launch, require_torch
from stretto.schedules.language import Unavailable
from stretto.transports import load_transport

__all__ = ["PROTOCOL", "SignalsPlan", "measure_signals"]

PROTOCOL = (
    "two GPUs; one way of a ping-pong in CUDA graphs, slowest rank, median of rounds; pending: "
    "GEMMs beside a wait that is pending, over GEMMs alone, ratios per round"
)
LARGE: Shape = (8192, 6288, 7168)
TILE, WAVE_K = (128, 256), 7168
COVER_US = 6000.0
"""How long the GEMMs beside a ping-pong last in sum."""

PENDING_US = 2000.0
LEAD = 8
"""Small kernels before the GEMMs, so that a wait on the other stream is there first."""

Makers = Iterator[tuple[str, Callable[[], Case]]]


@dataclass(frozen=True, slots=True)
class SignalsPlan:
    """What to measure.

    Attributes
    ----------
    rounds
        Of every case.
    seed
        Of the random order.
    partial
        Beginning of the paths where both ranks write what they have after each candidate.
    progress
        Whether rank 0 says on stderr what is going on.
    """

    rounds: int = 9
    seed: int = 0
    partial: str | None = None
    progress: bool = True


def measure_signals(plan: SignalsPlan) -> dict[str, Any]:
    """Measure and return the report as plain values.

    Raises
    ------
    Unavailable
        If there are not two GPUs.
    RunFailed
        If a rank failed; what it had is in ``PARTIAL.rank0.json`` and so on.
    """
    torch = require_torch()
    state = load_transport("copy_engine").available()
    if not state.usable:
        raise Unavailable(f"bench signals needs two NVIDIA GPUs: {state.reason}.")
    if torch.cuda.device_count() < 2:
        raise Unavailable("bench signals needs two NVIDIA GPUs; there is one here.")
    report = _report(launch(_rank, 2, plan), plan)
    if plan.partial is not None:
        for rank in range(2):
            Path(f"{plan.partial}.rank{rank}.json").unlink(missing_ok=True)
    return report


def _rank(rank: Rank, plan: SignalsPlan) -> dict[str, Any]:
    import torch

    cls: Any = load_transport("copy_engine")
    transport = cls(
        rank.index, rank.world_size, rank.store, timeout_s=2 * LIMIT_S, join_timeout_s=60.0
    )
    properties = torch.cuda.get_device_properties(transport.device)
    figures: dict[str, Any] = {
        "rank": rank.index,
        "world_size": rank.world_size,
        "date": date.today().isoformat(),
        "device": {"name": properties.name, "sm_count": properties.multi_processor_count},
        "versions": versions(),
        "phases": {},
    }
    try:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            measure_rank(transport, plan, figures)
    finally:
        transport.close()
    return figures


def measure_rank(transport: Any, plan: SignalsPlan, figures: dict[str, Any]) -> None:
    """Measure all candidates on one rank, together with the other; fill in `figures`."""
    phases = Phases(transport, figures, partial=plan.partial, progress=plan.progress)
    shapes = {"one wave": _one_wave(figures["device"]["sm_count"]), "large": LARGE}
    made: dict[str, tuple[Candidate, Bursts]] = {}
    # Those that may fail for good come last, and what may hang after what does not.
    phases.run(
        [
            (name(cls), partial(measure, cls, made, transport, shapes, plan))
            for classes in (CANDIDATES[:-1], CANDIDATES[-1:])
            for name, measure in ((_name, _measure_trips), (_pending_name, _measure_pending))
            for cls in classes
        ]
    )


def _name(cls: type[Candidate]) -> str:
    return cls.name


def _pending_name(cls: type[Candidate]) -> str:
    return f"{cls.name}, pending"


def _measure_trips(
    cls: type[Candidate],
    made: dict[str, tuple[Candidate, Bursts]],
    transport: Any,
    shapes: dict[str, Shape],
    plan: SignalsPlan,
    phase: Phase,
) -> None:
    """Time ping-pongs and the host."""
    candidate = cls(transport)
    bursts = Bursts(transport, seed=plan.seed, limit_s=LIMIT_S, release=candidate.release)
    candidate.check(bursts)
    made[cls.name] = candidate, bursts

    def makers() -> Makers:
        yield "idle", partial(_idle, candidate, bursts)
        yield "eager", partial(_eager, candidate, bursts)
        yield "host", partial(_host, candidate)
        for name, shape in shapes.items():
            yield f"beside {name}", partial(_beside, candidate, bursts, name, shape)

    cases = bursts.gather(makers(), phase)
    bursts.run(cases, phase, name=cls.name, rounds=plan.rounds, budget_s=8.0)


def _measure_pending(
    cls: type[Candidate],
    made: dict[str, tuple[Candidate, Bursts]],
    transport: Any,
    shapes: dict[str, Shape],
    plan: SignalsPlan,
    phase: Phase,
) -> None:
    """Time GEMMs alone and beside a wait."""
    if cls.name not in made:
        raise Unavailable("the candidate does not work here")
    candidate, bursts = made[cls.name]

    def makers() -> Makers:
        for name, shape in shapes.items():
            for kind, waits in (("alone", False), ("pending", True)):
                key = f"{kind} {name}"
                yield key, partial(_pending, key, candidate, bursts, shape, waits=waits)

    cases = bursts.gather(makers(), phase)
    bursts.warm_up(0.3)
    bursts.run(cases, phase, name=_pending_name(cls), rounds=plan.rounds, budget_s=8.0)
    candidate.close()


# ---- cases ---------------------------------------------------------------------------------------


def _idle(candidate: Candidate, bursts: Bursts) -> Case:
    import torch

    current = torch.cuda.current_stream()
    enqueue = in_turn(candidate.begin(current), _ping_pong(candidate, current))
    return bursts.chain("idle", enqueue, 2 * STEPS)


def _eager(candidate: Candidate, bursts: Bursts) -> Case:
    """Return the case of a ping-pong that the host enqueues, step by step."""
    import torch

    current = torch.cuda.current_stream()
    enqueue = in_turn(candidate.begin(current), _ping_pong(candidate, current))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def measure() -> dict[str, float]:
        start.record()
        enqueue()
        end.record()
        bursts.settle()
        return {"": start.elapsed_time(end) * 1e3 / (2 * STEPS)}

    return Case("eager", measure, (candidate, enqueue))


def _host(candidate: Candidate) -> Case:
    import torch

    return eager_launch("host", candidate.cost(torch.cuda.current_stream()))


def _beside(candidate: Candidate, bursts: Bursts, name: str, shape: Shape) -> Case:
    import torch

    gemms = max(2, round(COVER_US / gemm_guess_us(shape)))
    return bursts.beside(
        f"beside {name}",
        times(one_gemm(bursts.transport, shape), gemms),
        gemms,
        _ping_pong(candidate, bursts.side),
        2 * STEPS,
        before=candidate.begin(torch.cuda.current_stream()),
    )


def _pending(key: str, candidate: Candidate, bursts: Bursts, shape: Shape, *, waits: bool) -> Case:
    """Return the case of GEMMs, alone or beside a wait that ends after them."""
    import torch

    current = torch.cuda.current_stream()
    small = torch.zeros(64, device=bursts.transport.device)
    gemms = max(1, round(PENDING_US / gemm_guess_us(shape)))
    side, before, after = None, None, None
    if waits:
        side = candidate.wait("late", 0, bursts.side)
        before = candidate.begin(current)
        after = candidate.signal("late", 0, current)
    return bursts.beside(
        key,
        times(one_gemm(bursts.transport, shape), gemms),
        gemms,
        side,
        1,
        before=before,
        lead=times(partial(small.add_, 1), LEAD),
        after=after,
        again=False,
    )


def _ping_pong(candidate: Candidate, stream: Any) -> Enqueue:
    """Return signals and waits in turn, `STEPS` there and back."""
    verbs: list[Enqueue] = []
    for step in range(STEPS):
        out = candidate.signal("ping", step, stream)
        back = candidate.wait("ping", step, stream)
        verbs += (out, back) if candidate.rank == 0 else (back, out)
    return in_turn(*verbs)


def _one_wave(sm_count: int) -> Shape:
    """Return the GEMM that has one tile for each multiprocessor, as square as can be."""
    rows = max(one for one in range(1, math.isqrt(sm_count) + 1) if sm_count % one == 0)
    return rows * TILE[0], sm_count // rows * TILE[1], WAVE_K


# ---- the report ----------------------------------------------------------------------------------


def _report(ranks: list[dict[str, Any]], plan: SignalsPlan) -> dict[str, Any]:
    figures = Figures(ranks)
    device = figures.device
    shapes = {"one wave": _one_wave(int(device["sm_count"])), "large": LARGE}
    return {
        "what": "signals and waits between two GPUs",
        "protocol": f"{PROTOCOL}; {STEPS} ping-pongs a graph, {plan.rounds} rounds",
        "date": figures.date,
        "machine": {"gpu": f"2 x {device['name']}", **figures.versions},
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "sentinel_spread": figures.noise,
        "throttled_by": figures.throttled_by(),
        "rows": [_row(figures, cls, list(shapes)) for cls in CANDIDATES],
        "figures": [rank["phases"] for rank in ranks],
    }


def _row(figures: Figures, cls: type[Candidate], shapes: list[str]) -> dict[str, Any]:
    """Return one candidate's line; what was not measured is None, with the reason."""
    us, pending = partial(figures.us, cls.name), _pending_name(cls)
    return {
        "candidate": cls.name,
        "signal": cls.signals_by,
        "wait": cls.waits_by,
        "idle_us": us("idle"),
        "eager_us": us("eager"),
        "host_us": us("host"),
        "beside_us": {name: us(f"beside {name}/side") for name in shapes},
        "ping_pong_over_gemms": {name: us(f"beside {name}/cover") for name in shapes},
        "gemm_beside_us": {name: us(f"beside {name}/main") for name in shapes},
        "gemm_alone_us": {name: figures.us(pending, f"alone {name}/main") for name in shapes},
        "gemm_pending_us": {name: figures.us(pending, f"pending {name}/main") for name in shapes},
        "pending_over_gemms": {
            name: figures.least(pending, f"pending {name}/cover") for name in shapes
        },
        "pending_ratio": {name: _ratios(figures, pending, name) for name in shapes},
        "not_measured": _failures(figures, (cls.name, pending)),
    }


def _failures(figures: Figures, phases: Sequence[str]) -> dict[str, str]:
    """Return what failed in some phases, or that they were not reached."""
    found: dict[str, str] = {}
    for rank in figures.ranks:
        for phase in phases:
            content = rank["phases"].get(phase)
            if content is None:
                found.setdefault(phase, "it was not reached")
                continue
            for key, reason in content["failed"].items():
                found.setdefault(f"{phase}: {key}" if key else phase, reason)
    return found


def _ratios(figures: Figures, phase: str, name: str) -> list[float] | None:
    """Return 10th percentile, median and 90th of GEMMs beside a pending wait over GEMMs alone."""
    alone = figures.times(phase, f"alone {name}/main")
    pending = figures.times(phase, f"pending {name}/main")
    ratios = sorted(two / one for one, two in zip(alone, pending, strict=False))
    if not ratios:
        return None
    last = len(ratios) - 1
    return [ratios[round(last * 0.1)], median(ratios), ratios[round(last * 0.9)]]
