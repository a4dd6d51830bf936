"""The loop: streams that are ready, streams that are blocked, and a scheduler between them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterable
from functools import partial

from stretto.schedules.language import Deadlock, SpanKey
from stretto.sim.interpreter.actions import Actions, Blocked, Landing, Work
from stretto.sim.interpreter.caller import Caller
from stretto.sim.interpreter.schedulers import Scheduler, Step
from stretto.sim.interpreter.tasks import BEGIN, CallerWork, Task

__all__ = ["Engine"]


class Lane:
    """One stream of one rank: its queue, and where its first operation stands."""

    def __init__(self, number: int, rank: int, stream: str) -> None:
        self.number, self.rank, self.stream = number, rank, stream
        self.tasks: deque[Task] = deque()
        self.work: Work | None = None
        self.blocked: Blocked | None = None
        self.landing: deque[Landing] = deque()
        self.ended = 0

    @property
    def step(self) -> Step:
        """What would make its first operation go on."""
        task = self.tasks[0]
        operation = task.operation
        return Step(
            2 * self.number,
            task.turn.call.number,
            self.rank,
            self.stream,
            operation.id,
            operation.kind,
        )

    @property
    def landing_step(self) -> Step:
        """The arrival of the oldest data that it has under way."""
        call, rank, operation = self.landing[0].put
        return Step(2 * self.number + 1, call, rank, self.stream, operation, "put", landing=True)


class Ready:
    """Steps that could be taken, sorted by order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._orders: list[int] = []

    def put(self, step: Step) -> None:
        """Add a step, in the place of that with the same order if there is one."""
        at = bisect_left(self._orders, step.order)
        if at < len(self._orders) and self._orders[at] == step.order:
            self.steps[at] = step
        else:
            self._orders.insert(at, step.order)
            self.steps.insert(at, step)

    def remove(self, order: int) -> None:
        """Take a step out, if it is there."""
        at = bisect_left(self._orders, order)
        if at < len(self._orders) and self._orders[at] == order:
            del self._orders[at], self.steps[at]


class Engine:
    """Runs tasks to their end.

    Parameters
    ----------
    tasks
        Of every rank, in the order in which its host enqueues them.
    actions, caller
        What operations do, and what the caller does between calls.
    scheduler
        Who goes next.
    fresh_streams
        Whether streams of different calls are unrelated, the caller's excepted.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        actions: Actions,
        caller: Caller,
        scheduler: Scheduler,
        *,
        fresh_streams: bool,
    ) -> None:
        lanes: dict[tuple[int, str, int | None], Lane] = {}
        for task in tasks:
            stream = task.operation.stream
            callers = stream == actions.programs[task.turn.program].caller_stream
            call = task.turn.call.number if fresh_streams and not callers else None
            lane = lanes.get((task.rank, stream, call))
            if lane is None:
                lane = Lane(len(lanes), task.rank, stream)
                lanes[task.rank, stream, call] = lane
            lane.tasks.append(task)
        self._lanes = list(lanes.values())
        self._actions, self._caller, self._scheduler = actions, caller, scheduler
        self._ended: set[SpanKey] = set()
        self._waiting: dict[Hashable, list[Lane]] = {}
        self._ready = Ready()
        self.trace: list[SpanKey] = []
        self.steps = 0
        actions.notify = self._notify

    @property
    def progress(self) -> dict[tuple[int, str], int]:
        """Number of operations that have ended, by rank and stream."""
        ended: dict[tuple[int, str], int] = {}
        for lane in self._lanes:
            place = (lane.rank, lane.stream)
            ended[place] = ended.get(place, 0) + lane.ended
        return ended

    def run(self) -> None:
        """Take steps until nothing is left.

        Raises
        ------
        Deadlock
            If something is left that cannot go on.
        """
        self._scheduler.begin()
        ready = self._ready
        for lane in self._lanes:
            ready.put(lane.step)
        while ready.steps:
            step = ready.steps[self._scheduler.pick(ready.steps)]
            lane = self._lanes[step.order // 2]
            self.steps += 1
            if step.landing:
                self._actions.land(lane.landing)
            else:
                self._advance(lane, step)
            if lane.landing:
                ready.put(lane.landing_step)
            else:
                ready.remove(2 * lane.number + 1)
        stuck = [lane for lane in self._lanes if lane.tasks]
        if stuck:
            raise Deadlock(self._report(stuck))

    def _advance(self, lane: Lane, step: Step) -> None:
        task = lane.tasks[0]
        if lane.work is None:
            lane.work = self._work(lane, task, step)
        try:
            blocked = next(lane.work)
        except StopIteration:
            self._finish(lane, task)
            return
        if blocked is not None:
            lane.blocked = blocked
            self._waiting.setdefault(blocked.key, []).append(lane)
            self._ready.remove(step.order)

    def _work(self, lane: Lane, task: Task, step: Step) -> Work:
        for key in task.events:
            if key not in self._ended:
                yield Blocked(
                    key, partial(self._ended.__contains__, key), partial(_event, task, key)
                )
        if isinstance(task.operation, CallerWork):
            self._caller.work(task)
        else:
            yield from self._actions.perform(task, self._scheduler.manner(step), lane.landing)

    def _finish(self, lane: Lane, task: Task) -> None:
        lane.work = None
        lane.tasks.popleft()
        self._ended.add(task.key)
        if not isinstance(task.operation, CallerWork):
            lane.ended += 1
            self.trace.append(task.key)
            self._scheduler.ended(task.key)
        self._notify(task.key)
        if lane.tasks:
            self._ready.put(lane.step)
        else:
            self._ready.remove(2 * lane.number)

    def _notify(self, key: Hashable) -> None:
        waiting = self._waiting.pop(key, None)
        for lane in waiting or ():
            assert lane.blocked is not None
            if lane.blocked.passes():
                lane.blocked = None
                self._ready.put(lane.step)
            else:
                self._waiting.setdefault(key, []).append(lane)

    def _report(self, stuck: list[Lane]) -> str:
        lines = [f"No operation can make progress; {len(stuck)} streams are stuck:"]
        for lane in stuck:
            task = lane.tasks[0]
            assert lane.blocked is not None
            name = (
                "the caller's work"
                if isinstance(task.operation, CallerWork)
                else (f"operation {task.operation.id}")
            )
            lines.append(
                f"  rank {lane.rank}, stream {lane.stream}, {name} of call "
                f"{task.turn.call.number} waits for {lane.blocked.reason()}"
            )
        return "\n".join(lines)


def _event(task: Task, key: SpanKey) -> str:
    if key.call != task.turn.call.number:
        return f"the host, which waits for the end of call {key.call}"
    if key.operation == BEGIN:
        return "the caller's earlier work"
    return f"operation {key.operation}"
