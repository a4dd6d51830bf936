"""An independent judge: every interleaving of a tiny Program, one state after the other.

Nothing here is shared with the verifier proper.  No order is worked out, no argument is made about
calls or alternatives: all states that can be reached are visited, and each is looked at.  That
takes time exponential in the number of streams, so it is for tests.  Buffers that Programs share
must have one shape, since it looks at elements and not at bytes.

A state is how far every stream has come, and what the flag words hold.  An operation is in progress
from the moment at which it may begin (to begin early only widens what can meet) until it is taken
to have ended; the data of a put to another rank are under way until the next signal of its stream.
Two operations in progress that touch the same element, one of them writing, are a race.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stretto.schedules.language import InvalidInput, Program, Word, cyclic_reached
from stretto.schedules.verifier.explorer_model import Cell, Model, Step, Touch, model_of

__all__ = ["Exploration", "explore"]


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was seen in all states.

    Attributes
    ----------
    problems
        ``race``, ``deadlock``, ``unwritten``, ``ambiguous_counter``, ``ambiguous_mailbox``,
        ``unawaited``.
    states
        How many were visited.
    complete
        Whether that was all of them.
    """

    problems: frozenset[str]
    states: int
    complete: bool


def explore(programs: Program | Sequence[Program], *, limit: int = 100_000) -> Exploration:
    """Visit every state of the given executions, one after another on one workspace.

    Parameters
    ----------
    programs
        In the order of execution; the same one may come again.
    limit
        Give up after so many states.
    """
    order = [programs] if isinstance(programs, Program) else list(programs)
    if not order:
        raise InvalidInput("There is no Program to explore; give at least one.")
    return _Explorer(model_of(order), order[0].world_size, limit).run()


# ---- every state ---------------------------------------------------------------------------------

_Positions = tuple[int, ...]
_Words = tuple[int, ...]


