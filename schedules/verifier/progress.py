"""Whether everything comes to its end: deadlocks, ambiguous and unawaited signals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.schedules.verifier.order import Blocked, Order, Run, play
from stretto.schedules.verifier.report import Reporter
from stretto.schedules.verifier.verdict import Kind, Place, Severity
from stretto.schedules.verifier.world import World

__all__ = [
    "find_ambiguities",
    "find_deadlock",
    "find_mismatches",
    "find_open_collectives",
    "find_queue_deadlock",
    "find_unawaited",
    "find_worker_deadlock",
]


def find_mismatches(world: World, report: Reporter) -> None:
    """Report collectives in which ranks do not do the same."""
    for turn, rank, what in world.unequal:
        report.add(
            "collective_mismatch",
            f"Rank {rank}, call {world.turns[turn].call}: {what}.",
            missing="all ranks must issue the same collectives in one order",
        )


def find_open_collectives(order: Order, report: Reporter) -> None:
    """Advise on two collectives of a rank that its streams may come to in either order."""
    world = order.world
    last: dict[int, int] = {}
    for site, found in enumerate(world.sites):
        if world.last[site] not in world.meeting_of:
            continue
        earlier = last.get(found.rank)
        last[found.rank] = site
        if earlier is not None and not order.before(world.last[earlier], world.first[site]):
            report.add(
                "collective_mismatch",
                f"{report.full(earlier)} and {report.full(site)} are collectives in an order that "
                "is open: a library that takes them as streams come to them may mix them up.",
                missing=f"nothing orders {report.full(earlier)} before {report.full(site)}",
                places=(report.place(earlier), report.place(site)),
                severity="advice",
            )


# ---- deadlocks -----------------------------------------------------------------------------------


def find_deadlock(order: Order, report: Reporter) -> None:
    """Report why events are left that no run executes, if there are any."""
    _report_stuck(order.world, order.run, report, "deadlock", "error", "")


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
) -> None:
    if not run.blocked:
        return
    chain, closed = _Stuck(world, run).chain()
    steps = [_reason(world, report, blocked) for blocked in chain]
    places = [_waiting(world, report, blocked) for blocked in chain]
    if closed:
        message = f"{len(chain)} operations wait for each other: {'; '.join(steps)}."
        if len(chain) == 1:
            message = f"An operation waits for itself: {steps[0]}."
    else:
        message = f"It waits for ever: {'; '.join(steps)}, which no call up to this one does."
    report.add(
        kind,
        opening + message,
        places=places,
        severity=severity,
        # What waits for another operation has not begun, and is not part of the picture.
        goals=[blocked.event for blocked in chain if blocked.what != "event"],
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


# ---- signals -------------------------------------------------------------------------------------


def find_ambiguities(order: Order, report: Reporter) -> None:
    """Report counters whose threshold is not all adds, and mailboxes with an open order."""
    _find_ambiguous_counters(order, report)
    world, run = order.world, order.run
    for word, fills in run.fills.items():
        _check_order(order, report, word, fills, "signal")
    for word, takes in run.takes.items():
        _check_order(order, report, word, takes, "wait")
    for event, awaited in world.awaited.items():
        boxes = [word for word, _ in awaited if world.flags.kind[word] == "mailbox"]
        if len(boxes) > 1:
            site = world.site[event]
            report.add(
                "ambiguous_mailbox",
                f"{report.full(site)} waits for {len(boxes)} mailboxes at once; transports differ "
                "in when they empty the first.",
                missing="one wait for each mailbox",
                places=(report.place(site, "wait"),),
            )


def _find_ambiguous_counters(order: Order, report: Reporter) -> None:
    world = order.world
    for event, awaited in world.awaited.items():
        if not order.executed(event):
            continue
        for word, expected in awaited:
            if world.flags.kind[word] != "counter":
                continue
            adds = [
                signal
                for signal in order.signals_of.get(word, ())
                if not order.before(event, signal)
            ]
            total = order.levels[word] + sum(world.fired[add][1] for add in adds)
            if total > expected:
                sites = list(dict.fromkeys(world.site[add] for add in adds))
                late = sites[-1]
                report.add(
                    "ambiguous_counter",
                    f"{report.full(world.site[event])} waits for counter {report.word(word)} to "
                    f"reach {expected}, but adds of up to {total} may precede it: it may pass "
                    f"before some of them.",
                    missing=f"the threshold must be all adds that can precede the wait, or "
                    f"{report.full(late)} must follow it",
                    places=(
                        report.place(world.site[event], "wait"),
                        report.place(late, "signal"),
                    ),
                    goals=[event],
                )


def _check_order(
    order: Order, report: Reporter, word: int, events: Sequence[int], what: str
) -> None:
    world = order.world
    pairs = order.run.takes if what == "signal" else order.run.fills
    ahead = order.levels[word]
    for place in range(1, len(events)):
        earlier, later = events[place - 1], events[place]
        partner = place + ahead - 1 if what == "signal" else place - ahead
        others = pairs.get(word, [])
        pair = others[partner] if 0 <= partner < len(others) else -1
        if not order.precedes_without(earlier, later, pair):
            one, other = world.site[earlier], world.site[later]
            report.add(
                "ambiguous_mailbox",
                f"{report.full(one)} and {report.full(other)} "
                + ("both signal" if what == "signal" else "both wait for")
                + f" mailbox {report.word(word)}, in an order that is open.",
                missing=f"nothing orders {report.full(one)} before {report.full(other)}",
                places=(report.place(one, what), report.place(other, what)),
                goals=(earlier, later),
            )
            return


def find_unawaited(order: Order, report: Reporter) -> None:
    """Report mailboxes that are left full, and advise on signals that no wait looks at."""
    world, run = order.world, order.run
    for word, fills in run.fills.items():
        if run.levels[word] == 1 and order.levels[word] == 0 and not run.blocked:
            site = world.site[fills[-1]]
            report.add(
                "unawaited",
                f"Nobody waits for the mailbox {report.word(word)} that {report.full(site)} "
                "fills: the next signal into it will not come through.",
                missing=f"a wait of rank {world.flags.word(word).home} for it",
                places=(report.place(site, "signal"),),
                goals=(fills[-1],),
            )
    looked_at = {word for awaited in world.awaited.values() for word, _ in awaited}
    signalled: dict[str, tuple[int, set[int], set[int]]] = {}
    for event, (word, _) in world.fired.items():
        if world.flags.kind[word] == "mailbox":
            continue
        site = world.site[event]
        name = world.sites[site].name
        _, unseen, seen = signalled.setdefault(name, (site, set(), set()))
        (seen if word in looked_at else unseen).add(word)
    for site, unseen, seen in signalled.values():
        if unseen:
            report.add(
                "unawaited",
                f"{len(unseen)} of {len(unseen) + len(seen)} words that "
                f"{world.sites[site].name} signals are awaited by nobody in these calls, such as "
                f"{report.word(min(unseen))}; another schedule on the workspace may need them.",
                places=(report.place(site, "signal"),),
                severity="advice",
            )
