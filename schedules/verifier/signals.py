"""Signals of which it is open which wait they are for, and signals that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.report import Reporter

__all__ = ["find_ambiguities", "find_unawaited"]


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
                    goals=[event, adds[-1]],
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
