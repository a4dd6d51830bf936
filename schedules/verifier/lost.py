"""Epochs that are set back before a wait has seen them, which then waits for ever.

An epoch is set, not raised: if a signal of a lower value may come after one that a wait is for, a
wait that looks late finds the lower one.  It is *exposed*.  That does no harm if a signal that is
high enough is bound to come after every low one.  What is bound to come is what is executed while
all exposed waits are held back; a wait that is thereby known to pass is exposed no longer, and so
on.

What is left may still be rescued by signals that wait for others of their kind.  So waits are
looked for that can hang together: each finds a low signal last, and every higher one that would
come after that is behind another of them.  Where a signal can be held up by several waits together
and by none of them alone (waits that have alternatives), sets are tried one after the other, and
if there are too many, what is left is reported as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.play import play
from stretto.schedules.verifier.report import Reporter

__all__ = ["find_lost_signals"]

_MOST_EVENTS, _MOST_STEPS, _MOST_PLAYS = 400_000, 20_000, 300
"""How long is searched before what is left is reported as it is."""


@dataclass(frozen=True, slots=True)
class _Exposed:
    """A wait, its word and value, and the signals that may set the word below the value."""

    wait: int
    word: int
    expected: int
    low: tuple[int, ...]
    high: tuple[int, ...]


def find_lost_signals(order: Order, report: Reporter) -> None:
    """Report waits that hang if they look late: the epoch has been set back by then."""
    exposed = list(_exposed(order))
    while exposed:
        run = play(order.world, order.levels, held=[one.wait for one in exposed])
        bound = run.rank_of
        left = [
            one
            for one in exposed
            if not all(
                any(bound[high] >= 0 and order.before(low, high) for high in one.high)
                for low in one.low
            )
        ]
        if len(left) == len(exposed):
            break
        exposed = left
    found = _Search(order, exposed).hanging()
    for one, low in [(one, one.low[-1]) for one in exposed] if found is None else found:
        _report(order, report, one, low)


def _exposed(order: Order) -> Iterator[_Exposed]:
    world = order.world
    for event, awaited in world.awaited.items():
        if not order.executed(event):
            continue
        for word, expected in awaited:
            if world.flags.kind[word] != "epoch":
                continue
            signals = order.signals_of.get(word, ())
            low = tuple(
                signal
                for signal in signals
                if world.fired[signal][1] < expected and not order.before(event, signal)
            )
            high = tuple(signal for signal in signals if world.fired[signal][1] >= expected)
            if low and (
                order.levels[word] >= expected
                or any(not order.before(one, other) for one in low for other in high)
            ):
                yield _Exposed(event, word, expected, low, high)


_Choice = tuple[_Exposed, int]
"""A wait, and the low signal that comes last."""


class _Search:
    """Looks for waits that can hang together, at most one in a lane: others are not reached."""

    def __init__(self, order: Order, exposed: Sequence[_Exposed]) -> None:
        self.order, self.world = order, order.world
        self.choices = [(one, low) for one in exposed for low in one.low]
        self.steps = self.plays = 0

    def hanging(self) -> Sequence[_Choice] | None:
        """Return waits that hang together, nothing if there are none, None if it is too much."""
        if self.order.has_alternatives:
            return self._any_set()
        for choice in self.choices:
            found = self._completed([choice])
            if found:
                return found
            if self._too_long:
                return None
        return ()

    @property
    def _too_long(self) -> bool:
        return self.steps > _MOST_STEPS or self.plays > _MOST_PLAYS

    def _completed(self, chosen: list[_Choice]) -> list[_Choice]:
        """Return a set that hangs and contains what is chosen, nothing if there is none."""
        self.steps += 1
        if self._too_long:
            return []
        rescue = self._rescue(chosen)
        if rescue is None:
            return chosen if self._all_last(chosen) else []
        lanes = {self.world.lane[one.wait] for one, _ in chosen}
        for one, low in self.choices:
            if self.world.lane[one.wait] in lanes or not self.order.before(one.wait, rescue):
                continue
            if any(self.order.before(one.wait, other) for _, other in chosen):
                continue
            if any(other.word == one.word and last != low for other, last in chosen):
                continue
            if any(self.order.before(other.wait, low) for other, _ in chosen):
                continue
            found = self._completed([*chosen, (one, low)])
            if found:
                return found
        return []

    def _rescue(self, chosen: Sequence[_Choice]) -> int | None:
        """Return a signal that is bound to come after one of the low ones, and is high enough."""
        before = self.order.before
        for one, low in chosen:
            for high in one.high:
                if before(low, high) and not any(before(held.wait, high) for held, _ in chosen):
                    return high
        return None

    def _any_set(self) -> Sequence[_Choice] | None:
        """Try all sets of waits, the smallest first."""
        by_lane: dict[int, dict[int, None]] = {}
        for one, _ in self.choices:
            by_lane.setdefault(self.world.lane[one.wait], {})[one.wait] = None
        options: list[list[int | None]] = [[None, *waits] for waits in by_lane.values()]
        if prod(len(waits) for waits in options) * len(self.world.lane) > _MOST_EVENTS:
            return None
        sets = [[wait for wait in held if wait is not None] for held in product(*options)]
        for held in sorted(filter(None, sets), key=len):
            possible = play(self.world, self.order.levels, held=held).rank_of
            last = [self._may_be_last(wait, possible) for wait in held]
            for chosen in product(*last):
                if self._all_last(chosen):
                    return chosen
                if self._too_long:
                    return None
        return ()

    def _may_be_last(self, wait: int, possible: Sequence[int]) -> list[_Choice]:
        """Return low signals of a wait that none of those that happen must come after."""
        return [
            (one, low)
            for one, low in self.choices
            if one.wait == wait
            and possible[low] >= 0
            and not any(possible[high] >= 0 and self.order.before(low, high) for high in one.high)
        ]

    def _all_last(self, chosen: Sequence[_Choice]) -> bool:
        """Whether each low signal may be the last of its word while the waits are held back."""
        self.plays += 1
        order, waits = self.order, [one.wait for one, _ in chosen]
        last_of = {one.word: low for one, low in chosen}
        if any(last_of[one.word] != low for one, low in chosen):
            return False  # a word has one last signal
        possible = play(order.world, order.levels, held=waits).rank_of
        if any(possible[low] < 0 for low in last_of.values()):
            return False
        left = dict(last_of)
        while left:
            done = play(order.world, order.levels, held=[*waits, *left.values()]).rank_of
            ready = [
                word
                for word, low in left.items()
                if all(
                    signal == low or possible[signal] < 0 or done[signal] >= 0
                    for signal in order.signals_of.get(word, ())
                )
            ]
            if not ready:
                return False
            for word in ready:
                del left[word]
        return True


def _report(order: Order, report: Reporter, one: _Exposed, low: int) -> None:
    world = order.world
    waits, signals = world.site[one.wait], world.site[low]
    report.add(
        "lost_signal",
        f"{report.full(signals)} may set {report.word(one.word)} back to {world.fired[low][1]} "
        f"before {report.full(waits)} has seen it reach {one.expected}: that then waits for ever.",
        missing=f"nothing orders {report.full(signals)} before the signal that releases "
        f"{report.full(waits)}",
        places=(report.place(signals, "signal"), report.place(waits, "wait")),
        goals=(low, one.wait),
        held=(one.wait,),
        open=(waits,),
    )