class _Explorer:
    def __init__(self, model: Model, world_size: int, limit: int) -> None:
        self.model, self.world_size, self.limit = model, world_size, limit
        self.names = list(model.initial)
        self.number = {word: place for place, word in enumerate(self.names)}
        self.fillers: dict[tuple[str, int, int], set[tuple[int, int]]] = {}
        self.problems: set[str] = set()
        self.comes: dict[object, list[tuple[int, int]]] = {}
        for lane, steps in enumerate(model.lanes):
            for place, step in enumerate(steps):
                if step.kind == "come":
                    self.comes.setdefault(step.meeting, []).append((lane, place))
        self.conflicts = self._conflicts()
        self.landing = [self._next_signal(*end) for end in model.kernels]
        self.flying = [list(self._flying(lane)) for lane in range(len(model.lanes))]

    def run(self) -> Exploration:
        """Visit all states, depth first."""
        start: _Positions = (0,) * len(self.model.lanes)
        words: _Words = tuple(self.model.initial[word] for word in self.names)
        seen = {(start, words)}
        zero = frozenset(
            cell
            for touch in self.model.touches
            for cell in touch.cells
            if cell[:2] in self.model.zeroed
        )
        todo: list[tuple[_Positions, _Words, frozenset[Cell]]] = [(start, words, zero)]
        while todo and len(seen) < self.limit:
            positions, words, written = todo.pop()
            self._look(positions)
            moved = False
            for lane, step in self._due(positions):
                after = self._words_after(positions, words, lane, step)
                if after is None:
                    continue
                moved = True
                held = self._written_after(written, step)
                following = (*positions[:lane], positions[lane] + 1, *positions[lane + 1 :])
                if (following, after) not in seen:
                    seen.add((following, after))
                    todo.append((following, after, held))
            if not moved:
                self._end(positions, words)
        if any(len(fillers) > 1 for fillers in self.fillers.values()):
            self.problems.add("ambiguous_mailbox")
        return Exploration(frozenset(self.problems), len(seen), not todo)

    # ---- one state ---------------------------------------------------------------------------

    def _due(self, positions: _Positions) -> Iterator[tuple[int, Step]]:
        """Yield the steps that nothing but a word can hold up."""
        for lane, steps in enumerate(self.model.lanes):
            if positions[lane] == len(steps):
                continue
            step = steps[positions[lane]]
            if any(positions[other] < count for other, count in step.needs):
                continue
            if step.kind == "leave":
                comes = self.comes[step.meeting]
                there = sum(positions[other] > place for other, place in comes)
                if there < self.world_size:
                    continue
            yield lane, step

    def _look(self, positions: _Positions) -> None:
        """Look for two accesses in progress that must not meet."""
        active = 0
        for lane, steps in enumerate(self.model.lanes):
            place = positions[lane]
            for touch in self.flying[lane][place]:
                if not self._landed(touch, positions):
                    active |= 1 << touch
            if place == len(steps):
                continue
            step = steps[place]
            if all(positions[other] >= count for other, count in step.needs):
                for touch in step.touches:
                    active |= 1 << touch
        rest = active
        while rest:
            lowest = rest & -rest
            rest ^= lowest
            if self.conflicts[lowest.bit_length() - 1] & active:
                self.problems.add("race")
                return

    def _landed(self, touch: int, positions: _Positions) -> bool:
        """Whether what a fused kernel left under way was ordered by its stream's next signal."""
        kernel = self.model.touches[touch].kernel
        if kernel is None:
            return False
        lane, place = self.landing[kernel]
        return positions[lane] > place

    def _words_after(
        self, positions: _Positions, words: _Words, lane: int, step: Step
    ) -> _Words | None:
        """Return what the words hold after a step, None if they do not let it be taken."""
        if not step.words:
            return words
        changed = list(words)
        for word, value in step.words:
            place, kind = self.number[word], self.model.kinds[word]
            held = words[place]
            if step.kind == "wait":
                if kind == "mailbox":
                    if held != 1:
                        return None
                    changed[place] = 0
                elif not cyclic_reached(held, value):
                    return None
            elif kind == "mailbox":
                if held != 0:
                    return None
                changed[place] = 1
            else:
                changed[place] = (value + (held if kind == "counter" else 0)) & 0xFFFFFFFF
        self._note(positions, words, lane, step)
        return tuple(changed)

    def _note(self, positions: _Positions, words: _Words, lane: int, step: Step) -> None:
        """Note what is open about a wait or signal that is about to be taken."""
        boxes = [word for word, _ in step.words if self.model.kinds[word] == "mailbox"]
        if len(boxes) > 1:
            self.problems.add("ambiguous_mailbox")
        for word, value in step.words:
            place = self.number[word]
            if self.model.kinds[word] == "mailbox":
                turn = self._times(positions, step.kind, word)
                key = (step.kind, place, turn)
                self.fillers.setdefault(key, set()).add((lane, positions[lane]))
            elif step.kind == "wait" and self.model.kinds[word] == "counter":
                exact = words[place] == value & 0xFFFFFFFF
                self.problems |= set() if exact else {"ambiguous_counter"}

    def _times(self, positions: _Positions, kind: str, word: Word) -> int:
        """Return how often a mailbox has been filled, or emptied, by now."""
        return sum(
            any(one == word for one, _ in step.words)
            for lane, steps in enumerate(self.model.lanes)
            for step in steps[: positions[lane]]
            if step.kind == kind
        )

    def _written_after(self, written: frozenset[Cell], step: Step) -> frozenset[Cell]:
        """Return which cells hold something after a step, and note a read of others."""
        if not step.touches:
            return written
        touches = [self.model.touches[number] for number in step.touches]
        for touch in touches:
            if touch.mode in ("read", "add") and not touch.cells <= written:
                self.problems.add("unwritten")
        for touch in touches:
            if touch.mode in ("write", "add"):
                written |= touch.cells
            elif touch.mode == "spoil":
                written -= touch.cells
        return written

    def _end(self, positions: _Positions, words: _Words) -> None:
        if any(
            place < len(steps) for place, steps in zip(positions, self.model.lanes, strict=True)
        ):
            self.problems.add("deadlock")
            return
        for place, word in enumerate(self.names):
            mailbox = self.model.kinds[word] == "mailbox"
            if mailbox and words[place] == 1 and self.model.initial[word] == 0:
                self.problems.add("unawaited")

    # ---- once --------------------------------------------------------------------------------

    def _conflicts(self) -> list[int]:
        """Return, for every access, those that must not be in progress at the same time."""
        touches = self.model.touches
        by_cell: dict[Cell, list[int]] = {}
        for number, touch in enumerate(touches):
            for cell in touch.cells:
                by_cell.setdefault(cell, []).append(number)
        conflicts = [0] * len(touches)
        for numbers in by_cell.values():
            for one in numbers:
                for other in numbers:
                    if self._disturb(touches[one], touches[other]):
                        conflicts[one] |= 1 << other
        return conflicts

    def _disturb(self, one: Touch, other: Touch) -> bool:
        if one.owner == other.owner:
            return False
        if one.mode == other.mode and one.mode in ("read", "add"):
            return False
        if one.meeting is not None and one.meeting == other.meeting:
            return False
        return not (one.is_put and other.is_put and one.lane == other.lane)

    def _flying(self, lane: int) -> Iterator[tuple[int, ...]]:
        """Yield, for every number of steps taken, what the lane has under way to other ranks."""
        under_way: list[int] = []
        yield ()
        for step in self.model.lanes[lane]:
            if step.kind == "set":
                under_way = [
                    one for one in under_way if self.model.touches[one].kernel != step.kernel
                ]
            for number in step.touches:
                touch = self.model.touches[number]
                away = any(cell[2] != self.model.ranks[lane] for cell in touch.cells)
                if touch.is_put and touch.mode != "read" and away:
                    under_way.append(number)
            yield tuple(under_way)

    def _next_signal(self, lane: int, place: int) -> tuple[int, int]:
        """Return the lane's first signal after a place, or where it would be beyond the end."""
        steps = self.model.lanes[lane]
        for later in range(place, len(steps)):
            if steps[later].kind == "set":
                return lane, later
        return lane, len(steps)
