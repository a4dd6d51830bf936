"""Whether everything comes to its end, and what waits for what if not."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.play import Blocked, Run, play
from stretto.schedules.verifier.report import Reporter
from stretto.schedules.verifier.verdict import Kind, Place, Severity
from stretto.schedules.verifier.world import World

__all__ = ["find_deadlock", "find_queue_deadlock", "find_worker_deadlock"]


def find_deadlock(order: Order, report: Reporter, *, apart: bool = False) -> None:
    """Report why events are left that no run executes, if there are any.

    With `apart`, say that it is so because the calls before were those of other schedules.
    """
    if apart:
        opening = "If the calls before were those of other schedules: "
        missing = "a wait must be for what its own execution signals"
    else:
        opening, missing = "", None
    _report_stuck(order.world, order.run, report, "deadlock", "error", opening, missing)


def find_worker_deadlock(order: Order, report: Reporter) -> None:
    """Report fused kernels whose tiles wait, on all workers, for tiles behind them."""
    world = order.world
    if world.crews and not order.run.blocked:
        run = play(world, order.levels, workers=True)
        _report_stuck(world, run, report, "residency", "error", "")


def find_queue_deadlock(order: Order, report: Reporter, *, queues: int | None) -> None:
    """Report if operations cannot all be started in the order in which the host enqueues them.

    With fewer hardware queues than streams, an operation is handed to the device only after those
    enqueued before it in the same queue; one that waits for a word holds its queue until the word
    is reached.

    Parameters
    ----------
    order, report
        As for the others.
    queues
        How many there are; streams take turns on them in the order of their first use.  None looks
        at one queue, and only advises.
    """
    world = order.world
    if order.run.blocked:
        return
    extra: dict[int, list[int]] = {}
    heads: dict[tuple[int, int], int] = {}
    numbers: dict[tuple[int, str], int] = {}
    streams: dict[int, int] = {}
    for site, found in enumerate(world.sites):
        if found.operation is None:
            continue
        stream = world.stream_of(world.first[site])
        if (found.rank, stream) not in numbers:
            numbers[found.rank, stream] = streams.get(found.rank, 0)
            streams[found.rank] = streams.get(found.rank, 0) + 1
        queue = (found.rank, numbers[found.rank, stream] % (queues or 1))
        if queue in heads:
            extra.setdefault(world.first[site], []).append(heads[queue])
        heads[queue] = world.first[site]
    run = play(world, order.levels, extra=extra)
    _report_stuck(
        world,
        run,
        report,
        "hardware_queue",
        "advice" if queues is None else "error",
        f"With {queues or 1} hardware queue{'s' if (queues or 1) > 1 else ''} a rank: ",
    )


def _report_stuck(
    world: World,
    run: Run,
    report: Reporter,
    kind: Kind,
    severity: Severity,
    opening: str,
    missing: str | None = None,
) -> None:
    if not run.blocked:
        return
    chain, closed = _Stuck(world, run).chain()
    steps = [_reason(world, report, blocked) for blocked in chain]
    places = [_waiting(world, report, blocked) for blocked in chain]
    if closed:
        message = f"{len(chain)} operations wait for each other: {'; '.join(steps)}."
        if len(chain) == 1:
            message = f"An operation waits for what only comes after it: {steps[0]}."
    else:
        message = f"It waits for ever: {'; '.join(steps)}, which no call up to this one does."
    report.add(
        kind,
        opening + message,
        missing=missing,
        places=places,
        severity=severity,
        # What waits for another operation has not begun, and is not part of the picture.
        goals=[blocked.event for blocked in chain if blocked.what != "event"],
        held=[blocked.event for blocked in run.blocked.values()],
        open=[world.site[blocked.event] for blocked in chain if blocked.what != "event"],
    )


class _Stuck:
    """Follows who waits for whom until it comes back to where it was, or to an end."""

    def __init__(self, world: World, run: Run) -> None:
        self.world, self.run = world, run
        self.signals: dict[int, list[int]] = {}
        for event, (word, _) in world.fired.items():
            self.signals.setdefault(word, []).append(event)
        self.takes: dict[int, list[int]] = {}
        for event, awaited in world.awaited.items():
            for word, _ in awaited:
                self.takes.setdefault(word, []).append(event)

    def chain(self) -> tuple[list[Blocked], bool]:
        """Return a shortest cycle if there is one, else a shortest way to a missing signal."""
        best: list[Blocked] | None = None
        ends: list[list[Blocked]] = []
        heads = sorted(
            self.run.blocked.values(),
            key=lambda blocked: (self.world.call_of(self.world.site[blocked.event]), blocked.event),
        )
        for head in heads[:64]:
            path, seen = [head], {head.event: 0}
            while True:
                following = self._next(path[-1])
                if following is None:
                    ends.append(path)
                    break
                if following.event in seen:
                    cycle = path[seen[following.event] :]
                    if best is None or len(cycle) < len(best):
                        best = cycle
                    break
                seen[following.event] = len(path)
                path.append(following)
        if ends:  # a signal that never comes is the cause of all that waits behind it
            return [min(ends, key=len)[-1]], False
        assert best is not None
        return best, True

    def _next(self, blocked: Blocked) -> Blocked | None:
        """Return what the event that is waited for waits for itself."""
        for event in self._wanted(blocked):
            if self.run.rank_of[event] < 0:
                return self.run.blocked[self.world.lane[event]]
        return None

    def _wanted(self, blocked: Blocked) -> Iterator[int]:
        """Yield the events that would let it go on, those of later calls left out."""
        world, key = self.world, blocked.key
        call = world.call_of(world.site[blocked.event])
        if blocked.what == "event":
            yield key
        elif blocked.what == "meeting":
            yield from world.meetings[key]
        elif blocked.what == "worker":
            yield from (last for _, _, last in world.crews[key].groups)
        else:
            high_enough = self.takes if blocked.what == "full" else self.signals
            for event in high_enough.get(key, ()):
                value = world.fired[event][1] if event in world.fired else 0
                reached = world.flags.kind[key] != "epoch" or value >= blocked.expected
                if reached and world.call_of(world.site[event]) <= call:
                    yield event


def _reason(world: World, report: Reporter, blocked: Blocked) -> str:
    """Say what one blocked operation waits for."""
    who = report.full(world.site[blocked.event])
    if blocked.what == "event":
        return f"{who} waits for {report.full(world.site[blocked.key])}"
    if blocked.what == "full":
        return f"{who} waits for mailbox {report.word(blocked.key)} to be emptied"
    if blocked.what == "meeting":
        come = {world.sites[world.site[event]].rank for event in world.meetings[blocked.key]}
        absent = sorted(set(range(world.world_size)) - come)
        others = f"rank {', '.join(map(str, absent))}" if absent else "the other ranks"
        return f"{who} waits for {others} to come to the same collective"
    if blocked.what == "worker":
        kernel = world.crews[blocked.key]
        return f"a later group of tiles of {who} waits for one of its {kernel.workers} workers"
    kind = world.flags.kind[blocked.key]
    value = "to be filled" if kind == "mailbox" else f"to reach {blocked.expected}"
    return f"{who} waits for {kind} {report.word(blocked.key)} {value}"


def _waiting(world: World, report: Reporter, blocked: Blocked) -> Place:
    return report.place(world.site[blocked.event], "signal" if blocked.what == "full" else "wait")
