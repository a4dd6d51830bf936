"""Which synchronisation is not needed for the proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from stretto.schedules.language import Body, Operation, Program, Put, Signal, Wait
from stretto.schedules.verifier.verdict import Redundant

__all__ = ["find_redundant"]


def find_redundant(program: Program, is_safe: Callable[[Program], bool]) -> tuple[Redundant, ...]:
    """Return waits, signals and edges that can all be removed together.

    One after the other is taken out, waits first, and stays out if what is left is safe: so the
    list can go as a whole, and nothing beyond it can.  Other lists may be as long.

    Parameters
    ----------
    program
        A safe one.
    is_safe
        The proof.
    """
    found: list[Redundant] = []
    for candidate in _candidates(program):
        smaller = _without(program, candidate)
        if is_safe(smaller):
            program = smaller
            found.append(candidate)
    return tuple(found)


def _candidates(program: Program) -> Iterator[Redundant]:
    for phase in program.phases:
        for number, body in enumerate(phase.bodies):
            for operation in body.operations:
                if isinstance(operation, Wait):
                    text = f"{operation.id} need not be waited for"
                    yield Redundant(phase.name, number, operation.id, "wait", text)
            for operation in body.operations:
                for earlier in operation.after:
                    text = f"{operation.id} need not come after {earlier}"
                    yield Redundant(phase.name, number, operation.id, "after", text, earlier)
            for operation in body.operations:
                if isinstance(operation, Signal):
                    text = f"{operation.id} need not signal"
                    yield Redundant(phase.name, number, operation.id, "signal", text)
                elif isinstance(operation, Put) and operation.signal is not None:
                    text = f"{operation.id} need not signal {operation.signal.flag!r}"
                    yield Redundant(phase.name, number, operation.id, "signal", text)


def _without(program: Program, candidate: Redundant) -> Program:
    def changed(operation: Operation) -> Operation | None:
        gone = candidate.operation
        if operation.id == gone:
            if candidate.what == "after":
                kept = tuple(id for id in operation.after if id != candidate.edge)
                return replace(operation, after=kept)
            if isinstance(operation, Put):
                return replace(operation, signal=None)
            return None
        if candidate.what == "after" or gone not in operation.after:
            return operation
        removed = candidate.what == "wait" or isinstance(found, Signal)
        if not removed:
            return operation
        return replace(operation, after=tuple(id for id in operation.after if id != gone))

    phases = []
    for phase in program.phases:
        bodies = list(phase.bodies)
        if phase.name == candidate.phase:
            body = bodies[candidate.body]
            found = body[candidate.operation]
            kept = (changed(operation) for operation in body.operations)
            bodies[candidate.body] = Body(tuple(one for one in kept if one is not None))
        phases.append(replace(phase, bodies=tuple(bodies)))
    return replace(program, phases=tuple(phases))
