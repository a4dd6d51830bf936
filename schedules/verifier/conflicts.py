"""Races: two accesses to the same bytes, one of them a write, that nothing orders.

Accesses to one storage are taken in the order of one run.  Each is held against the last write of
the same bytes and what came since; if all those are ordered, so are, by transitivity, all others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence

from stretto.schedules.language import FusedGemm, Gemm
from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.report import Reporter
from stretto.schedules.verifier.world import NEVER, Access, World

__all__ = ["find_races", "ordered", "overlap"]


def find_races(order: Order, report: Reporter, *, within: Collection[int] | None = None) -> None:
    """Report every pair of accesses that may happen at the same time and must not.

    With `within`, look at these storages alone.
    """
    world, rank_of = order.world, order.run.rank_of
    by_storage: list[list[Access]] = [[] for _ in world.storages]
    for access in world.accesses:
        looked_at = within is None or access.storage in within
        if looked_at and rank_of[access.start] >= 0:
            by_storage[access.storage].append(access)
    for accesses in by_storage:
        if any(access.mode != "read" for access in accesses):
            accesses.sort(key=lambda access: rank_of[access.start])
            _look_through(order, report, accesses)
    if within is None:
        _find_own_overlaps(order, report)


def ordered(order: Order, one: Access, other: Access) -> bool:
    """Whether `one` is over, in every run, before `other` starts."""
    world = order.world
    if one.flies and other.flies and world.lane[one.start] == world.lane[other.start]:
        return world.place[one.start] < world.place[other.start]  # puts of a stream keep order
    return (
        one.finish != NEVER and one.finish != other.start and order.before(one.finish, other.start)
    )


def overlap(world: World, one: Access, other: Access) -> bool:
    """Whether two accesses to one storage have a byte in common."""
    if one.shape == other.shape:
        return (
            one.row < other.row_stop
            and other.row < one.row_stop
            and one.column < other.column_stop
            and other.column < one.column_stop
        )
    # Two Programs see different shapes in the same memory: compare bytes, row by row.
    if one.row_stop - one.row > other.row_stop - other.row:
        one, other = other, one
    pitch, element = world.shapes[one.shape]
    for row in range(one.row, one.row_stop):
        start = row * pitch + one.column * element
        stop = row * pitch + one.column_stop * element
        if _touches_bytes(world, other, start, stop):
            return True
    return False


def _touches_bytes(world: World, access: Access, start: int, stop: int) -> bool:
    """Whether the access has one of the bytes [start, stop) of its storage."""
    pitch, element = world.shapes[access.shape]
    if pitch == 0:
        return False
    first, last = max(start // pitch, access.row), min((stop - 1) // pitch, access.row_stop - 1)
    for row in (first, last) if last - first < 2 else (first, first + 1, last):
        if first <= row <= last:
            left = row * pitch + access.column * element
            right = row * pitch + access.column_stop * element
            if left < stop and start < right:
                return True
    return False


def _look_through(order: Order, report: Reporter, accesses: Sequence[Access]) -> None:
    seen: set[tuple[int, int]] = set()
    mixed = len({access.shape for access in accesses}) > 1
    for group in [accesses] if mixed else _strips(accesses):
        # The last write, and what came after it; reads need not be held against reads.
        writes: list[Access] = []
        reads: list[Access] = []
        for access in group:
            is_read = access.mode == "read"
            covered: list[Access] = []
            for earlier in writes if is_read else (*writes, *reads):
                if _compatible(earlier, access) or not overlap(order.world, earlier, access):
                    continue
                if access.mode == "write" and _covers(access, earlier, rows=mixed):
                    covered.append(earlier)
                if not ordered(order, earlier, access):
                    pair = (id(earlier), id(access))
                    if pair not in seen:
                        seen.add(pair)
                        _report(order, report, earlier, access, group)
            if covered:
                done = {id(one) for one in covered}
                writes = [one for one in writes if id(one) not in done]
                reads = [one for one in reads if id(one) not in done]
            (reads if is_read else writes).append(access)


def _strips(accesses: Sequence[Access]) -> Iterator[list[Access]]:
    """Yield the accesses to each strip of rows between which none begins or ends."""
    edges = sorted({access.row for access in accesses} | {access.row_stop for access in accesses})
    strips: list[list[Access]] = [[] for _ in edges]
    for access in accesses:
        place = bisect_right(edges, access.row) - 1
        while place < len(edges) and edges[place] < access.row_stop:
            strips[place].append(access)
            place += 1
    yield from strips


def _compatible(one: Access, other: Access) -> bool:
    if one.mode == other.mode and one.mode != "write":
        return True
    if one.meeting == other.meeting != NEVER:
        return True
    return one.site == other.site and one.start == other.start  # see _find_own_overlaps


def _covers(one: Access, other: Access, *, rows: bool) -> bool:
    """Whether `one` has all columns of `other`; and, where both need not fill a strip, all rows."""
    return (
        one.shape == other.shape
        and one.column <= other.column
        and one.column_stop >= other.column_stop
        and (not rows or (one.row <= other.row and one.row_stop >= other.row_stop))
    )


# ---- words ---------------------------------------------------------------------------------------


def _report(
    order: Order, report: Reporter, one: Access, other: Access, group: Sequence[Access]
) -> None:
    """Report two accesses that nothing orders; `one` came first in the run that was played."""
    world = order.world
    calls = world.call_of(one.site), world.call_of(other.site)
    if calls[0] > calls[1]:
        one, other = other, one
    across = calls[0] != calls[1]
    if not across and "read" in (one.mode, other.mode):
        read, write = (one, other) if one.mode == "read" else (other, one)
        # Was the write to be read, or to come later?
        filled = any(
            before.mode != "read" and before is not write and ordered(order, before, read)
            for before in group
        )
        one, other = (read, write) if filled else (write, read)
    what = report.rectangle(one, other)
    them = "it" if what.startswith("row ") else "them"
    first, later = report.operation(one.site), report.subject(other.site, beside=one.site)
    if one.mode == "read":
        message = f"{later} may overwrite {what} before {first} has read {them}."
    elif other.mode == "read":
        message = f"{later} may read {what} before {first} has written {them}."
    else:
        second = report.operation(other.site, beside=one.site)
        both = f"{report.subject(one.site)} and {second}"
        message = f"{both} both write {what}, in an order that is open."
    missing = f"nothing orders {report.full(one.site)} before {report.full(other.site)}"
    if one.flies and one.finish == NEVER:
        missing += ", whose stream sets no later signal to say that the data have arrived"
    report.add(
        "reuse" if across and other.mode != "read" else "race",
        message,
        missing=missing,
        places=(report.touched(one), report.touched(other)),
        goals=(one.start, other.start),
        held=[event for event in (one.finish, other.finish) if event != NEVER],
        open=(one.site, other.site),
    )


# ---- one operation against itself ----------------------------------------------------------------


def _find_own_overlaps(order: Order, report: Reporter) -> None:
    """Report operations that write what they still read; all calls of a phase are alike in that."""
    world = order.world
    first_turns: dict[tuple[int, int], int] = {}
    for number, turn in enumerate(world.turns):
        first_turns.setdefault((turn.program, id(turn.phase)), number)
    looked_at = set(first_turns.values())
    together: dict[tuple[int, int], list[Access]] = {}
    for access in world.accesses:
        site = world.sites[access.site]
        if site.operation is not None and site.turn in looked_at:
            together.setdefault((access.site, access.start), []).append(access)
    for (number, _), accesses in together.items():
        operation = world.sites[number].operation
        product = isinstance(operation, (Gemm, FusedGemm))
        for write in accesses:
            for place, read in enumerate(accesses):
                if write.mode == "read" or read.mode != "read":
                    continue
                if read.storage != write.storage or not overlap(world, read, write):
                    continue
                if _same(read, write) and not (product and place < 2):
                    continue  # in place, element by element
                report.add(
                    "race",
                    f"{report.subject(number)} writes {report.rectangle(write, read)} "
                    "while it still reads there.",
                    missing="its output must lie apart from its inputs",
                    places=(report.touched(read), report.touched(write)),
                    goals=(write.start,),
                    open=(number,),
                )


def _same(one: Access, other: Access) -> bool:
    return (one.row, one.row_stop, one.column, one.column_stop) == (
        other.row,
        other.row_stop,
        other.column,
        other.column_stop,
    )
