"""All checks over one sequence of Programs, in the windows of calls that decide (`calls`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stretto.schedules.language import Capabilities, Program
from stretto.schedules.verifier.calls import Alike, Window, is_uneven, levels_after, window_of
from stretto.schedules.verifier.collectives import find_mismatches, find_open_collectives
from stretto.schedules.verifier.company import find_foreign_reads, find_foreign_words
from stretto.schedules.verifier.conflicts import find_races
from stretto.schedules.verifier.contract import find_breaches
from stretto.schedules.verifier.lost import find_lost_signals
from stretto.schedules.verifier.meaning import find_wrong_numbers
from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.progress import (
    find_deadlock,
    find_queue_deadlock,
    find_worker_deadlock,
)
from stretto.schedules.verifier.report import Reporter
from stretto.schedules.verifier.residency import find_full_devices
from stretto.schedules.verifier.sharing import granted, own_storages, owns_flags, owns_memory
from stretto.schedules.verifier.signals import find_ambiguities, find_unawaited
from stretto.schedules.verifier.unroll import unroll
from stretto.schedules.verifier.world import Turn, World

__all__ = ["Conditions", "Examination", "examine"]

_MOST = 8
"""How many times the usual number of calls is looked at before memory is said not to settle."""


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
    """What was found in one window of calls.

    Attributes
    ----------
    order, report
        The order of its events; the findings.
    settled
        Whether operations read in it what they will in all later calls.
    covers
        For how many executions, from the first one on, the findings stand; None for any number.
    """

    order: Order
    report: Reporter
    settled: bool = True
    covers: int | None = None

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
    many = 1
    window = window_of(programs, conditions.calls, alone=conditions.alone)
    found = _first_calls(window, conditions, quick)
    while found.safe and not found.settled and many < _MOST:
        many *= 2
        window = window_of(programs, None, alone=conditions.alone, many=many)
        found = _first_calls(window, conditions, quick)
    if not found.safe or conditions.calls is not None:
        return replace(found, covers=conditions.calls)
    if not conditions.alone:
        apart = _calls_apart(window, conditions)
        if apart is not None:
            return apart
        if len(window.programs) > 1:
            other = _other_slots(programs, window, conditions, quick)
            if not other.safe:
                return other
    last = window.turns[-1].call
    examined = 1 + window.turns[-1].execution
    if is_uneven(found.world, window.length):
        later, before = window.far()
        initial = found.world.flags.initial
        levels = levels_after(_unrolled(window, before, conditions), initial)
        found = _look(_unrolled(window, later, conditions), levels, (), conditions, quick)
        _advise(
            found,
            "Flags do not start as earlier calls would leave them, or their values grow unevenly: "
            f"calls 0 to {last} and {later[0].call} to {later[-1].call} were examined, others "
            "need not be like them.",
        )
        return replace(found, covers=examined)
    if not found.settled:
        _advise(
            found,
            "What operations read in a call still differs from what they read in the calls before: "
            f"calls 0 to {last} were examined, others may compute something else.",
        )
        return replace(found, covers=examined)
    return found


def _other_slots(
    programs: Sequence[Program], window: Window, conditions: Conditions, quick: bool
) -> Examination:
    """Look at the Programs when they meet in slots in which their given order never lets them."""
    repeated = [program for program in programs for _ in range(window.period)]
    return _first_calls(window_of(repeated, None), conditions, quick)


def _first_calls(window: Window, conditions: Conditions, quick: bool) -> Examination:
    world = _unrolled(window, window.turns, conditions)
    return _look(world, world.flags.initial, window.alike, conditions, quick)


def _calls_apart(window: Window, conditions: Conditions) -> Examination | None:
    """Look for what fails if others are called before each execution; None if nothing does."""
    owned = any(owns_memory(program) for program in window.programs)
    twice = owned or any(owns_flags(program) for program in window.programs)
    for offset in range(window.period if twice else 1):
        turns = window.apart(2 if twice else 1, offset)
        world = granted(_unrolled(window, turns, conditions))
        report = Reporter(world)
        order = Order(world, world.flags.initial)
        find_deadlock(order, report, apart=True)
        if twice and not report.drafts:
            find_lost_signals(order, report)
        if owned:
            find_races(order, report, within=own_storages(world))
        if report.drafts:
            return Examination(order, report)
    return None


def _look(
    world: World,
    levels: Sequence[int],
    alike: Sequence[Alike],
    conditions: Conditions,
    quick: bool,
) -> Examination:
    """Run all checks."""
    report = Reporter(world)
    find_mismatches(world, report)
    order = Order(world, levels)
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
    settled = find_wrong_numbers(order, report, raced, alike)
    if not conditions.alone and not report.drafts:
        find_foreign_words(order, report)
        find_foreign_reads(order, report)
    find_unawaited(order, report)
    find_open_collectives(order, report)
    if not quick or conditions.hardware_queues is not None:
        find_queue_deadlock(order, report, queues=conditions.hardware_queues)
    return Examination(order, report, settled)


def _unrolled(window: Window, turns: Sequence[Turn], conditions: Conditions) -> World:
    capabilities = conditions.capabilities
    return unroll(
        window.programs,
        turns,
        fresh_streams=conditions.fresh_streams,
        pushed_collectives=conditions.pushed_collectives,
        signal_orders_puts=capabilities is None or capabilities.signal_orders_puts,
    )


def _advise(found: Examination, message: str) -> None:
    if found.safe:
        found.report.add("uneven_values", message, severity="advice")
