"""The timed engine: one simpy process for every stream of every rank.

A stream's process keeps its own clock, which may run ahead of simulated time: an operation that
nothing can disturb, whose dependencies' ends are known, needs no event at all.  The process comes
back to simulated time only where it must: to wait for an end or a signal that is not known yet, and
to start something whose rate depends on what else runs then (`Fluid`).  Flags are lists of
(value, time); a wait that finds its value is over at once, one that does not leaves an event.

A GEMM that starts beside a wait that polls on a multiprocessor takes a wave more (`_polls`).

What is modelled: the host's enqueue of every operation (it runs ahead, or falls behind), FIFO
streams, events between streams, copy-engine queues, shared links, interference, collectives that
start when the last rank has come, the latency of signals and waits, and the caller's stream.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import simpy

from stretto.schedules.language import Call, Deadlock, Program, cyclic_reached
from stretto.sim.engine.fluid import Activity, Fluid
from stretto.sim.engine.plan import Plan, RankPlan, Step, SyncStep
from stretto.sim.machine import Machine, TransportModel

__all__ = ["Engine", "Skew"]

Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class Skew:
    """What makes ranks differ in time.

    Attributes
    ----------
    delay_us
        By rank: how long after the others its caller enters the first call.
    slowdown
        By rank: factor on its compute (1.1 is 10 % slower).
    jitter
        Relative standard deviation of every duration.
    seed
        Of the jitter.
    """

    delay_us: Mapping[int, float] = field(default_factory=dict)
    slowdown: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0

    @property
    def none(self) -> bool:
        """Whether all ranks are equal."""
        return not self.delay_us and not self.slowdown and not self.jitter


class _Word:
    """One flag word: what was written when, and who waits."""

    __slots__ = ("emptied", "value", "waiting", "written")

    def __init__(self, initial: int) -> None:
        self.value = initial
        self.written: list[tuple[int, float]] = [(initial, 0.0)]
        self.waiting: list[tuple[int, simpy.Event]] = []
        self.emptied: list[simpy.Event] = []

    def reached(self, expected: int) -> float | None:
        """Return when the word first reached `expected`, if it has."""
        found = None
        for value, time in reversed(self.written):
            if not cyclic_reached(value, expected):
                break
            found = time
        return found

    def write(self, value: int, time: float) -> None:
        """Set the word and let go who waited for that."""
        self.value = value
        self.written.append((value, time))
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            for expected, event in waiting:
                if cyclic_reached(value, expected):
                    event.succeed(time)
                else:
                    self.waiting.append((expected, event))

    def empty(self, time: float) -> None:
        """Take what is in a mailbox, and let its next sender go on."""
        self.value = 0
        self.written = [(0, time)]
        if self.emptied:
            self.emptied.pop(0).succeed()


@dataclass(slots=True, eq=False)
class _Poll:
    """A wait that holds a multiprocessor: of which call, on which stream, from when to when."""

    call: int
    stream: str
    start: float
    end: float | None = None


class _Rank:
    """State of one rank: ends of its operations, and what runs on it now."""

    __slots__ = (
        "collectives",
        "ends",
        "engines",
        "gemms",
        "polls",
        "pushes",
        "queue",
        "starts",
        "waiting",
    )

    def __init__(self, copy_queues: int) -> None:
        self.starts: list[list[float]] = []
        self.ends: list[list[float | None]] = []
        self.waiting: dict[tuple[int, int], list[simpy.Event]] = {}
        self.engines = copy_queues
        self.queue: deque[simpy.Event] = deque()
        self.pushes = 0
        self.collectives = 0
        self.gemms: dict[Activity, None] = {}
        self.polls: list[_Poll] = []


class Engine:
    """One execution of a plan.

    Parameters
    ----------
    program, plan, machine, transport
        What runs where.
    mode
        ``eager`` (the host enqueues every operation) or ``graph``.
    skew
        Differences between ranks.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        machine: Machine,
        transport: TransportModel,
        *,
        mode: str,
        skew: Skew,
    ) -> None:
        self.program, self.plan, self.machine, self.transport = program, plan, machine, transport
        self.mode, self.skew = mode, skew
        self.env = simpy.Environment()
        self.fluid = Fluid(self.env)
        self.calls = list(program.call_sequence())
        self.plans: list[dict[int, RankPlan]] = []
        for phase, ranks in zip(program.phases, plan.phases, strict=True):
            self.plans += [ranks] * phase.repeats
        self.ranks = {rank: _Rank(transport.copy_queues) for rank in plan.ranks}
        self.words: dict[tuple[str, int, int, int], _Word] = {}
        self.meetings: dict[tuple[int, int], _Meeting] = {}
        self.stuck: dict[tuple[int, str], str] = {}
        self.random = {rank: random.Random(f"{skew.seed}/{rank}") for rank in plan.ranks}
        self.penalty = transport.gemm_slowdown_beside_put
        self.collective_penalty = (
            transport.gemm_slowdown_beside_collective if plan.collectives_beside_compute else 0.0
        )
        self.waves_lost = transport.gemm_waves_beside_wait
        self.enqueue_us = machine.host.enqueue_us("eager") if mode == "eager" else 0.0
        self.call_us = machine.host.call_us(mode)
        self.handover_us = machine.host.handover_us

    def run(self) -> None:
        """Simulate to the end.

        Raises
        ------
        Deadlock
            If streams are left that can never go on; the message names each.
        """
        for rank, state in self.ranks.items():
            for number in range(len(self.calls)):
                count = self.plans[number][rank].count
                state.starts.append([0.0] * count)
                state.ends.append([None] * count)
            streams = dict.fromkeys(
                stream for ranks in self.plans for stream in ranks[rank].streams
            )
            for stream in streams:
                self.env.process(self._stream(rank, stream))
        self.env.run()
        if self.stuck:
            roots = [text for text in self.stuck.values() if text]
            raise Deadlock("No operation can make progress: " + "; ".join(roots) + ".")

    # ---- one stream --------------------------------------------------------------------------

    def _stream(self, rank: int, stream: str) -> Process:
        state = self.ranks[rank]
        clock = self.skew.delay_us.get(rank, 0.0)
        host = clock
        self.stuck[(rank, stream)] = ""
        for number, call in enumerate(self.calls):
            plan = self.plans[number][rank]
            host += self.call_us
            ends, starts = state.ends[number], state.starts[number]
            for step in plan.streams.get(stream, ()):
                clock = self._handed(clock, host + self.enqueue_us * (step.index + 1))
                for earlier in step.after:
                    end = ends[earlier]
                    if end is None:
                        end = yield self._end_of(rank, number, earlier)
                    clock = self._handed(clock, end)
                if step.entry and number:
                    for back, earlier in self._entry(rank, number):
                        end = state.ends[back][earlier]
                        if end is None:
                            end = yield self._end_of(rank, back, earlier)
                        clock = self._handed(clock, end)
                starts[step.index] = clock
                poll = None
                if step.polls and self.waves_lost:
                    poll = _Poll(number, stream, clock)
                    state.polls.append(poll)
                for sync in step.waits:
                    word = self._word(sync, call)
                    expected = sync.stride * call.number + sync.offset
                    when = word.reached(expected)
                    if when is None:
                        event = self.env.event()
                        word.waiting.append((expected, event))
                        self.stuck[(rank, stream)] = _stuck(
                            rank, stream, step, sync, expected, word
                        )
                        when = yield event
                        self.stuck[(rank, stream)] = ""
                    clock = max(clock, when)
                    if sync.kind == "mailbox":
                        yield from self._until(clock)
                        word.empty(clock)
                if poll is not None:
                    poll.end = clock
                if step.activity == "none":
                    clock += self._jittered(step.alone_us, rank)
                elif step.activity == "collective":
                    clock = yield from self._collective(rank, stream, call, step, clock)
                elif step.disturbed:
                    clock = yield from self._shared(step, rank, number, stream, clock)
                else:
                    clock += self._duration(step, rank)
                if step.tail_us:
                    clock += self._jittered(step.tail_us, rank)
                if step.signals:
                    yield from self._signal(step, call, clock)
                ends[step.index] = clock
                for event in state.waiting.pop((number, step.index), ()):
                    event.succeed(clock)
            host += self.enqueue_us * plan.count
        del self.stuck[(rank, stream)]

    def _handed(self, clock: float, moment: float) -> float:
        """Return when a stream goes on that is ready at `clock` and let go at `moment`."""
        return clock if moment <= clock else moment + self.handover_us

    def _until(self, time: float) -> Process:
        """Come back to simulated time."""
        if time > self.env.now:
            yield self.env.timeout(time - self.env.now)

    def _end_of(self, rank: int, number: int, index: int) -> simpy.Event:
        event = self.env.event()
        self.ranks[rank].waiting.setdefault((number, index), []).append(event)
        return event

    def _entry(self, rank: int, number: int) -> list[tuple[int, int]]:
        """Return the operations that end the caller's stream before call `number`."""
        found: list[tuple[int, int]] = []
        for back in range(number - 1, -1, -1):
            plan = self.plans[back][rank]
            found += [(back, index) for index in plan.exits]
            if plan.last_of_caller is not None:
                found.append((back, plan.last_of_caller))
                break
        return found

    # ---- durations ---------------------------------------------------------------------------

    def _jittered(self, time: float, rank: int) -> float:
        if not self.skew.jitter:
            return time
        return time * max(0.0, self.random[rank].gauss(1.0, self.skew.jitter))

    def _duration(self, step: Step, rank: int) -> float:
        time = step.alone_us
        if step.activity == "compute":
            time *= self.skew.slowdown.get(rank, 1.0)
        return self._jittered(time, rank)

    # ---- what shares -------------------------------------------------------------------------

    def _shared(
        self, step: Step, rank: int, number: int, stream: str, clock: float
    ) -> Generator[simpy.Event, Any, float]:
        """Run a step whose rate depends on what else runs; return its end."""
        yield from self._until(clock)
        state = self.ranks[rank]
        is_put = step.activity == "put"
        if is_put:
            if not state.engines:
                event = self.env.event()
                state.queue.append(event)
                yield event
            state.engines -= 1
        work = self._duration(step, rank)
        latency = 0.0
        touched = self._touched(step, rank)
        if is_put:
            self._disturb(touched, "pushes", +1)
            if step.uses:
                latency = min(self.transport.put_latency_us, work)
                yield self.env.timeout(latency)
        activity = Activity(work - latency, step.uses, self.env.event())
        polls: list[_Poll] = []
        begun = self.env.now
        if step.kind == "gemm":
            if self.waves_lost:
                yield self.env.timeout(0)  # who begins to poll at this very moment has come first
                polls = self._polls(state, number, stream)
            activity.factor = self._factor(state)
            state.gemms[activity] = None
        self.fluid.start(activity)
        end: float = yield activity.done
        if is_put:
            self._disturb(touched, "pushes", -1)
            state.engines += 1
            if state.queue:
                state.queue.popleft().succeed()
        else:
            state.gemms.pop(activity, None)
        if polls:
            lost = self.waves_lost * step.wave_us * work / step.alone_us
            held = max((self.env.now if poll.end is None else poll.end) - begun for poll in polls)
            yield self.env.timeout(min(lost, held))
            end = self.env.now
        return end

    def _polls(self, state: _Rank, number: int, stream: str) -> list[_Poll]:
        """Return the waits of a call that hold a multiprocessor now, on other streams.

        A GEMM that starts beside one lacks a multiprocessor: tiles that it would have had are left
        to the end, and take a wave more, or until the wait is over if that is sooner.  Waits of
        later calls do not poll yet, since a call's streams fork from the caller's at its beginning.
        """
        now = self.env.now
        state.polls = [poll for poll in state.polls if poll.end is None or poll.end > now]
        return [
            poll
            for poll in state.polls
            if poll.call == number and poll.stream != stream and poll.start <= now
        ]

    def _touched(self, step: Step, rank: int) -> list[_Rank]:
        """Return the ranks whose GEMMs a put disturbs: who sends and who receives."""
        peer = rank if self.plan.folded or step.peer is None else step.peer
        ranks = {rank: None, peer: None} if peer in self.ranks else {rank: None}
        return [self.ranks[one] for one in ranks]

    def _disturb(self, ranks: list[_Rank], what: str, change: int) -> None:
        """Count one more or one less push or collective beside the GEMMs of `ranks`."""
        for state in ranks:
            before = self._factor(state)
            setattr(state, what, getattr(state, what) + change)
            after = self._factor(state)
            if after != before:
                for activity in state.gemms:
                    self.fluid.set_factor(activity, after)

    def _factor(self, state: _Rank) -> float:
        """Return the rate of a GEMM beside what runs on the rank now."""
        slowdown = self.penalty if state.pushes else 0.0
        if state.collectives:
            slowdown += self.collective_penalty
        return 1.0 / (1.0 + slowdown)

    def _collective(
        self, rank: int, stream: str, call: Call, step: Step, clock: float
    ) -> Generator[simpy.Event, Any, float]:
        """Meet all other ranks, then take the collective's time together."""
        yield from self._until(clock)
        key = (call.number, step.index)
        meeting = self.meetings.setdefault(key, _Meeting(self.env.event()))
        meeting.come += 1
        if meeting.come == len(self.ranks):
            meeting.event.succeed(self.env.now)
        self.stuck[(rank, stream)] = f"rank {rank} in {step.id} waits for the other ranks"
        start: float = yield meeting.event
        self.stuck[(rank, stream)] = ""
        duration = self._duration(step, rank)
        if self.collective_penalty:
            state = self.ranks[rank]
            self._disturb([state], "collectives", +1)
            yield self.env.timeout(duration)
            self._disturb([state], "collectives", -1)
        return start + duration

    # ---- flags -------------------------------------------------------------------------------

    def _word(self, sync: SyncStep, call: Call) -> _Word:
        slot = (call.number + sync.slot) % sync.slots
        key = (*sync.key, slot)
        word = self.words.get(key)
        if word is None:
            word = self.words[key] = _Word(self.program.flag[sync.key[0]].initial)
        return word

    def _signal(self, step: Step, call: Call, clock: float) -> Process:
        for sync in step.signals:
            word = self._word(sync, call)
            if sync.key[0] in self.plan.ordered_words:
                yield from self._until(clock)
            if sync.kind == "mailbox":
                while word.value:
                    event = self.env.event()
                    word.emptied.append(event)
                    yield event
                word.write(1, max(clock, self.env.now))
            elif sync.kind == "counter":
                word.write(word.value + sync.stride * call.number + sync.offset, clock)
            else:
                word.write(sync.stride * call.number + sync.offset, clock)


def _stuck(rank: int, stream: str, step: Step, sync: SyncStep, expected: int, word: _Word) -> str:
    flag, home, position = sync.key
    return (
        f"rank {rank}, stream {stream}, operation {step.id} waits for {flag}[{position}] of rank "
        f"{home} to reach {expected}, it holds {word.value}"
    )


class _Meeting:
    """Where the ranks of one collective come together."""

    __slots__ = ("come", "event")

    def __init__(self, event: simpy.Event) -> None:
        self.come = 0
        self.event = event
