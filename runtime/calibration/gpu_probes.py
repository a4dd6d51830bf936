"""What one rank measures during calibration of GPUs; `bursts` in this package has the protocol.

Phases, each guarded: what cannot be measured is kept as its reason, and the rest goes on.

push
    Pushes by the copy engines, back to back: one rank alone (``one_way``), all to the next rank
    (``both_ways``), all to all others on streams of their own (``to_all``, beyond two ranks).
    For some sizes also all to the next two, four and so on (``to_N``), and all to rank 0
    (``incast``).
signal
    ``chain``: signals of the transport, back to back.  ``ping_pong``: signal and wait in turn
    between ranks 0 and 1, one way.  ``exchange``: every rank signals all and waits for all: a
    barrier.  The first two also beside GEMMs, on a stream of high priority.
host
    ``node``: a small kernel in a chain.  ``ladder``: a level of two such chains that wait for each
    other after every kernel.  ``call``: a graph of what begins a call and one small kernel, on an
    idle device, between two events.  ``run``: the host's time for an eager call of a Program of
    one round and of four (a push, a wait and two GEMMs each).  ``verb``: the host's time for one
    launch.  ``copy``: a GiB within the device.
gemm DTYPE
    The grid of shapes; random normal operands, the same in every repeat.
beside push, beside collective
    GEMMs alone and beside pushes of 128 MiB by all ranks, or beside all-gathers of 128 MiB.
collective
    NCCL through ``torch.distributed``; an all-reduce works in place, and on zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

from stretto.runtime.calibration import host_costs
from stretto.runtime.calibration.bursts import Bursts, Case
from stretto.runtime.calibration.launches import (
    Enqueue,
    Operands,
    Shape,
    beginning,
    exchange,
    gemm_guess_us,
    in_turn,
    one_gemm,
    ping_pong,
    pushing,
    signals,
    spread,
    times,
)
from stretto.runtime.calibration.phases import PROBE_ERRORS, Phase, Phases, reason_of
from stretto.runtime.devices import driver_version
from stretto.schedules.language import Flag, WorkspaceLayout
from stretto.transports.cuda.driver import bindings, called

__all__ = ["GpuPlan", "measure_gpu", "versions"]

MIB = 1 << 20
STEPS = 16
"""Signals, ping-pongs or exchanges in one graph."""

BESIDE_BYTES = 128 * MIB
BESIDE_US = 4000.0
BESIDE_SHAPES: tuple[Shape, ...] = (
    (1024, 6288, 7168),
    (4096, 6288, 7168),
    (8192, 6288, 7168),
    (4096, 3648, 7168),
    (4096, 5120, 8192),
)
SIGNAL_SHAPE: Shape = (8192, 6288, 7168)
CROWD_BYTES = (1 << 20, 1 << 24, 1 << 27)
"""Sizes of pushes to some peers, and of all to one."""

COPY_BYTES = 1 << 30
GUESS_PUSH_US, GUESS_GB_PER_S, GUESS_COLLECTIVE_US, GUESS_COLLECTIVE_GB_PER_S = 2.6, 350, 15, 200
"""For choosing how many operations go into a graph, and nothing else."""

Makers = Iterator[tuple[str, Callable[[], Case]]]


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What to measure.

    Attributes
    ----------
    world_size
        Ranks, one GPU each.
    dtypes
        Of GEMMs.
    sites
        Sizes (n, k) of the weights.
    rows
        Values of m for each.
    push_bytes, collective_bytes
        Sizes of one push; of the full tensor of a collective.
    rounds
        Measurements of each figure.
    gemm_budget_s
        Seconds after which the grid of one dtype stops early, with at least three rounds.
    seed
        Of the random orders.
    partial
        Beginning of the paths where every rank writes what it has after each phase
        (``PARTIAL.rank0.json``); None writes nothing.
    progress
        Whether rank 0 says on stderr what it is doing.
    """

    world_size: int
    dtypes: tuple[str, ...]
    sites: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    push_bytes: tuple[int, ...]
    collective_bytes: tuple[int, ...]
    rounds: int = 7
    gemm_budget_s: float = 35.0
    seed: int = 0
    partial: str | None = None
    progress: bool = True


