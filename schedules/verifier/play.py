"""One possible run: events are executed as far as they can go.

Which event goes first does not matter for how far that is: an event that can be executed stays so
until it is (words that only grow, queues that stay queues), with two exceptions that are looked for
apart (an epoch that is set back, a mailbox with two writers).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from stretto.schedules.verifier.world import World

__all__ = ["Blocked", "Run", "play"]


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why the next event of a lane cannot be executed.

    Attributes
    ----------
    event
        Which one.
    what
        ``event`` (it needs another), ``word`` (one that is not reached), ``full`` (a mailbox that
        nobody has emptied), ``meeting``, ``worker`` (a kernel's workers are all taken) or
        ``held``.
    key
        Number of the event, word or meeting, or of the kernel's crew.
    expected
        Of a word.
    """

    event: int
    what: str
    key: int
    expected: int = 0


@dataclass
class Run:
    """One run, as far as it goes.

    Attributes
    ----------
    sequence
        Executed events in their order.
    rank_of
        Place of every event in the sequence, -1 if it was not executed.
    fills, takes
        By mailbox word: events that filled and emptied it, in their order.
    blocked
        By lane: what stops it.
    levels
        What every word holds at the end (of an epoch: the highest value).
    """

    sequence: list[int] = field(default_factory=list)
    rank_of: list[int] = field(default_factory=list)
    fills: dict[int, list[int]] = field(default_factory=dict)
    takes: dict[int, list[int]] = field(default_factory=dict)
    blocked: dict[int, Blocked] = field(default_factory=dict)
    levels: list[int] = field(default_factory=list)


def play(
    world: World,
    levels: Sequence[int],
    *,
    held: Collection[int] = (),
    extra: Mapping[int, Sequence[int]] | None = None,
    workers: bool = False,
) -> Run:
    """Execute all that can be executed.

    Parameters
    ----------
    world, levels
        Of what, and what words hold at first.
    held
        Events that are held back.
    extra
        More events that an event needs.
    workers
        Whether a fused kernel takes only as many tiles at a time as it has workers.
    """
    return _Player(world, levels, frozenset(held), extra or {}, workers).run()


class _Player:
    def __init__(
        self,
        world: World,
        levels: Sequence[int],
        held: frozenset[int],
        extra: Mapping[int, Sequence[int]],
        workers: bool,
    ) -> None:
        self.world, self.held, self.extra = world, held, extra
        self.result = Run(rank_of=[-1] * len(world.lane), levels=list(levels))
        self.waiting: dict[tuple[str, int], list[int]] = {}
        self.next = [0] * len(world.lanes)
        self.arrived = [0] * len(world.meetings)
        self.needs_worker: dict[int, tuple[int, int]] = {}
        self.frees_worker: dict[int, int] = {}
        if workers:
            for crew, kernel in enumerate(world.crews):
                for group, (_, first, last) in enumerate(kernel.groups):
                    self.needs_worker[first] = (crew, group)
                    self.frees_worker[last] = crew
        self.meeting_at = {
            event: meeting for meeting, events in enumerate(world.meetings) for event in events
        }

    def run(self) -> Run:
        world, result = self.world, self.result
        sequence, rank_of = result.sequence, result.rank_of
        ready = list(range(len(world.lanes)))[::-1]
        while ready:
            lane = ready.pop()
            events = world.events_of[lane]
            place = self.next[lane]
            while place < len(events):
                event = events[place]
                blocked = self._blocked(event)
                if blocked is not None:
                    result.blocked[lane] = blocked
                    if blocked.what != "held":
                        what = "word" if blocked.what == "full" else blocked.what
                        self.waiting.setdefault((what, blocked.key), []).append(lane)
                    break
                result.blocked.pop(lane, None)
                rank_of[event] = len(sequence)
                sequence.append(event)
                place += 1
                self._execute(event, ready)
            self.next[lane] = place
        return result

    def _blocked(self, event: int) -> Blocked | None:
        world, rank_of = self.world, self.result.rank_of
        if event in self.held:
            return Blocked(event, "held", event)
        for earlier in world.before[event]:
            if rank_of[earlier] < 0:
                return Blocked(event, "event", earlier)
        for earlier in self.extra.get(event, ()):
            if rank_of[earlier] < 0:
                return Blocked(event, "event", earlier)
        for word, expected in world.awaited.get(event, ()):
            level = self.result.levels[word]
            mailbox = world.flags.kind[word] == "mailbox"
            if level == 0 if mailbox else level < expected:
                return Blocked(event, "word", word, expected)
        fired = world.fired.get(event)
        if (
            fired is not None
            and world.flags.kind[fired[0]] == "mailbox"
            and self.result.levels[fired[0]] != 0
        ):
            return Blocked(event, "full", fired[0])
        meeting = world.meeting_of.get(event)
        if meeting is not None and self.arrived[meeting] < world.world_size:
            return Blocked(event, "meeting", meeting)
        if event in self.needs_worker:
            crew, group = self.needs_worker[event]
            kernel = world.crews[crew]
            taken = sum(tiles for tiles, _, last in kernel.groups[:group] if rank_of[last] < 0)
            if taken >= kernel.workers:
                return Blocked(event, "worker", crew)
        return None

    def _execute(self, event: int, ready: list[int]) -> None:
        world, result = self.world, self.result
        self._wake("event", event, ready)
        for word, _ in world.awaited.get(event, ()):
            if world.flags.kind[word] == "mailbox":
                result.levels[word] = 0
                result.takes.setdefault(word, []).append(event)
                self._wake("word", word, ready)
        fired = world.fired.get(event)
        if fired is not None:
            word, value = fired
            kind = world.flags.kind[word]
            if kind == "epoch":
                result.levels[word] = max(result.levels[word], value)
            elif kind == "counter":
                result.levels[word] += value
            else:
                result.levels[word] = 1
                result.fills.setdefault(word, []).append(event)
            self._wake("word", word, ready)
        meeting = self.meeting_at.get(event)
        if meeting is not None:
            self.arrived[meeting] += 1
            self._wake("meeting", meeting, ready)
        if event in self.frees_worker:
            self._wake("worker", self.frees_worker[event], ready)

    def _wake(self, what: str, key: int, ready: list[int]) -> None:
        waiting = self.waiting.pop((what, key), None)
        if waiting:
            ready += waiting
