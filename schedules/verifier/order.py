"""What must happen before what: the order that all runs have in common.

Event e *must* precede event x if x cannot be executed while e is held back.  That relation is the
greatest solution of ::

    must(x) = {x} + must(every event that x needs)
                  + what all sets of signals that could release x have in common

as dominators are in a graph whose nodes have needs and alternatives.  It is exact: a set of signals
from which e is missing is one that a run can release x by while e is held back.  An epoch wait has
each signal of a value that reaches the expected one as an alternative; a counter every set of adds
whose sum reaches the threshold; a mailbox none, since its signals and waits pair in their order.

What must precede x is, in every lane, a beginning of the lane.  So must(x) is one number a lane, a
vector clock, and union and common part are elementwise maximum and minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.schedules.verifier.play import play
from stretto.schedules.verifier.world import World

__all__ = ["Order"]

Clock = npt.NDArray[np.int32]


@dataclass
class _Gate:
    """One awaited word: the signals that count, the first of every lane that is enough, if any."""

    event: int
    word: int
    needed: int
    signals: list[int]


class Order:
    """The order that all runs have in common.

    Attributes
    ----------
    world, run, levels
        Of which events; the run that showed which can be executed; what words hold at first.
    signals_of
        Executed signals of every word, in the order of the run.
    """

    def __init__(self, world: World, levels: Sequence[int]) -> None:
        self.world, self.levels, self.run = world, levels, play(world, levels)
        self.signals_of: dict[int, list[int]] = {}
        for event in self.run.sequence:
            fired = world.fired.get(event)
            if fired is not None:
                self.signals_of.setdefault(fired[0], []).append(event)
        self._zero: Clock = np.zeros(len(world.lanes), np.int32)
        self._clock: list[Clock | None] = [None] * len(world.lane)
        self._gates = self._make_gates()
        self._pairs = self._make_pairs()
        while self._sweep():
            pass

    def before(self, earlier: int, later: int) -> bool:
        """Whether `earlier` is `later`, or must precede it."""
        world = self.world
        lane = world.lane[earlier]
        if lane == world.lane[later]:
            return world.place[earlier] <= world.place[later]
        clock = self._clock[later]
        return clock is not None and bool(clock[lane] >= world.place[earlier])

    @property
    def has_alternatives(self) -> bool:
        """Whether any wait can be released by more than one set of signals."""
        kinds, fired = self.world.flags.kind, self.world.fired
        return any(
            len(gate.signals) > 1
            and (
                kinds[gate.word] == "epoch"
                or sum(fired[signal][1] for signal in gate.signals) > gate.needed
            )
            for gates in self._gates.values()
            for gate in gates
        )

    def executed(self, event: int) -> bool:
        """Whether any run executes the event."""
        return self.run.rank_of[event] >= 0

    def precedes_without(self, earlier: int, later: int, pair: int) -> bool:
        """Whether `earlier` must precede what `later` needs, apart from the event `pair`."""
        world = self.world
        lane, place = world.lane[earlier], world.place[earlier]
        if lane == world.lane[later]:
            return place < world.place[later]
        sources = [*world.before[later], *self._pairs.get(later, ())]
        if later in world.meeting_of:
            sources += world.meetings[world.meeting_of[later]]
        if world.place[later] > 1:
            sources.append(world.events_of[world.lane[later]][world.place[later] - 2])
        for gate in self._gates.get(later, ()):
            sources += gate.signals if len(gate.signals) == 1 else []
        return any(self.before(earlier, source) for source in sources if source != pair)

    # ---- the greatest solution, from above ---------------------------------------------------

    def _make_gates(self) -> dict[int, list[_Gate]]:
        world = self.world
        gates: dict[int, list[_Gate]] = {}
        for event, awaited in world.awaited.items():
            if not self.executed(event):
                continue
            for word, expected in awaited:
                kind = world.flags.kind[word]
                needed = expected - self.levels[word]
                if kind == "mailbox" or needed <= 0:
                    continue
                signals = self.signals_of.get(word, [])
                if kind == "epoch":
                    signals = self._earliest(signals, expected)
                gates.setdefault(event, []).append(_Gate(event, word, needed, signals))
        return gates

    def _earliest(self, signals: Sequence[int], expected: int) -> list[int]:
        """Return the first signal of every lane whose value reaches `expected`."""
        world = self.world
        first: dict[int, int] = {}
        for event in signals:
            lane = world.lane[event]
            if world.fired[event][1] >= expected and (
                lane not in first or world.place[event] < world.place[first[lane]]
            ):
                first[lane] = event
        return list(first.values())

    def _make_pairs(self) -> dict[int, list[int]]:
        """Return, for mailboxes, which take needs which fill, and which fill which take."""
        run, pairs = self.run, dict[int, list[int]]()
        for word, fills in run.fills.items():
            takes = run.takes.get(word, [])
            ahead = self.levels[word]
            for place, fill in enumerate(fills):
                if place + ahead < len(takes):
                    pairs.setdefault(takes[place + ahead], []).append(fill)
                emptied = place + ahead - 1
                if 0 <= emptied < len(takes):
                    pairs.setdefault(fill, []).append(takes[emptied])
        return pairs

    def _sweep(self) -> bool:
        """Work out every clock from those known by now; return whether that has to be repeated."""
        world, clock = self.world, self._clock
        changed = False
        unsure: list[_Gate] = []
        for event in self.run.sequence:
            place = world.place[event]
            base = clock[world.events_of[world.lane[event]][place - 2]] if place > 1 else self._zero
            assert base is not None
            needs = [*world.before[event], *self._pairs.get(event, ())]
            if event in world.meeting_of:
                needs += world.meetings[world.meeting_of[event]]
            gates = self._gates.get(event, ())
            if not needs and not gates:
                clock[event] = base  # shared: the place in the own lane is kept apart
                continue
            new = base.copy()
            for need in needs:
                self._join(new, need)
            for gate in gates:
                known = [signal for signal in gate.signals if clock[signal] is not None]
                if len(known) < len(gate.signals):
                    unsure.append(gate)
                if len(known) == 1:
                    self._join(new, known[0])
                else:
                    np.maximum(new, self._common(gate, known), out=new)
            old = clock[event]
            if old is not None and not changed:
                changed = not np.array_equal(old, new)
            clock[event] = new
        return changed or any(self._matters(gate) for gate in unsure)

    def _join(self, clock: Clock, need: int) -> None:
        known = self._clock[need]
        assert known is not None
        np.maximum(clock, known, out=clock)
        lane, place = self.world.lane[need], self.world.place[need]
        if clock[lane] < place:
            clock[lane] = place

    def _common(self, gate: _Gate, signals: Sequence[int]) -> Clock:
        """Return what precedes in whichever way the signals release a wait."""
        rows = np.empty((len(signals), len(self._zero)), np.int32)
        for row, signal in zip(rows, signals, strict=True):
            row[:] = self._zero
            self._join(row, signal)
        if self.world.flags.kind[gate.word] == "epoch":
            least: Clock = rows.min(axis=0)
            return least
        # In every lane: the adds that need least of it, until they are enough.
        values = np.array([self.world.fired[signal][1] for signal in signals])
        order = np.argsort(rows, axis=0, kind="stable")
        sums = np.cumsum(values[order], axis=0)
        enough = np.argmax(sums >= gate.needed, axis=0)
        last = np.take_along_axis(order, enough[None, :], axis=0)
        reached: Clock = np.take_along_axis(rows, last, axis=0)[0]
        return reached

    def _matters(self, gate: _Gate) -> bool:
        """Whether a signal that was not known when the wait was looked at does not follow it."""
        after = self.run.rank_of[gate.event]
        return any(
            self.run.rank_of[signal] > after and not self.before(gate.event, signal)
            for signal in gate.signals
        )
