"""Which resources a step uses, leaving out those that can never be crowded.

Steps of one stream never overlap, so a resource that fits the largest demand of every stream that
uses it, added up, needs no sharing at all.  In a ring that holds for every link, and the engine
then runs at the speed of its arithmetic.
"""

from __future__ import annotations

from stretto.schedules.language import InvalidInput
from stretto.sim.engine.fluid import Resource
from stretto.sim.engine.plan import Plan, Step
from stretto.sim.machine import Machine, TransportModel

__all__ = ["assign_resources"]

_Key = tuple[str, int, int]


def assign_resources(
    plan: Plan, machine: Machine, transport: TransportModel, *, world_size: int
) -> None:
    """Fill in `Step.uses` and `Step.disturbed` of every step of the plan."""
    demands: dict[_Key, dict[tuple[int, str], float]] = {}
    wanted: list[tuple[Step, list[tuple[_Key, float]]]] = []
    put_streams: dict[int, set[str]] = {}
    for phase in plan.phases:
        for rank, rank_plan in phase.items():
            for stream, steps in rank_plan.streams.items():
                for step in steps:
                    uses = _uses(step, rank, plan, machine)
                    wanted.append((step, uses))
                    if step.activity == "put":
                        put_streams.setdefault(rank, set()).add(stream)
                    for key, weight in uses:
                        largest = demands.setdefault(key, {})
                        lane = (rank, stream)
                        largest[lane] = max(largest.get(lane, 0.0), weight)
    resources = {
        key: Resource(capacity)
        for key, largest in demands.items()
        if sum(largest.values())
        > (capacity := _capacity(key, machine, plan, world_size)) * (1 + 1e-9)
    }
    queues_suffice = all(len(streams) <= transport.copy_queues for streams in put_streams.values())
    interferes = bool(put_streams) and transport.gemm_slowdown_beside_put > 0
    beside = plan.collectives_beside_compute and transport.gemm_slowdown_beside_collective > 0
    beside |= transport.gemm_waves_beside_wait > 0
    for step, uses in wanted:
        step.uses = tuple((resources[key], weight) for key, weight in uses if key in resources)
        step.disturbed = bool(step.uses)
        if step.activity == "put":
            step.disturbed |= interferes or not queues_suffice
        elif step.kind == "gemm":
            step.disturbed |= interferes or beside
        step.disturbed &= step.alone_us > 0


def _uses(step: Step, rank: int, plan: Plan, machine: Machine) -> list[tuple[_Key, float]]:
    if machine.cores is not None:
        return _uses_of_cores(step)
    if step.activity != "put" or not step.weight or step.peer is None:
        return []
    peer = rank if plan.folded else step.peer
    uses = [(("egress", rank, 0), step.weight), (("ingress", peer, 0), step.weight)]
    if machine.fabric.topology == "point_to_point":
        uses.append((("link", rank, step.peer), step.weight))
    return uses


def _uses_of_cores(step: Step) -> list[tuple[_Key, float]]:
    """On a CPU a GEMM holds its threads' cores and a put one, whoever runs it."""
    if step.activity == "compute":
        return [(("cores", 0, 0), step.weight)]
    if step.activity == "put" and step.moved_bytes:
        return [(("cores", 0, 0), 1.0)]
    return []


def _capacity(key: _Key, machine: Machine, plan: Plan, world_size: int) -> float:
    if key[0] == "cores":
        # One rank that stands for all has its share of the host.
        return (machine.cores or 1) / (world_size if plan.folded else 1)
    capacity = {
        "egress": machine.fabric.egress_gb_per_s,
        "ingress": machine.fabric.ingress_gb_per_s,
        "link": machine.fabric.link_gb_per_s,
    }[key[0]]
    if capacity is None:
        raise InvalidInput(f"Machine {machine.name!r} gives no {key[0]} rate in its fabric.")
    return capacity
