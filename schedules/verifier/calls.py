"""Which calls are looked at, and whether the first ones are like all others.

How many calls are enough
-------------------------
Calls differ in numbers alone: epochs grow with the call, slots rotate.  If words hold before the
first call what earlier calls would have left, then shifting everything by one call maps runs to
runs, and what must precede what in calls i and j must do so in calls i + 1 and j + 1.  Accesses of
different calls can only meet if these lie a multiple of the slot period p apart.  If those of calls
0 and p are ordered, so are those of i and i + p; and if a of call 0 precedes b of call p, it
precedes b of call 2 p, which comes later on the same stream.  So p + 1 calls decide over any number
of them: 3 for two slots.  For a sequence of Programs of c calls in all, the same Programs meet
again after l = lcm(p, c) calls, and c + l calls are enough.

Two things are not assumed but compared.  What words hold, wait by wait, between the first calls and
those l later (`is_uneven`): an initial value may let the first waits pass, strides may not fit.
Then calls far later are examined as well.  What operations read, between each of l calls and the
one c later (`Window.alike`): memory that lives on may bring forth a wrong number only after many
calls.  If reads are alike but for the execution, so are those of all later calls, since what they
read was written at most l calls before; if not, more calls are looked at.  If that does not help,
the verdict says that the proof covers no more than the calls that were examined.

Repeats of a phase beyond 2 p are cut to as many as leave slots alike, and no fewer than waits look
back; that the last of them read what those before them did is compared, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import lcm
from typing import NamedTuple

from stretto.schedules.language import Epoch, Program, ceil_div, require_shareable
from stretto.schedules.verifier.world import Turn, World

__all__ = ["Alike", "Window", "is_uneven", "levels_after", "window_of"]

_FAR = 2**20
"""How many periods later calls lie where the first ones are not typical, or others were called."""


class Alike(NamedTuple):
    """Two turns that should read the same, and how many executions lie between them."""

    turn: int
    later: int
    executions: int


@dataclass(frozen=True)
class Window:
    """The calls to look at.

    Attributes
    ----------
    programs, cut, sequence
        The distinct ones; the same with fewer repeats; their numbers in the order of execution.
    turns
        Whole executions of the sequence.
    period
        Calls after which every buffer and flag is back at the same slot.
    length
        Calls after which the same Programs meet in the same slots.
    alike
        What has to be compared for these calls to stand for all later ones.
    """

    programs: tuple[Program, ...]
    cut: tuple[Program, ...]
    sequence: tuple[int, ...]
    turns: tuple[Turn, ...]
    period: int
    length: int
    alike: tuple[Alike, ...]

    def far(self) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
        """Return the same turns very many calls later, and those just before them."""
        later = tuple(turn._replace(call=turn.call + _FAR * self.length) for turn in self.turns)
        before = [turn._replace(call=turn.call - self.length) for turn in later[: self.length]]
        return later, tuple(before)

    def apart(self, times: int, offset: int) -> tuple[Turn, ...]:
        """Return `times` executions of the sequence with very many calls of others before each.

        Parameters
        ----------
        times
            How often the sequence is executed.
        offset
            By how many slots executions stand otherwise to the one before.
        """
        turns: list[Turn] = []
        first = 0
        for execution, number in enumerate(self.sequence * times):
            first += _FAR * self.length + (offset if execution else 0)
            turns += _execution(self.cut[number], number, execution, first)
            first = turns[-1].call + 1
        return tuple(turns)


def window_of(
    programs: Sequence[Program], calls: int | None, *, alone: bool = False, many: int = 1
) -> Window:
    """Return the calls that decide over all calls of Programs that take turns.

    Parameters
    ----------
    programs
        In the order of execution, again and again.
    calls
        How many executions to look at, and no others; None for as many as are enough.
    alone
        Whether nobody else uses the workspace.
    many
        How many times l calls are looked at, and p repeats of a phase.

    Raises
    ------
    InvalidInput
        If they cannot share a workspace.
    """
    distinct = list({id(program): program for program in programs}.values())
    require_shareable(distinct, alone=alone)
    numbers = {id(program): number for number, program in enumerate(distinct)}
    sequence = tuple(numbers[id(program)] for program in programs)
    period = lcm(*(program.slot_period for program in distinct))
    cut = tuple(_cut(program, period, many) for program in distinct)
    cycle = sum(cut[number].calls for number in sequence)
    length = lcm(period, cycle)
    turns: list[Turn] = []
    times = 1 + many * length // cycle if calls is None else calls
    for execution, number in enumerate(sequence * times):
        turns += _execution(cut[number], number, execution, len(turns))
    alike: list[Alike] = []
    if calls is None:
        end = len(turns) - cycle
        alike += [Alike(n, n + cycle, len(sequence)) for n in range(end - length, end)]
        whole = {id(phase) for program in distinct for phase in program.phases}
        for (_, phase), run in groupby(range(end, len(turns)), lambda n: _phase(turns[n])):
            *_, last = run
            if phase not in whole:
                alike += [Alike(n, n + 1, 0) for n in range(last - period, last)]
    return Window(tuple(distinct), cut, sequence, tuple(turns), period, length, tuple(alike))


def _execution(program: Program, number: int, execution: int, first: int) -> list[Turn]:
    last = first + program.calls - 1
    return [
        Turn(call.number, number, call.phase, execution, call.number == first, call.number == last)
        for call in program.call_sequence(first)
    ]


def _phase(turn: Turn) -> tuple[int, int]:
    return turn.execution, id(turn.phase)


def _cut(program: Program, period: int, many: int) -> Program:
    """Return the Program with as few repeats of every phase as show all that more would.

    Calls that are left out move all later ones, and so their epochs, by a whole number of slot
    periods.  That changes nothing if every wait looks back or ahead by no more calls than are left
    of a phase (`_reach`); if it is not known how far waits look, nothing is left out.
    """
    reach = _reach(program)
    if reach is None:
        return program
    most = period * max(many, ceil_div(reach, period))
    phases = tuple(
        phase
        if phase.repeats <= 2 * most
        else replace(phase, repeats=most + 1 + (phase.repeats - most - 1) % period)
        for phase in program.phases
    )
    return program if phases == program.phases else replace(program, phases=phases)


def _reach(program: Program) -> int | None:
    """Return by how many calls waits and the signals of their flag are apart at most.

    None if that depends on the number of the call: values that grow unevenly, counters, initial
    values, waits that nothing signals.
    """
    signals: dict[str, set[Epoch]] = {}
    waits: dict[str, set[Epoch]] = {}
    for phase in program.phases:
        for body in phase.bodies:
            for operation in body.operations:
                for syncs, found in ((operation.signals(), signals), (operation.waits(), waits)):
                    for sync in syncs:
                        found.setdefault(sync.word.flag, set()).add(sync.value)
    farthest = 0
    for flag in program.flags:
        given, expected = signals.get(flag.name, set()), waits.get(flag.name, set())
        if flag.kind == "mailbox" or not expected:
            continue
        strides = {value.stride for value in (*given, *expected)}
        if flag.kind == "counter" or flag.initial or not given or len(strides) > 1:
            return None
        (stride,) = strides
        apart = max(abs(one.offset - other.offset) for one in given for other in expected)
        farthest = max(farthest, ceil_div(apart, stride))
    return farthest


# ---- do words stand as they would later? ---------------------------------------------------------


def is_uneven(world: World, length: int) -> bool:
    """Whether waits of the first calls stand otherwise to their signals than those much later."""
    steps: dict[str, int] = {}
    events = _events_by_place(world)
    for place, event in events.items():
        later = events.get((place[0] + length, *place[1:]))
        if later is None:
            continue
        for (word, value), (_, value_later) in zip(
            _syncs(world, event), _syncs(world, later), strict=True
        ):
            flag = world.flags.word(word).flag
            if world.flags.kind[word] == "epoch" and steps.setdefault(
                flag, value_later - value
            ) != (value_later - value):
                return True
    signals: dict[int, list[tuple[int, int]]] = {}
    for event, (word, value) in world.fired.items():
        signals.setdefault(word, []).append((world.sites[world.site[event]].turn, value))
    if _starts_otherwise(world, signals, steps, length):
        return True
    for place, event in events.items():
        later = events.get((place[0] + length, *place[1:]))
        if later is None or event not in world.awaited:
            continue
        for (word, value), (_, value_later) in zip(
            world.awaited[event], world.awaited[later], strict=True
        ):
            now = value - _level(world, signals, word, place[0])
            then = value_later - _level(world, signals, word, place[0] + length)
            kind = world.flags.kind[word]
            if (kind == "epoch" and (now <= 0) != (then <= 0)) or (
                kind == "counter" and now != then
            ):
                return True
    return False


def _starts_otherwise(
    world: World,
    signals: dict[int, list[tuple[int, int]]],
    steps: dict[str, int],
    length: int,
) -> bool:
    """Whether a wait passes by what a word holds at first, and would not by earlier calls."""
    for event, awaited in world.awaited.items():
        if world.sites[world.site[event]].turn >= length:
            continue
        for word, expected in awaited:
            step = steps.get(world.flags.word(word).flag)
            if step is None:  # not an epoch, or not seen twice
                continue
            left = [value - step for turn, value in signals.get(word, ()) if turn < length]
            passes = any(expected <= value for value in left)
            if passes != (expected <= world.flags.initial[word]):
                return True
    return False


def _events_by_place(world: World) -> dict[tuple[int, int, int, int], int]:
    """Return events of waits and signals by turn, rank, operation and place in the operation."""
    found = {}
    for event in (*world.fired, *world.awaited):
        number = world.site[event]
        site = world.sites[number]
        found[site.turn, site.rank, site.position, event - world.first[number]] = event
    return found


def _syncs(world: World, event: int) -> tuple[tuple[int, int], ...]:
    fired = world.fired.get(event)
    return world.awaited[event] if fired is None else (fired,)


def _level(world: World, signals: dict[int, list[tuple[int, int]]], word: int, turn: int) -> int:
    """Return what a word holds when all calls before `turn` are over."""
    earlier = [value for number, value in signals.get(word, ()) if number < turn]
    initial = world.flags.initial[word]
    if world.flags.kind[word] == "counter":
        return initial + sum(earlier)
    return max([initial, *earlier])


def levels_after(world: World, initial: Sequence[int]) -> list[int]:
    """Return what words hold after very many calls of which `world` has the last ones."""
    levels = list(initial)
    highest: dict[int, int] = {}
    for word, value in world.fired.values():
        kind = world.flags.kind[word]
        if kind == "epoch":
            levels[word] = highest[word] = max(value, highest.get(word, value))
        elif kind == "counter":
            levels[word] += value * _FAR
    return levels
