"""Streaming multiprocessors: a kernel that waits on all of them while its releaser cannot start.

An operation *sits* if it holds multiprocessors while it waits: a fused kernel with gates (its
workers and its communication warps), and a wait or a collective where the transport runs them on a
multiprocessor.  An operation *needs* one if it computes, or if its verb runs on one.  What sits and
cannot leave before a needing operation of the same rank has run, but may have started before that
one, keeps it out if all multiprocessors are taken.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.schedules.language import (
    COMPUTE_KINDS,
    Capabilities,
    Collective,
    FusedGemm,
    OperationBase,
    Put,
    Signal,
    Wait,
)
from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.report import Reporter

__all__ = ["find_full_devices"]


def find_full_devices(
    order: Order, report: Reporter, *, sms: int, capabilities: Capabilities | None
) -> None:
    """Report operations that may find all of `sms` multiprocessors held by what waits for them."""
    world = order.world
    on_sm = () if capabilities is None else capabilities.verbs_on_sm
    by_rank: dict[int, list[int]] = {}
    sitting: dict[int, int] = {}
    for site, found in enumerate(world.sites):
        if found.operation is None or order.run.rank_of[world.last[site]] < 0:
            continue
        by_rank.setdefault(found.rank, []).append(site)
        held = _held(found.operation, on_sm)
        if held:
            sitting[site] = held
    for sites in by_rank.values():
        holders = [site for site in sites if site in sitting]
        for needy in sites:
            operation = world.sites[needy].operation
            if operation is None or not _needs(operation, on_sm):
                continue
            # The most that each other stream can hold while this operation waits for its turn.
            most: dict[int, int] = {}
            for holder in holders:
                if holder != needy and _keeps_out(order, holder, needy):
                    lane = world.lane[world.first[holder]]
                    if lane not in most or sitting[most[lane]] < sitting[holder]:
                        most[lane] = holder
            kept = list(_together(order, list(most.values())))
            if kept and sum(sitting[site] for site in kept) >= sms:
                names = " and ".join(report.full(site) for site in kept)
                report.add(
                    "residency",
                    f"{names} may hold all {sms} multiprocessors and wait for "
                    f"{report.full(needy)}, which then cannot start.",
                    missing=f"an edge from {report.full(needy)}, or fewer workers",
                    places=(
                        *(report.place(site, "wait") for site in kept),
                        report.place(needy),
                    ),
                    goals=[world.first[site] for site in kept],
                    open=kept,
                )


def _held(operation: OperationBase, on_sm: tuple[str, ...]) -> int:
    """Return how many multiprocessors an operation holds while it waits."""
    if isinstance(operation, FusedGemm):
        gated = any(group.gates for group in operation.groups)
        return operation.tiling.workers + operation.tiling.communication_sms if gated else 0
    waits = (isinstance(operation, Wait) and "wait" in on_sm) or (
        isinstance(operation, Collective) and "collective" in on_sm
    )
    return 1 if waits else 0


def _needs(operation: OperationBase, on_sm: tuple[str, ...]) -> bool:
    verbs = ((Put, "put"), (Signal, "signal"), (Wait, "wait"), (Collective, "collective"))
    return operation.kind in COMPUTE_KINDS or any(
        isinstance(operation, cls) and verb in on_sm for cls, verb in verbs
    )


def _keeps_out(order: Order, holder: int, needy: int) -> bool:
    """Whether `holder` may have begun, and then stays until `needy` has run."""
    world = order.world
    return order.before(world.last[needy], world.last[holder]) and not _begins_after(
        order, holder, needy
    )


def _begins_after(order: Order, site: int, earlier: int) -> bool:
    """Whether a site cannot even begin (a wait: begin to wait) before `earlier` is over."""
    world = order.world
    event = world.first[site]
    sources = [*world.before[event]]
    if world.place[event] > 1:
        sources.append(world.events_of[world.lane[event]][world.place[event] - 2])
    return any(order.before(world.last[earlier], source) for source in sources)


def _together(order: Order, sites: list[int]) -> Iterator[int]:
    """Yield those of `sites` that need not be over before another of them begins."""
    for site in sites:
        if not any(other != site and _begins_after(order, other, site) for other in sites):
            yield site
