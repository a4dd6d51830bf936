"""Timeline: matching, happens-before and shares, worked out by hand and by property."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.schedules.language import (
    FlagEvent,
    InvalidInput,
    Span,
    SpanKey,
    Timeline,
    compare_timelines,
    exposed_intervals,
    from_json,
    merged,
    to_json,
)


def span(
    operation: str,
    start: float,
    end: float,
    *,
    kind: str = "gemm",
    rank: int = 0,
    stream: str = "compute",
    call: int = 0,
    **fields,
) -> Span:
    return Span(operation, kind, rank, stream, call, start, end, **fields)


def timeline(*spans: Span, world_size: int = 2, **fields) -> Timeline:
    fields = {"name": "t", "variant": "v", "shape": (), "dtype": "bf16"} | fields
    return Timeline(
        world_size=world_size,
        transport="test",
        origin="simulated",
        machine="by hand",
        spans=spans,
        **fields,
    )


def event(value: int, *, flag: str = "f", home: int = 0, slot: int = 0, index: int = 0):
    return FlagEvent(flag, home, slot, index, value)


def signal(operation: str, end: float, *events: FlagEvent, **fields) -> Span:
    return span(operation, end - 1, end, kind="signal", signalled=events, **fields)


def wait(operation: str, end: float, *events: FlagEvent, **fields) -> Span:
    return span(operation, end - 1, end, kind="wait", awaited=events, **fields)


def key(operation: str, rank: int = 0, call: int = 0) -> SpanKey:
    return SpanKey(call, rank, operation)


# ---- matching ------------------------------------------------------------------------------------


def test_a_wait_is_matched_with_the_smallest_epoch_that_reaches_it() -> None:
    record = timeline(
        signal("one", 1, event(1), rank=1),
        signal("two", 2, event(2), rank=1),
        signal("three", 3, event(3), rank=1),
        signal("elsewhere", 2, event(2, index=1), rank=1),
        wait("w", 5, event(2)),
    )
    assert record.matches == {key("w"): (key("two", 1),)}


def test_a_larger_value_counts_where_a_smaller_one_was_seen_on_the_way() -> None:
    # A counter goes 2, 4, 6; that it had reached 1 before the record began cannot be ruled out.
    adds = [signal(f"add{value}", value, event(value), rank=1) for value in (2, 4, 6)]
    record = timeline(*adds, wait("three", 9, event(3)), wait("one", 9, event(1)))
    assert record.matches == {key("three"): (key("add4", 1),), key("one"): ()}


def test_every_awaited_word_is_matched_and_words_are_told_apart() -> None:
    words = [
        event(1, flag="f"), event(1, flag="g"), event(1, home=1), event(1, slot=1),
        event(1, index=1),
    ]  # fmt: skip
    signals = [signal(f"s{i}", i + 1, word, rank=1) for i, word in enumerate(words)]
    record = timeline(*signals, wait("w", 9, *words))
    assert record.matches[key("w")] == tuple(key(f"s{i}", 1) for i in range(5))


def test_what_was_signalled_before_the_record_or_after_the_wait_matches_nothing() -> None:
    late = signal("late", 9, event(1), rank=1)
    record = timeline(wait("w", 5, event(1)), late)
    assert record.matches == {key("w"): ()}
    # The clocks of two ranks may differ by as much as is recorded.
    assert timeline(wait("w", 5, event(1)), late, clock_error_us=3.0).matches == {
        key("w"): (key("late", 1),)
    }
    assert timeline(wait("w", 5, event(1))).matches == {key("w"): ()}


def test_epochs_match_across_the_wrap() -> None:
    record = timeline(
        signal("old", 1, event(2**32 - 2), rank=1),
        signal("last", 2, event(2**32 - 1), rank=1),
        signal("wrapped", 3, event(0), rank=1),
        wait("w", 4, event(2**32 - 1)),
        wait("v", 4, event(0)),
    )
    assert record.matches == {key("w"): (key("last", 1),), key("v"): (key("wrapped", 1),)}


def test_mailboxes_match_call_by_call() -> None:
    spans = []
    for call in range(3):
        spans += [
            signal("fill", 2 * call + 1, event(1), rank=1, call=call),
            wait("empty", 2 * call + 2, event(1), call=call),
        ]
    assert timeline(*spans).matches == {
        key("empty", call=call): (key("fill", 1, call),) for call in range(3)
    }


# ---- happens-before ------------------------------------------------------------------------------


def test_happens_before_has_streams_edges_and_signals_and_no_more() -> None:
    record = timeline(
        span("a", 0, 2),
        span("b", 2, 3),
        span("put", 0, 4, kind="put", stream="send", signalled=(event(1, home=1),)),
        wait("w", 4, event(1, home=1), rank=1, stream="receive"),
        span("c", 4, 5, rank=1, after=("w",)),
        span("a", 6, 7, call=1),
    )
    assert record.happens_before == {
        (key("a"), key("b")),
        (key("put"), key("w", 1)),
        (key("w", 1), key("c", 1)),
    }


def test_lanes_and_bounds() -> None:
    record = timeline(
        span("late", 5, 6, rank=1),
        span("b", 2, 3, stream="send"),
        span("a", 1, 3),
        span("c", 0.5, 1, rank=1, stream="z"),
    )
    assert record.lanes == ((0, "compute"), (0, "send"), (1, "z"), (1, "compute"))
    assert (record.start_us, record.end_us, record.makespan_us) == (0.5, 6, 5.5)
    assert record.by_key[key("a")].duration_us == 2
    assert timeline().makespan_us == 0
    assert timeline().exposed_comm_us == 0


# ---- shares --------------------------------------------------------------------------------------


def test_exposed_communication_is_what_compute_does_not_cover() -> None:
    put = {"kind": "put", "stream": "send"}
    record = timeline(
        span("gemm", 2, 6),
        span("fused", 5, 8, kind="gather_gemm", stream="other"),
        span("push", 0, 3, bytes=10, peer=1, **put),
        span("empty", 8, 9, bytes=0, peer=1, **put),
        span("wait", 0, 10, kind="wait"),
        span("gather", 7, 10, kind="collective", bytes=4),
    )
    one, other = record.shares
    assert (one.compute_us, one.exposed_comm_us, one.idle_us) == (6, 2 + 2, 0)
    assert (other.compute_us, other.exposed_comm_us, other.idle_us) == (0, 3, 7)
    assert record.exposed_comm_us == 4
    assert exposed_intervals(record) == {0: [(0, 2), (8, 10)], 1: [(0, 3)]}
    # What a rank sends to itself counts once, for itself.
    alone = timeline(span("push", 0, 3, bytes=1, peer=0, **put), span("g", 0, 4))
    assert alone.shares[1].exposed_comm_us == 0


KINDS = ["gemm", "row_op", "put", "collective", "wait", "signal", "gemm_all_reduce"]
SPANS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 2),
        st.integers(0, 30),
        st.integers(0, 9),
        st.sampled_from([None, 0, 1, 2]),
        st.sampled_from([0, 8]),
    ),
    max_size=14,
)


@given(SPANS)
def test_shares_add_up_to_the_makespan(drawn) -> None:
    record = timeline(
        *(
            span(f"o{i}", start, start + length, kind=kind, rank=rank, peer=peer, bytes=size)
            for i, (kind, rank, start, length, peer, size) in enumerate(drawn)
        ),
        world_size=3,
    )
    ticks = range(40)

    def covers(found: Span, tick: int) -> bool:
        return found.start_us <= tick < found.end_us

    for rank, share in enumerate(record.shares):
        computing = {
            tick
            for tick in ticks
            for found in record.spans
            if found.rank == rank
            and found.kind in ("gemm", "row_op", "gemm_all_reduce")
            and covers(found, tick)
        }
        moving = {
            tick
            for tick in ticks
            for found in record.spans
            if found.kind in ("put", "collective")
            and found.bytes
            and rank in (found.rank, found.peer)
            and covers(found, tick)
        }
        assert share.rank == rank
        assert share.compute_us == len(computing)
        assert share.exposed_comm_us == len(moving - computing)
        total = share.compute_us + share.exposed_comm_us + share.idle_us
        assert total == pytest.approx(record.makespan_us)
        assert share.idle_us >= 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5))))
def test_merged_intervals_are_sorted_and_disjoint(drawn) -> None:
    intervals = [(float(start), float(start + length)) for start, length in drawn]
    found = merged(intervals)
    for (_, end), (start, _) in pairwise(found):
        assert end < start
    halves = [tick / 2 for tick in range(60)]
    for tick in halves:
        covered = any(start <= tick <= end for start, end in intervals)
        assert covered == any(start <= tick <= end for start, end in found)


# ---- as a value ----------------------------------------------------------------------------------


def test_a_timeline_survives_json() -> None:
    record = timeline(
        span("a", 0.1, 2.25, step=1, shard=0, peer=1, note="n", bytes=3, flops=1e9, after=("b",)),
        signal("s", 3, event(1)),
        span("w", 1, 4, kind="wait", awaited=(FlagEvent("f", 0, 1, 2, 3, seen=4),)),
        roof_us=3.5,
        validity="interpolated",
        notes=("one", "two"),
        shape=(("m", 4),),
    )
    again = from_json(Timeline, to_json(record))
    assert again == record
    assert again.matches == record.matches
    with pytest.raises(InvalidInput, match=r"x\.json is not a Timeline in JSON: at spans\.0\."):
        from_json(Timeline, to_json(record).replace('"gemm"', "7"), source="x.json")


def test_two_timelines_of_one_program_are_compared() -> None:
    measured = timeline(
        span("a", 0, 4),
        span("b", 4, 6),
        signal("s", 5, event(1), rank=1),
        wait("w", 7, event(1), stream="receive"),
        shape=(("m", 4),),
    )
    simulated = timeline(
        span("a", 0, 3),
        span("b", 3, 6),
        signal("s", 4, event(1), rank=1),
        wait("w", 8, event(1), stream="receive"),
        shape=(("m", 4),),
    )
    found = compare_timelines(measured, simulated)
    assert (found.same_operations, found.same_matching, found.same_order) == (True,) * 3
    assert (found.measured_us, found.simulated_us) == (7, 8)
    assert found.error == pytest.approx(1 / 7)
    (gemm,) = [kind for kind in found.kinds if kind.kind == "gemm"]
    assert (gemm.count, gemm.measured_us, gemm.simulated_us, gemm.error) == (2, 3, 3, 0)
    other = timeline(span("a", 0, 3), span("c", 3, 4), shape=(("m", 4),))
    found = compare_timelines(measured, other)
    assert (found.same_operations, found.same_matching, found.same_order) == (False,) * 3
    with pytest.raises(InvalidInput, match="empty"):
        compare_timelines(measured, timeline())
    with pytest.raises(InvalidInput, match=r"differ in shape: \(\('m', 4\),\) against \(\)"):
        compare_timelines(measured, timeline(span("a", 0, 1)))


def test_files_from_before_there_were_marks_load() -> None:
    record = timeline(signal("one", 1, event(1)))
    document = json.loads(to_json(record))
    assert document.pop("marks") == []
    assert from_json(Timeline, json.dumps(document)) == record
