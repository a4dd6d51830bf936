"""`simulate`: a Program on a machine, timed."""

from __future__ import annotations

from typing import Literal

from stretto.schedules.language import (
    DTYPE_BYTES,
    Collective,
    Deadlock,
    Gemm,
    InvalidInput,
    Program,
    Put,
)
from stretto.sim.engine.engine import Engine, Skew
from stretto.sim.engine.plan import can_fold, make_plan
from stretto.sim.engine.resources import assign_resources
from stretto.sim.engine.result import SimResult
from stretto.sim.machine import Machine, TransportModel

__all__ = ["roof_us", "simulate"]

NO_SKEW = Skew()


def simulate(
    program: Program,
    machine: Machine,
    *,
    mode: Literal["eager", "graph"] = "eager",
    skew: Skew = NO_SKEW,
    unfused: Program | None = None,
    fold: bool = True,
) -> SimResult:
    """Predict what `program` does on `machine`.

    Parameters
    ----------
    program
        Built against the capabilities of one of the machine's transports.
    machine
        A profile.
    mode
        Whether the host enqueues every operation (``eager``) or a graph does (``graph``).
    skew
        What makes ranks differ: delays, slow ranks, jitter.
    unfused
        The baseline's Program on the same machine, for the overlap efficiency.
    fold
        Let one rank stand for all where that is exact; False simulates every rank.

    Raises
    ------
    InvalidInput
        If the Program has more ranks than the machine's domain.
    UnknownName
        If the machine has no such transport.
    Deadlock
        If operations are left that can never run.
    """
    if program.world_size > machine.domain_size:
        raise InvalidInput(
            f"Machine {machine.name!r} joins at most {machine.domain_size} ranks by its fast "
            f"links; --tp {program.world_size} needs a profile with a slower link between domains."
        )
    transport = machine.transport(program.transport)
    engine = _run(program, machine, transport, mode=mode, skew=skew, fold=fold)
    baseline = None
    if unfused is not None:
        baseline = simulate(unfused, machine, mode=mode, skew=skew, fold=fold).makespan_us
    return SimResult(
        program=program,
        machine=machine,
        transport=program.transport,
        mode=mode,
        roof_us=roof_us(program, machine),
        validity=engine.plan.validity,
        engine=engine,
        unfused_us=baseline,
        unfused_transport=None if unfused is None else unfused.transport,
    )


def _run(
    program: Program,
    machine: Machine,
    transport: TransportModel,
    *,
    mode: str,
    skew: Skew,
    fold: bool,
) -> Engine:
    folded = fold and program.world_size > 1 and skew.none and can_fold(program)
    plan = make_plan(program, machine, transport, mode=mode, fold=folded)
    assign_resources(plan, machine, transport, world_size=program.world_size)
    engine = Engine(program, plan, machine, transport, mode=mode, skew=skew)
    try:
        engine.run()
    except Deadlock:
        if not folded:
            raise
        # One rank stood for all; say of every rank where it is stuck.
        return _run(program, machine, transport, mode=mode, skew=skew, fold=False)
    return engine


def roof_us(program: Program, machine: Machine) -> float:
    """Return a lower bound of the makespan for this machine's own numbers, in microseconds.

    The larger of: the GEMM work of the busiest rank, taken as the cheaper of the Program's own
    GEMMs and one GEMM over all rows they share a weight with; and the time its link needs for the
    bytes a rank must receive.  Calls add up.
    """
    total = 0.0
    for index, phase in enumerate(program.phases):
        received = _received_bytes(program, index)
        rate = machine.fabric.ingress_gb_per_s
        total += phase.repeats * max(
            max(
                _gemm_bound(program, machine, index, rank),
                received[rank] / (rate * 1e3) if rate else 0.0,
            )
            for rank in range(1 if can_fold(program) else program.world_size)
        )
    return total


def _gemm_bound(program: Program, machine: Machine, phase: int, rank: int) -> float:
    """Return the GEMM time of one call of a rank: its GEMMs as they are, or merged by weight."""
    world_size = program.world_size
    apart = 0.0
    together: dict[tuple[str, int, int, str], int] = {}
    for operation in program.phases[phase].body(rank).operations:
        if not isinstance(operation, Gemm):
            continue
        a_buffer, out_buffer = (
            program.buffer[operation.a.buffer],
            program.buffer[operation.out.buffer],
        )
        a = operation.a.resolve(a_buffer, rank=rank, world_size=world_size)
        out = operation.out.resolve(out_buffer, rank=rank, world_size=world_size)
        apart += machine.gemm_us(a.rows, out.columns, a.columns, a_buffer.dtype)
        key = (operation.b.buffer, out.columns, a.columns, a_buffer.dtype)
        together[key] = together.get(key, 0) + a.rows
    merged = sum(machine.gemm_us(m, n, k, dtype) for (_, n, k, dtype), m in together.items())
    return min(apart, merged)


def _received_bytes(program: Program, phase: int) -> list[int]:
    """Return how many bytes come to each rank in one call."""
    world_size = program.world_size
    received = [0] * world_size
    for rank in range(world_size):
        for operation in program.phases[phase].body(rank).operations:
            if not isinstance(operation, (Put, Collective)):
                continue
            view = operation.destination
            buffer = program.buffer[view.buffer]
            to = view.resolve(buffer, rank=rank, world_size=world_size)
            moved = to.rows * to.columns * DTYPE_BYTES[buffer.dtype]
            if isinstance(operation, Put):
                received[to.owner] += moved if to.owner != rank else 0
            else:
                received[rank] += _received_in_collective(operation, moved, world_size)
    return received


def _received_in_collective(operation: Collective, moved: int, world_size: int) -> int:
    """Return the least a rank must receive, given the bytes of its destination."""
    if operation.collective == "all_gather":
        return moved * (world_size - 1) // world_size
    if operation.collective == "reduce_scatter":
        return moved * (world_size - 1)
    return 2 * moved * (world_size - 1) // world_size
