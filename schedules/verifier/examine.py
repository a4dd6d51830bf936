"""All checks over one sequence of Programs: which calls are unrolled, and what is looked for.

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

That words hold what earlier calls would have left is not assumed but compared, wait by wait,
between the first calls and those l later.  If they differ (an initial value that lets the first
waits pass, strides that do not fit), calls far later are examined as well, and the verdict says
that the proof covers no more than these.  Repeats of a phase beyond 2 p are cut to as many as leave
slots alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from stretto.schedules.language import Capabilities, InvalidInput, Program
from stretto.schedules.verifier.conflicts import find_races
from stretto.schedules.verifier.contract import find_breaches
from stretto.schedules.verifier.lost import find_lost_signals
from stretto.schedules.verifier.meaning import find_wrong_numbers
from stretto.schedules.verifier.order import Order, order_of
from stretto.schedules.verifier.progress import (
    find_ambiguities,
    find_deadlock,
    find_mismatches,
    find_open_collectives,
    find_queue_deadlock,
    find_unawaited,
    find_worker_deadlock,
)
from stretto.schedules.verifier.report import Reporter
from stretto.schedules.verifier.residency import find_full_devices
from stretto.schedules.verifier.unroll import unroll
from stretto.schedules.verifier.world import Turn, World, signed

__all__ = ["Conditions", "Examination", "examine"]

_FAR = 2**20
"""How many periods later the calls lie that are examined where the first ones are not typical."""


@dataclass(frozen=True)
class Conditions:
    """Under which conditions Programs are examined; see `verify`."""

    calls: int | None = None
    alone: bool = False
    capabilities: Capabilities | None = None
    sms: int | None = None
    hardware_queues: int | None = None
    fresh_streams: bool = False
    pushed_collectives: bool = False


@dataclass(frozen=True)
class Examination:
    """What was found in one window of calls."""

    order: Order
    report: Reporter

    @property
    def world(self) -> World:
        """The events that were looked at."""
        return self.order.world

    @property
    def safe(self) -> bool:
        """Whether there is no error."""
        drafts = self.report.drafts.values()
        return not any(draft.finding.severity == "error" for draft in drafts)


def examine(
    programs: Sequence[Program], conditions: Conditions, *, quick: bool = False
) -> Examination:
    """Examine a sequence of Programs that take turns, again and again, on one workspace.

    With `quick`, stop at the first kind of error, and look for no advice.

    Raises
    ------
    InvalidInput
        If the Programs cannot share a workspace.
    """
    distinct = list({id(program): program for program in programs}.values())
    _check_shareable(distinct)
    numbers = {id(program): number for number, program in enumerate(distinct)}
    sequence = [numbers[id(program)] for program in programs]
    period = lcm(*(program.slot_period for program in distinct))
    turns = _turns(distinct, sequence, period, conditions.calls)
    world = _unrolled(distinct, turns, conditions)
    found = _look(world, world.flags.initial, conditions, quick)
    cycle = sum(1 for turn in turns if turn.execution < len(sequence))
    length = lcm(period, cycle)
    if not found.safe or conditions.calls is not None or not _uneven(world, length):
        return found
    later = [turn._replace(call=turn.call + _FAR * length) for turn in turns]
    before = [turn._replace(call=turn.call - length) for turn in later[:length]]
    levels = _levels_after(_unrolled(distinct, before, conditions), world.flags.initial)
    far = _look(_unrolled(distinct, later, conditions), levels, conditions, quick)
    if far.safe and not quick:
        last = turns[-1].call
        far.report.add(
            "uneven_values",
            "Flags do not start as earlier calls would leave them, or their values grow unevenly: "
            f"calls 0 to {last} and {later[0].call} to {later[-1].call} were examined, others "
            "need not be like them.",
            severity="advice",
        )
    return far


def _look(world: World, levels: Sequence[int], conditions: Conditions, quick: bool) -> Examination:
    """Run all checks."""
    report = Reporter(world)
    find_mismatches(world, report)
    order = order_of(world, levels)
    found = Examination(order, report)
    if report.drafts:
        return found
    find_deadlock(order, report)
    if quick and not found.safe:
        return found
    find_races(order, report)
    if quick and not found.safe:
        return found
    find_lost_signals(order, report)
    find_ambiguities(order, report)
    find_worker_deadlock(order, report)
    if conditions.sms is not None:
        find_full_devices(order, report, sms=conditions.sms, capabilities=conditions.capabilities)
    if not conditions.alone and not order.run.blocked:
        find_breaches(order, report)
    if quick and not found.safe:
        return found
    raced = {
        site
        for draft in report.drafts.values()
        if draft.finding.kind in ("race", "reuse")
        for site in draft.open
    }
    find_wrong_numbers(order, report, raced)
    find_unawaited(order, report)
    find_open_collectives(order, report)
    if not quick or conditions.hardware_queues is not None:
        find_queue_deadlock(order, report, queues=conditions.hardware_queues)
    return found


def _unrolled(programs: Sequence[Program], turns: Sequence[Turn], conditions: Conditions) -> World:
    capabilities = conditions.capabilities
    return unroll(
        programs,
        turns,
        fresh_streams=conditions.fresh_streams,
        pushed_collectives=conditions.pushed_collectives,
        signal_orders_puts=capabilities is None or capabilities.signal_orders_puts,
    )


# ---- which calls ---------------------------------------------------------------------------------


def _turns(
    programs: Sequence[Program], sequence: Sequence[int], period: int, calls: int | None
) -> list[Turn]:
    """Return the calls to look at: whole executions of the sequence, as many as are enough."""
    programs = [_cut(program, period) for program in programs]
    cycle = sum(programs[number].calls for number in sequence)
    enough = cycle + lcm(period, cycle) if calls is None else calls * cycle
    turns: list[Turn] = []
    execution = 0
    while len(turns) < enough:
        for number in sequence:
            program, first = programs[number], len(turns)
            turns += [
                Turn(
                    call.number,
                    number,
                    call.phase,
                    execution,
                    call.number == first,
                    call.number == first + program.calls - 1,
                )
                for call in program.call_sequence(first)
            ]
            execution += 1
            if len(turns) >= enough and calls is None:
                break
    return turns


def _cut(program: Program, period: int) -> Program:
    """Return the Program with as few repeats of every phase as show all that more would."""
    phases = tuple(
        phase
        if phase.repeats <= 2 * period
        else replace(phase, repeats=period + 1 + (phase.repeats - period - 1) % period)
        for phase in program.phases
    )
    return program if phases == program.phases else replace(program, phases=phases)


def _check_shareable(programs: Sequence[Program]) -> None:
    if len({program.world_size for program in programs}) != 1:
        raise InvalidInput("Programs on one workspace must have one world size.")
    known: dict[str, tuple[int, str]] = {}
    for program in programs:
        for buffer in program.buffers:
            shared = buffer.kind == "symmetric" and buffer.role == "workspace"
            now = (buffer.slots, buffer.initial)
            if shared and known.setdefault(buffer.name, now) != now:
                raise InvalidInput(
                    f"Programs on one workspace give buffer {buffer.name!r} different numbers of "
                    "slots or different initial states."
                )


# ---- are the first calls like all others? --------------------------------------------------------


def _uneven(world: World, length: int) -> bool:
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


def _levels_after(world: World, initial: Sequence[int]) -> list[int]:
    """Return what words hold after very many calls of which `world` has the last ones."""
    levels = list(initial)
    highest: dict[int, int] = {}
    for word, value in world.fired.values():
        kind = world.flags.kind[word]
        if kind == "epoch":
            levels[word] = highest[word] = max(value, highest.get(word, value))
        elif kind == "counter":
            levels[word] = signed(levels[word] + value * _FAR)
    return levels
