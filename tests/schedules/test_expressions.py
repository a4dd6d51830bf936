"""Numbers of the symbolic values: ranks, blocks, extents, epochs, rectangles, words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.schedules.language import (
    SELF,
    WHOLE,
    Block,
    Buffer,
    Epoch,
    Extent,
    Fixed,
    Flag,
    FlagRef,
    InvalidInput,
    Peer,
    Rectangle,
    View,
    Word,
    ceil_div,
    cyclic_reached,
)

SIZES = st.integers(0, 40)
WORLDS = st.integers(1, 12)
LAYOUTS = st.sampled_from(["full", "padded", "shard"])


def test_nine_rows_on_eight_ranks() -> None:
    extent = Extent(9)
    assert [extent.valid(rank, 8) for rank in range(8)] == [2, 2, 2, 2, 1, 0, 0, 0]
    assert extent.block(8) == 2
    assert {name: Extent(9, name).stored(8) for name in ("full", "padded", "shard")} == {
        "full": 9,
        "padded": 16,
        "shard": 2,
    }
    rows = [
        extent.resolve(Block(Peer(rank)), rank=0, owner=0, world_size=8) for rank in range(8)
    ]  # fmt: skip
    assert rows == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9), (9, 9), (9, 9), (9, 9)]


@given(size=SIZES, world_size=WORLDS, layout=LAYOUTS)
def test_blocks_split_an_axis_without_gap_or_overlap(
    size: int, world_size: int, layout: str
) -> None:
    extent = Extent(size, layout)
    valid = [extent.valid(rank, world_size) for rank in range(world_size)]
    assert sum(valid) == size
    assert valid == sorted(valid, reverse=True)
    assert max(valid) <= extent.block(world_size) == ceil_div(size, world_size)
    end = 0
    for rank in range(world_size):
        start, stop = extent.resolve(
            Block(SELF), rank=rank, owner=rank, world_size=world_size
        )  # fmt: skip
        assert 0 <= start <= stop <= extent.stored(world_size)
        if layout == "shard":
            assert (start, stop) == (0, valid[rank])
        else:
            assert (start, stop) == (end, end + valid[rank])
            end = stop


@given(
    size=SIZES,
    world_size=WORLDS,
    start=st.integers(0, 8),
    length=st.one_of(st.none(), st.integers(0, 8)),
    data=st.data(),
)
def test_a_part_of_a_block_is_clipped_to_its_valid_rows(
    size: int, world_size: int, start: int, length: int | None, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    whole = range(*Extent(size).resolve(Block(SELF), rank=rank, owner=rank, world_size=world_size))
    stop = None if length is None else start + length
    part = Extent(size).resolve(
        Block(SELF, start, stop), rank=rank, owner=rank, world_size=world_size
    )
    assert list(range(*part)) == list(whole[start:stop])


def test_whole_and_fixed_and_what_is_not_stored() -> None:
    def resolved(layout: str, interval, owner: int = 0) -> tuple[int, int]:
        return Extent(9, layout).resolve(interval, rank=0, owner=owner, world_size=4)

    assert resolved("full", WHOLE) == (0, 9)
    assert resolved("padded", WHOLE) == (0, 9)
    assert [resolved("shard", WHOLE, owner) for owner in range(4)] == [(0, 3)] * 3 + [(0, 0)]
    assert resolved("padded", Fixed(9, 12)) == (9, 12)
    assert resolved("full", Fixed(4, 4)) == (4, 4)
    for layout, wrong in (("full", Fixed(9, 10)), ("shard", Fixed(0, 4)), ("full", Fixed(-1, 2))):
        with pytest.raises(InvalidInput, match=r"is outside the \d+ stored elements"):
            resolved(layout, wrong)
    with pytest.raises(InvalidInput, match="outside"):
        resolved("full", Fixed(3, 2))
    with pytest.raises(InvalidInput, match="rank 0 stores its own block alone, not that of rank 1"):
        resolved("shard", Block(Peer(1)))
    assert resolved("shard", Block(Peer(1)), owner=1) == (0, 3)
    for wrong in (Block(SELF, -1), Block(SELF, 2, 1)):
        with pytest.raises(InvalidInput, match="is no part of a block"):
            resolved("full", wrong)


def test_relative_and_absolute_ranks() -> None:
    assert [Peer(-1).of(rank, 4) for rank in range(4)] == [3, 0, 1, 2]
    assert [Peer(6).of(rank, 4) for rank in range(4)] == [2, 3, 0, 1]
    assert [Peer(3, absolute=True).of(rank, 4) for rank in range(4)] == [3] * 4
    assert Peer(-1) == SELF + 2 - 3
    assert Peer(3, absolute=True) - 1 == Peer(2, absolute=True)
    assert Peer(-1).within(4) == Peer(3)
    assert Peer(9, absolute=True).within(4) == Peer(9, absolute=True)  # for validation to refuse
    assert [str(peer) for peer in (SELF, Peer(1), Peer(-2), Peer(3, absolute=True))] == [
        "rank",
        "rank+1",
        "rank-2",
        "rank 3",
    ]


def test_slots_of_views_and_words_go_with_the_call() -> None:
    buffer = Buffer(
        "b", "workspace", "fp32", Extent(6, "padded"), Extent(4), slots=3, reuse="release"
    )
    view = View("b", Block(Peer(1)), Fixed(1, 3), on=Peer(2), slot=1)
    found = [view.resolve(buffer, rank=1, world_size=3, call=call) for call in range(4)]
    assert found[0] == Rectangle("b", owner=0, slot=1, row=4, rows=2, column=1, columns=2)
    assert [rectangle.slot for rectangle in found] == [1, 2, 0, 1]
    with pytest.raises(InvalidInput, match="view of buffer 'b': "):
        View("b", Fixed(0, 7)).resolve(buffer, rank=0, world_size=3)
    flag = Flag("f", count=3, slots=2)
    word = FlagRef("f", Peer(1), on=Peer(-1), slot=1)
    assert word.resolve(flag, rank=0, world_size=3, call=4) == Word("f", 2, 1, 1)
    assert FlagRef("f", 2).resolve(flag, rank=0, world_size=3, call=4) == Word("f", 0, 0, 2)
    assert [Epoch(3, -1).at(call) for call in range(3)] == [-1, 2, 5]
    assert Epoch().at(6) == 7
    assert buffer.slot_bytes(3) == 6 * 4 * 4


INTERVALS = st.tuples(st.integers(0, 5), st.integers(0, 4))


@given(rows=INTERVALS, columns=INTERVALS, others=st.tuples(INTERVALS, INTERVALS))
def test_rectangles_overlap_when_they_share_an_element(rows, columns, others) -> None:
    def cells(rectangle: Rectangle) -> set[tuple[int, int]]:
        return {
            (row, column)
            for row in range(rectangle.row, rectangle.row + rectangle.rows)
            for column in range(rectangle.column, rectangle.column + rectangle.columns)
        }

    one = Rectangle("b", 0, 0, *rows, *columns)
    other = Rectangle("b", 0, 0, *others[0], *others[1])
    shared = bool(cells(one) & cells(other))
    if cells(one) and cells(other):
        assert one.overlaps(other) == other.overlaps(one) == shared
    for field, value in (("buffer", "c"), ("owner", 1), ("slot", 1)):
        assert not one.overlaps(other._replace(**{field: value}))


@given(expected=st.integers(0, 2**32 - 1), ahead=st.integers(0, 2**31 - 1))
def test_epochs_compare_across_the_wrap(expected: int, ahead: int) -> None:
    seen = (expected + ahead) % 2**32
    assert cyclic_reached(seen, expected)
    assert cyclic_reached(expected, seen) == (ahead == 0)
    assert cyclic_reached(seen, expected - 2**32)  # an epoch before the first is negative


def test_half_the_circle_is_behind() -> None:
    assert cyclic_reached(2**31 - 1, 0)
    assert not cyclic_reached(2**31, 0)