def measure_gpu(transport: Any, plan: GpuPlan) -> dict[str, Any]:
    """Do one rank's part of the calibration, together with all others.

    Returns
    -------
    dict
        ``rank``, ``world_size``, ``date``, ``device`` (what it is), ``versions``, and ``phases`` by
        name (`Phase.plain`).
    """
    import torch

    figures: dict[str, Any] = {
        "rank": transport.rank,
        "world_size": plan.world_size,
        "date": date.today().isoformat(),
        "device": _device(transport),
        "versions": versions(),
        "phases": {},
    }
    with torch.cuda.stream(torch.cuda.Stream()):
        phases = Phases(transport, figures, partial=plan.partial, progress=plan.progress)
        _Calibration(transport, plan, phases).measure()
    return figures


class _Calibration:
    """One rank's measurements, phase by phase."""

    def __init__(self, transport: Any, plan: GpuPlan, phases: Phases) -> None:
        self.transport, self.plan, self.phases = transport, plan, phases
        self.bursts = Bursts(transport, seed=plan.seed)
        self._group: Any = None

    def measure(self) -> None:
        """Run all phases, those that matter most first."""
        self.phases.run(
            [
                ("push", self.push),
                ("signal", self.signal),
                ("host", self.host),
                ("beside push", self.beside_push),
                *((f"gemm {dtype}", partial(self.gemm, dtype)) for dtype in self.plan.dtypes),
                ("collective", self.collective),
                ("beside collective", self.beside_collective),
            ]
        )

    def _time(self, phase: Phase, name: str, makers: Makers, *, budget_s: float) -> None:
        cases = self.bursts.gather(makers, phase)
        self.bursts.run(cases, phase, name=name, rounds=self.plan.rounds, budget_s=budget_s)

    # ---- pushes ------------------------------------------------------------------------------

    def push(self, phase: Phase) -> None:
        """Time pushes by size: one rank, all ranks, and each to all others."""
        import torch

        plan, transport = self.plan, self.transport
        largest = max(plan.push_bytes)
        # A landing place for every sender, so that no two write the same memory.
        layout = WorkspaceLayout(plan.world_size, (("probe", largest, plan.world_size),), ())
        workspace = transport.allocate(layout)
        source = torch.randint(0, 255, (largest,), dtype=torch.uint8, device=transport.device)
        push = partial(_push, transport, source, workspace)

        def makers() -> Makers:
            for size in plan.push_bytes:
                for sender in range(plan.world_size):
                    key = f"one_way/{sender}/{size}"
                    yield key, partial(self._push_case, key, push, size, sender)
                key = f"both_ways/{size}"
                yield key, partial(self._push_case, key, push, size, transport.rank)
                if plan.world_size > 2:
                    peers = self._next(plan.world_size - 1)
                    key = f"to_all/{size}"
                    yield key, partial(self._push_to, key, push, size, peers)
                if plan.world_size > 2 and size in CROWD_BYTES:
                    yield from self._crowds(push, size)

        self._time(phase, "push", makers(), budget_s=10.0)
        workspace.close()

    def _push_case(self, key: str, push: Callable[..., Enqueue], size: int, sender: int) -> Case:
        import torch

        rank = self.transport.rank
        enqueue = None
        if rank == sender:
            peer = (rank + 1) % self.plan.world_size
            enqueue = push(size, peer, torch.cuda.current_stream())
        return self.bursts.case(key, enqueue, _push_guess_us(size))

    def _crowds(self, push: Callable[..., Enqueue], size: int) -> Makers:
        """Yield pushes to some peers at once, and of all others to rank 0."""
        count = 2
        while count < self.plan.world_size - 1:
            key = f"to_{count}/{size}"
            yield key, partial(self._push_to, key, push, size, self._next(count))
            count *= 2
        key = f"incast/{size}"
        yield key, partial(self._push_to, key, push, size, [0] if self.transport.rank else [])

    def _next(self, count: int) -> list[int]:
        """Return the ranks that follow this one."""
        return [(self.transport.rank + step) % self.plan.world_size for step in range(1, count + 1)]

    def _push_to(self, key: str, push: Callable[..., Enqueue], size: int, peers: list[int]) -> Case:
        """Push to several peers at once, on a stream each; to none where there are none."""
        enqueue = spread(partial(push, size), peers) if peers else None
        crowd = max(len(peers), self.plan.world_size - 1 if key.startswith("incast") else 1)
        return self.bursts.case(key, enqueue, _push_guess_us(size) * crowd)

    # ---- signals -----------------------------------------------------------------------------

    def signal(self, phase: Phase) -> None:
        """Time signals and waits, alone and beside GEMMs."""
        plan = self.plan
        flags = (
            Flag("ping", count=STEPS),
            Flag("chain", count=STEPS),
            Flag("met", count=STEPS * plan.world_size),
        )
        workspace = self.transport.allocate(WorkspaceLayout(plan.world_size, (), flags))
        chain = partial(signals, flag="chain", steps=STEPS)
        bounce = partial(ping_pong, flag="ping", steps=STEPS)
        meet = partial(exchange, flag="met", steps=STEPS)

        def makers() -> Makers:
            for name, work, count in (
                ("chain", chain, STEPS),
                ("ping_pong", bounce, 2 * STEPS),
                ("exchange", meet, STEPS),
            ):
                key = f"{name}/idle"
                yield key, partial(self._signal_idle, key, workspace, work, count)
                if name != "exchange":
                    key = f"{name}/beside"
                    yield key, partial(self._signal_beside, key, workspace, work, count)

        self._time(phase, "signal", makers(), budget_s=10.0)
        workspace.close()

    def _signal_idle(
        self, key: str, workspace: Any, work: Callable[..., Enqueue], count: int
    ) -> Case:
        import torch

        current = torch.cuda.current_stream()
        begin = beginning(self.transport, workspace, current)
        enqueue = in_turn(begin, work(self.transport, workspace, current))
        return self.bursts.chain(key, enqueue, count)

    def _signal_beside(
        self, key: str, workspace: Any, work: Callable[..., Enqueue], count: int
    ) -> Case:
        import torch

        gemms = max(2, round(2 * BESIDE_US / gemm_guess_us(SIGNAL_SHAPE)))
        return self.bursts.beside(
            key,
            times(one_gemm(self.transport, SIGNAL_SHAPE), gemms),
            gemms,
            work(self.transport, workspace, self.bursts.side),
            count,
            before=beginning(self.transport, workspace, torch.cuda.current_stream()),
        )

    # ---- host, and small things --------------------------------------------------------------

    def host(self, phase: Phase) -> None:
        """Time nodes, graph launches, eager calls, and copies within the device."""
        import torch

        bursts, transport = self.bursts, self.transport
        layout = WorkspaceLayout(self.plan.world_size, (("probe", 4096, 1),), (Flag("ping"),))
        workspace = transport.allocate(layout)
        small = torch.zeros((2, 64), device=transport.device)
        source = torch.zeros(COPY_BYTES // 4, device=transport.device)
        # By a kernel: a graph's own node for a copy takes a copy engine, which reaches less.
        copy = partial(torch.mul, source, 1.0, out=torch.empty_like(source))
        kernel = partial(small[0].add_, 1)
        count = host_costs.LADDER
        launches = host_costs.verbs(transport, workspace)

        def makers() -> Makers:
            yield "node", partial(bursts.chain, "node", times(kernel, count), count)
            rungs = host_costs.ladder(bursts, small)
            yield "ladder", partial(bursts.chain, "ladder", rungs, count)
            yield "copy", partial(bursts.case, "copy", copy, 600.0)
            yield "call", partial(host_costs.graph_launch, bursts, "call", workspace, kernel)
            for rounds in (1, 4):
                key = f"run/{rounds}"
                yield key, partial(host_costs.eager_run, bursts, key, rounds)
            for key, launch in launches.items():
                yield key, partial(host_costs.eager_launch, key, launch)

        self._time(phase, "host", makers(), budget_s=10.0)
        workspace.close()

    # ---- GEMMs -------------------------------------------------------------------------------

    def gemm(self, dtype: str, phase: Phase) -> None:
        """Time the grid of one dtype."""
        plan = self.plan
        operands = Operands(self.transport, plan.sites, max(plan.rows), dtype)

        def makers() -> Makers:
            for n, k in plan.sites:
                for m in plan.rows:
                    yield f"{m}/{n}/{k}", partial(self._gemm_case, operands, (m, n, k))

        cases = self.bursts.gather(makers(), phase)
        self.phases.say(f"  {len(cases)} graphs are captured")
        self.bursts.warm_up(2.0)
        self.bursts.run(
            cases,
            phase,
            name=f"gemm {dtype}",
            rounds=plan.rounds,
            budget_s=plan.gemm_budget_s,
        )

    def _gemm_case(self, operands: Operands, shape: Shape) -> Case:
        return self.bursts.case(_name(shape), operands.gemm(shape), gemm_guess_us(shape))

    # ---- GEMMs beside communication ----------------------------------------------------------

    def beside_push(self, phase: Phase) -> None:
        """Time GEMMs alone and while all ranks push 128 MiB to the next."""
        import torch

        transport, size = self.transport, BESIDE_BYTES
        layout = WorkspaceLayout(self.plan.world_size, (("probe", size, 1),), ())
        workspace = transport.allocate(layout)
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=transport.device)
        peer = (transport.rank + 1) % self.plan.world_size
        push = pushing(transport, source, workspace, size, peer, 0, self.bursts.side)
        self._beside(phase, "push", push, _push_guess_us(size))
        workspace.close()

    def beside_collective(self, phase: Phase) -> None:
        """Time GEMMs alone and beside all-gathers of 128 MiB by NCCL."""
        import torch

        gather = _collective("all_gather", BESIDE_BYTES, self.transport, self._nccl())
        gather()
        torch.cuda.synchronize()
        self._beside(phase, "collective", gather, _collective_guess_us(BESIDE_BYTES))

    def _beside(self, phase: Phase, what: str, work: Enqueue, guess_us: float) -> None:
        def makers() -> Makers:
            for shape in BESIDE_SHAPES:
                for name, side in (("alone", None), (what, work)):
                    key = f"{name}/{_name(shape)}"
                    yield key, partial(self._beside_case, key, shape, side, guess_us)

        cases = self.bursts.gather(makers(), phase)
        self.bursts.warm_up(0.5)
        self.bursts.run(cases, phase, name=f"beside {what}", rounds=self.plan.rounds, budget_s=10.0)

    def _beside_case(self, key: str, shape: Shape, side: Enqueue | None, guess_us: float) -> Case:
        gemms = max(1, round(BESIDE_US / gemm_guess_us(shape)))
        # More than enough of it, so that no GEMM is alone at the end.
        count = max(2, round(1.8 * gemms * gemm_guess_us(shape) / guess_us))
        return self.bursts.beside(
            key,
            times(one_gemm(self.transport, shape), gemms),
            gemms,
            None if side is None else times(side, count),
            count,
        )

    # ---- collectives -------------------------------------------------------------------------

    def collective(self, phase: Phase) -> None:
        """Time NCCL's collectives by the size of the full tensor."""
        self._nccl()

        def makers() -> Makers:
            for size in self.plan.collective_bytes:
                for kind in ("all_gather", "reduce_scatter", "all_reduce"):
                    yield f"{kind}/{size}", partial(self._collective_case, kind, size)

        self._time(phase, "collective", makers(), budget_s=15.0)

    def _collective_case(self, kind: str, size: int) -> Case:
        call = _collective(kind, size, self.transport, self._nccl())
        return self.bursts.case(f"{kind}/{size}", call, _collective_guess_us(size))

    def _nccl(self) -> Any:
        if self._group is None:
            import torch.distributed as dist

            self._group = dist.new_group(backend="nccl")
        return self._group


