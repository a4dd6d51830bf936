"""Mutants: Programs with one small mistake each, to see whether it is noticed.

Every mistake is one that is made by hand: a wait, a signal, a credit or an event left out, a whole
barrier left out, two flags or two epochs mixed up, an epoch off by one, a slot too few, a row lost
or shifted.  Many of them contradict the rest of the Program and are refused when it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from stretto.schedules.language import (
    WHOLE,
    Block,
    Body,
    Copy,
    Epoch,
    Fixed,
    Gemm,
    Interval,
    Operation,
    Program,
    ProgramError,
    Put,
    Signal,
    View,
    Wait,
    in_slot,
)

__all__ = ["Mutant", "mutants"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake.

    Attributes
    ----------
    family
        ``wait``, ``credit``, ``turn``, ``signal``, ``release``, ``event``, ``word``, ``barrier``,
        ``flags swapped``, ``epochs swapped``, ``epoch off by one``, ``slots`` or ``rows``.
    what
        What was changed.
    program
        The Program with the mistake; None if it contradicts itself.
    refusal
        Why, in that case.
    """

    family: str
    what: str
    program: Program | None
    refusal: str | None = None


Change = Callable[[], Program]


def mutants(program: Program) -> Iterator[Mutant]:
    """Yield all mutants of a Program; equal ones once."""
    seen = {program}
    for family, what, change in _changes(program):
        try:
            changed = change()
        except ProgramError as error:
            yield Mutant(family, what, None, str(error))
            continue
        if changed not in seen:
            seen.add(changed)
            yield Mutant(family, what, changed)


def _changes(program: Program) -> Iterator[tuple[str, str, Change]]:
    yield from _omissions(program)
    yield from _missing_words(program)
    yield from _missing_barriers(program)
    yield from _swaps(program)
    yield from _epochs(program)
    yield from _slots(program)
    yield from _rows(program)


def _operations(program: Program) -> Iterator[tuple[int, int, Operation]]:
    for phase_number, phase in enumerate(program.phases):
        for body_number, body in enumerate(phase.bodies):
            for operation in body.operations:
                yield phase_number, body_number, operation


def _with(program: Program, phase: int, body: int, *changed: Operation) -> Program:
    """Return the Program with operations of one body replaced by those of the same ids."""
    new = {operation.id: operation for operation in changed}
    phases = list(program.phases)
    bodies = list(phases[phase].bodies)
    bodies[body] = Body(
        tuple(new.get(operation.id, operation) for operation in bodies[body].operations)
    )
    phases[phase] = replace(phases[phase], bodies=tuple(bodies))
    return replace(program, phases=tuple(phases))


def _family(operation: Operation) -> str:
    """Return what a wait or signal is for."""
    note = operation.tags.note
    if isinstance(operation, Wait):
        return {"credit": "credit", "release": "turn"}.get(note or "", "wait")
    return "release" if note == "release" else "signal"


# ---- left out ------------------------------------------------------------------------------------


def _omissions(program: Program) -> Iterator[tuple[str, str, Change]]:
    for phase, body, operation in _operations(program):
        if isinstance(operation, (Wait, Signal)):
            gone = partial(program.without, operation.id)
            yield _family(operation), f"without {operation.id}", gone
        if isinstance(operation, Put) and operation.signal is not None:
            silent = partial(_with, program, phase, body, replace(operation, signal=None))
            yield "signal", f"{operation.id} without its signal", silent
        for earlier in operation.after:
            kept = tuple(id for id in operation.after if id != earlier)
            loose = partial(_with, program, phase, body, replace(operation, after=kept))
            yield "event", f"{operation.id} not after {earlier}", loose


def _missing_words(program: Program) -> Iterator[tuple[str, str, Change]]:
    for phase, body, operation in _operations(program):
        if isinstance(operation, (Wait, Signal)) and len(operation.words) > 1:
            for place, word in enumerate(operation.words):
                rest = (*operation.words[:place], *operation.words[place + 1 :])
                fewer = partial(_with, program, phase, body, replace(operation, words=rest))
                what = f"{operation.id} without {word.flag}[{word.index}] on {word.on}"
                yield "word", what, fewer


def _missing_barriers(program: Program) -> Iterator[tuple[str, str, Change]]:
    """Leave out all waits and signals of one flag: the barrier that they amount to."""
    for flag in program.flags:
        yield "barrier", f"without all of {flag.name}", partial(_stripped, program, flag.name)
    credits_ = [
        operation.id for _, _, operation in _operations(program) if operation.tags.note == "credit"
    ]
    if len(credits_) > 1:
        yield "barrier", "without all credits", partial(program.without, *credits_)


def _stripped(program: Program, name: str) -> Program:
    gone: list[str] = []
    changed = program
    for phase, body, operation in _operations(program):
        if isinstance(operation, (Wait, Signal)):
            if all(word.flag == name for word in operation.words):
                gone.append(operation.id)
        elif isinstance(operation, Put) and _signals(operation, name):
            changed = _with(changed, phase, body, replace(operation, signal=None))
    return changed.without(*gone)


