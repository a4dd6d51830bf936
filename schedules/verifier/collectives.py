"""Whether all ranks issue the same collectives in a call, in one order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.schedules.language import Collective
from stretto.schedules.verifier.lines import Line
from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.report import Reporter
from stretto.schedules.verifier.world import World

__all__ = ["disagreements", "find_mismatches", "find_open_collectives"]

Issue = tuple[str, str, str, int, int]
"""What ranks must agree on: kind, buffers, and columns of either."""


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


# ---- what ranks issue, call by call --------------------------------------------------------------


def disagreements(lines: Sequence[Sequence[Line]]) -> Iterator[tuple[int, str]]:
    """Yield the rank that does otherwise than the others, and what; `lines` are those of a call."""
    issued = [[line for line in own if isinstance(line.operation, Collective)] for own in lines]
    first = [_issue(line) for line in issued[0]]
    for rank, own in enumerate(issued):
        issues = [_issue(line) for line in own]
        if issues != first:
            yield rank, _difference(first, issues)
            return
    for together in zip(*issued, strict=True):
        misfit = _misfit(together)
        if misfit is not None:
            yield misfit


def _issue(line: Line) -> Issue:
    operation = line.operation
    assert isinstance(operation, Collective)
    source, destination = line.part.touches
    return (
        operation.collective,
        operation.source.buffer,
        operation.destination.buffer,
        source.column_stop - source.column,
        destination.column_stop - destination.column,
    )


def _misfit(together: Sequence[Line]) -> tuple[int, str] | None:
    """Return at which rank the rows of one collective do not fit, and why."""
    operation = together[0].operation
    assert isinstance(operation, Collective)
    kind = operation.collective
    rows = []
    for line in together:
        source, destination = line.part.touches
        rows.append((source.row_stop - source.row, destination.row_stop - destination.row))
    gathered = sum(brings for brings, _ in rows)
    scattered = sum(takes for _, takes in rows)
    for rank, (brings, takes) in enumerate(rows):
        wanted = {
            "all_gather": (brings, gathered),
            "reduce_scatter": (scattered, takes),
            "all_reduce": (rows[0][0], rows[0][0]),
        }[kind]
        if (brings, takes) != wanted:
            return rank, (
                f"its {kind} is of {brings} rows to {takes} rows; with what the other ranks bring "
                f"it should be of {wanted[0]} rows to {wanted[1]}"
            )
    return None


def _difference(one: Sequence[Issue], other: Sequence[Issue]) -> str:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return (
                f"its collective number {place + 1} of the call is {_named(right)}, that of rank 0 "
                f"is {_named(left)}"
            )
    return f"it issues {len(other)} collectives in the call, rank 0 issues {len(one)}"


def _named(issue: Issue) -> str:
    kind, source, destination, columns, _ = issue
    return f"{kind} of {columns} columns of {source!r} to {destination!r}"