def _push(
    transport: Any, source: Any, workspace: Any, size: int, peer: int, stream: Any
) -> Enqueue:
    return pushing(transport, source, workspace, size, peer, transport.rank, stream)


def _collective(kind: str, size: int, transport: Any, group: Any) -> Enqueue:
    """Return a collective of bf16 whose full tensor has `size` bytes."""
    import torch
    import torch.distributed as dist

    count = size // 2 // transport.world_size
    part = torch.zeros(count, dtype=torch.bfloat16, device=transport.device)
    full = part.new_zeros(count * transport.world_size)
    if kind == "all_reduce":
        return partial(dist.all_reduce, full, group=group)
    if kind == "all_gather":
        return partial(dist.all_gather_into_tensor, full, part.normal_(), group=group)
    return partial(dist.reduce_scatter_tensor, part, full.normal_(), group=group)


def _push_guess_us(size: int) -> float:
    return GUESS_PUSH_US + size / GUESS_GB_PER_S / 1e3


def _collective_guess_us(size: int) -> float:
    return GUESS_COLLECTIVE_US + size / GUESS_COLLECTIVE_GB_PER_S / 1e3


def _name(shape: Shape) -> str:
    return "/".join(str(size) for size in shape)


# ---- where ---------------------------------------------------------------------------------------


def _device(transport: Any) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(transport.device)
    driver = bindings()
    device = called("cuDeviceGet", driver.cuDeviceGet(transport.device_index))
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT
    engines = called("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(attribute, device))
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "sm_count": properties.multi_processor_count,
        "copy_engines": int(engines),
        "memory_bytes": properties.total_memory,
    }


def versions() -> dict[str, str]:
    """Return the versions of what the figures depend on."""
    import platform

    import torch

    found = {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "driver": driver_version(),
    }
    try:
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    except PROBE_ERRORS as error:
        found["nccl"] = f"unknown ({reason_of(error)})"
    return found
