"""Races: two accesses to the same bytes, one of them a write, that nothing orders.

Accesses to one storage are taken in the order of one run.  Each is held against the last write of
the same bytes and what came since; if all those are ordered, so are, by transitivity, all others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from stretto.schedules.language import Collective, Copy, FusedGemm, Gemm, Put, Reduce, RowOp
from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.report import Reporter
from stretto.schedules.verifier.unroll import NEVER, Access, World

__all__ = ["find_races", "ordered", "overlap"]


def find_races(order: Order, report: Reporter) -> None:
    """Report every pair of accesses that may happen at the same time and must not."""
    world, rank_of = order.world, order.run.rank_of
    by_storage: list[list[Access]] = [[] for _ in world.storages]
    for access in world.accesses:
        if rank_of[access.start] >= 0:
            by_storage[access.storage].append(access)
    for accesses in by_storage:
        if any(access.mode != "read" for access in accesses):
            accesses.sort(key=lambda access: rank_of[access.start])
            _look_through(order, report, accesses)
    for access in world.accesses:
        if access.mode == "write":
            _look_at_itself(report, access)


def ordered(order: Order, one: Access, other: Access) -> bool:
    """Whether `one` is over, in every run, before `other` starts."""
    world = order.world
    if one.flies and other.flies and world.lane[one.start] == world.lane[other.start]:
        return world.place[one.start] < world.place[other.start]  # puts of a stream keep order
    return (
        one.finish != NEVER
        and one.finish != other.start
        and order.before(one.finish, other.start)
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
    for group in _strips(order.world, accesses):
        since: list[Access] = []  # the last write, then what came after it
        for access in group:
            clear = access.mode == "write"
            for earlier in since:
                if _compatible(earlier, access) or not overlap(order.world, earlier, access):
                    clear = False
                    continue
                if ordered(order, earlier, access):
                    continue
                if ordered(order, access, earlier):
                    continue
                pair = (id(earlier), id(access))
                if pair not in seen:
                    seen.add(pair)
                    _report(order, report, earlier, access)
            if clear and all(_covers(access, earlier) for earlier in since):
                since = []
            since.append(access)


def _strips(world: World, accesses: Sequence[Access]) -> Iterator[list[Access]]:
    """Yield the accesses to each strip of rows between which none begins or ends."""
    if len({access.shape for access in accesses}) > 1:
        yield list(accesses)
        return
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
    return one.site == other.site


def _covers(one: Access, other: Access) -> bool:
    """Whether `one` has all columns of `other`, in a strip of rows that both fill."""
    return (
        one.shape == other.shape
        and one.column <= other.column
        and one.column_stop >= other.column_stop
    )