def _signals(put: Put, name: str) -> bool:
    return put.signal is not None and put.signal.flag == name


# ---- mixed up ------------------------------------------------------------------------------------


def _swaps(program: Program) -> Iterator[tuple[str, str, Change]]:
    for phase_number, phase in enumerate(program.phases):
        for body_number, body in enumerate(phase.bodies):
            change = partial(_with, program, phase_number, body_number)
            for family, what, changed in _swaps_in(body):
                yield family, what, partial(change, *changed)


def _swaps_in(body: Body) -> Iterator[tuple[str, str, tuple[Operation, Operation]]]:
    waits = [one for one in body.operations if isinstance(one, Wait)]
    for wait, other in pairwise(waits):
        swapped = replace(wait, words=other.words), replace(other, words=wait.words)
        yield "flags swapped", f"words of {wait.id} and {other.id}", swapped
    puts = [one for one in body.operations if isinstance(one, Put) and one.signal is not None]
    for put, following in pairwise(puts):
        crossed = replace(put, signal=following.signal), replace(following, signal=put.signal)
        yield "flags swapped", f"signals of {put.id} and {following.id}", crossed
    timed = [one for one in body.operations if isinstance(one, (Wait, Signal))]
    for first, second in pairwise(timed):
        if first.value != second.value:
            mixed = replace(first, value=second.value), replace(second, value=first.value)
            yield "epochs swapped", f"values of {first.id} and {second.id}", mixed


def _epochs(program: Program) -> Iterator[tuple[str, str, Change]]:
    for phase, body, operation in _operations(program):
        if not isinstance(operation, (Wait, Signal, Put)):
            continue
        words = (operation.signal,) if isinstance(operation, Put) else operation.words
        if any(word is None or program.flag[word.flag].kind == "mailbox" for word in words):
            continue
        for shift in (-1, 1):
            value = Epoch(operation.value.stride, operation.value.offset + shift)
            off = partial(_with, program, phase, body, replace(operation, value=value))
            yield "epoch off by one", f"{operation.id} {shift:+d}", off


def _slots(program: Program) -> Iterator[tuple[str, str, Change]]:
    for buffer in program.buffers:
        if buffer.slots > 1:
            one = frozenset({buffer.name})
            yield "slots", f"{buffer.name} with one slot less", partial(_fewer, program, one)
            family = one.union(flag.name for flag in program.flags if flag.purpose != "own")
            family |= {other.name for other in program.buffers if in_slot(other)}
            what = f"{buffer.name} and its flags with one slot less"
            yield "slots", what, partial(_fewer, program, family)
    for flag in program.flags:
        fewer = partial(_fewer, program, frozenset({flag.name}))
        yield "slots", f"{flag.name} with one slot less", fewer


def _fewer(program: Program, names: frozenset[str]) -> Program:
    return replace(
        program,
        buffers=tuple(
            replace(one, slots=max(1, one.slots - 1)) if one.name in names else one
            for one in program.buffers
        ),
        flags=tuple(
            replace(one, slots=max(1, one.slots - 1)) if one.name in names else one
            for one in program.flags
        ),
    )


# ---- rows ----------------------------------------------------------------------------------------


def _rows(program: Program) -> Iterator[tuple[str, str, Change]]:
    for phase, body, operation in _operations(program):
        pair = _row_pair(operation)
        if pair is None:
            continue
        source, destination = pair
        for what, cut_source, cut_destination in (
            ("loses its first row", _first_off, _first_off),
            ("loses its last row", _last_off, _last_off),
            ("reads one row further down", _first_off, _last_off),
            ("writes one row further down", _last_off, _first_off),
        ):
            read = replace(source, rows=cut_source(program, source))
            written = replace(destination, rows=cut_destination(program, destination))
            if isinstance(operation, Gemm):
                changed: Operation = replace(operation, a=read, out=written)
            else:
                assert isinstance(operation, (Put, Copy))
                changed = replace(operation, source=read, destination=written)
            yield "rows", f"{operation.id} {what}", partial(_with, program, phase, body, changed)


def _row_pair(operation: Operation) -> tuple[View, View] | None:
    if isinstance(operation, Gemm):
        return operation.a, operation.out
    if isinstance(operation, (Put, Copy)):
        return operation.source, operation.destination
    return None


def _first_off(program: Program, view: View) -> Interval:
    if isinstance(view.rows, Block):
        return replace(view.rows, start=view.rows.start + 1)
    start, stop = _fixed(program, view)
    return Fixed(start + 1, stop)


def _last_off(program: Program, view: View) -> Interval:
    rows = program.buffer[view.buffer].rows
    if isinstance(view.rows, Block):
        stop = rows.block(program.world_size) if view.rows.stop is None else view.rows.stop
        return replace(view.rows, stop=stop - 1)
    start, stop = _fixed(program, view)
    return Fixed(start, stop - 1)


def _fixed(program: Program, view: View) -> tuple[int, int]:
    if isinstance(view.rows, Fixed):
        return view.rows.start, view.rows.stop
    assert view.rows == WHOLE
    return 0, program.buffer[view.buffer].rows.size
