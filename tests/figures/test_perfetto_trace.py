"""Traces, read back with Perfetto's own classes."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from stretto.figures import check_trace_path, write_trace
from stretto.schedules.language import FlagEvent, InvalidInput, Span, SpanKey, Timeline, Unavailable

pb = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
EVENT = pb.TrackEvent


@dataclasses.dataclass
class Slice:
    process: str
    thread: str
    name: str
    begin_ns: int
    end_ns: int
    category: str
    arguments: dict[str, Any]
    flows: list[int]
    ended_flows: list[int]

    @property
    def key(self) -> SpanKey:
        rank = int(self.process.rpartition(" ")[2])
        return SpanKey(self.arguments["call"], rank, self.arguments["operation"])


def read(path: Path) -> list[Slice]:
    """Read a trace as Perfetto does: sort by time, keep the order of the file, nest by track."""
    trace = pb.Trace.FromString(path.read_bytes())
    processes: dict[int, str] = {}
    threads: dict[int, tuple[str, str]] = {}
    for packet in trace.packet:
        descriptor = packet.track_descriptor
        if descriptor.HasField("process"):
            processes[descriptor.uuid] = descriptor.process.process_name
        elif descriptor.HasField("thread"):
            threads[descriptor.uuid] = (
                processes[descriptor.parent_uuid],
                descriptor.thread.thread_name,
            )
    tids = [
        p.track_descriptor.thread.tid for p in trace.packet if p.track_descriptor.HasField("thread")
    ]
    assert len(set(tids)) == len(tids)
    events = [packet for packet in trace.packet if packet.HasField("track_event")]
    assert {packet.trusted_packet_sequence_id for packet in events} == {1}
    slices: list[Slice] = []
    open_slices: defaultdict[int, list[Slice]] = defaultdict(list)
    begun: set[int] = set()
    ended: set[int] = set()
    for packet in sorted(events, key=lambda packet: packet.timestamp):
        event = packet.track_event
        if event.type == EVENT.TYPE_SLICE_END:
            current = open_slices[event.track_uuid].pop()
            current.end_ns = packet.timestamp
        else:
            values = {a.name: getattr(a, a.WhichOneof("value")) for a in event.debug_annotations}
            current = Slice(
                *threads[event.track_uuid], event.name, packet.timestamp, packet.timestamp,
                event.categories[0], values, [], [],
            )  # fmt: skip
            slices.append(current)
            if event.type == EVENT.TYPE_SLICE_BEGIN:
                assert not open_slices[event.track_uuid], "a stream runs one operation at a time"
                open_slices[event.track_uuid].append(current)
            else:
                assert event.type == EVENT.TYPE_INSTANT
        for flow in event.flow_ids:
            assert flow not in begun
            begun.add(flow)
        for flow in event.terminating_flow_ids:
            assert flow in begun, "an arrow must be read before it is ended"
            assert flow not in ended
            ended.add(flow)
        current.flows += event.flow_ids
        current.ended_flows += event.terminating_flow_ids
    assert not any(open_slices.values())
    assert begun == ended
    return slices


def write(timelines: Any, tmp_path: Path) -> list[Slice]:
    path = tmp_path / "a.pftrace"
    write_trace(timelines, path)
    return read(path)


def arrows(slices: list[Slice]) -> Counter[tuple[SpanKey, SpanKey]]:
    source = {flow: piece.key for piece in slices for flow in piece.flows}
    return Counter((source[flow], piece.key) for piece in slices for flow in piece.ended_flows)


@pytest.mark.parametrize("tp", [2, 4, 16])
@pytest.mark.parametrize("calls", [1, 2])
def test_slices_are_the_spans(ring: Any, tmp_path: Path, tp: int, calls: int) -> None:
    timeline = ring(tp, skew_us=7.7, calls=calls, start_us=1234.5)
    slices = write(timeline, tmp_path)
    assert len(slices) == len(timeline.spans)
    for piece in slices:
        span = timeline.by_key[piece.key]
        assert piece.category == piece.arguments["kind"] == span.kind
        assert piece.thread == span.stream
        assert piece.begin_ns == pytest.approx((span.start_us - timeline.start_us) * 1e3, abs=1.0)
        assert piece.end_ns == pytest.approx((span.end_us - timeline.start_us) * 1e3, abs=1.0)
        for name in ("step", "shard", "peer", "note"):
            assert piece.arguments.get(name) == getattr(span, name)
        assert piece.arguments.get("bytes", 0) == span.bytes
        assert piece.arguments.get("flops", 0.0) == span.flops
    assert min(piece.begin_ns for piece in slices) == 0


@pytest.mark.parametrize("calls", [1, 3])
def test_arrows_are_the_matches(ring: Any, tmp_path: Path, calls: int) -> None:
    timeline = ring(4, skew_us=3.0, calls=calls)
    expected = Counter(
        (signal, wait) for wait, signals in timeline.matches.items() for signal in signals
    )
    assert sum(expected.values()) == 12 * calls
    assert arrows(write(timeline, tmp_path)) == expected


def test_flags_and_rates_are_told(ring: Any, tmp_path: Path) -> None:
    slices = write(ring(2), tmp_path)
    put = next(piece for piece in slices if piece.category == "put" and piece.process == "rank 0")
    assert put.name == "put r0"
    assert put.arguments["signalled"] == "full[slot 0][1] of rank 1 = 1"
    assert put.arguments["gb_per_s"] == pytest.approx(1e6 / 35.0 / 1e3)
    wait = next(piece for piece in slices if piece.category == "wait" and piece.process == "rank 1")
    assert wait.arguments["awaited"] == "full[slot 0][1] of rank 1 = 1 (saw 1)"
    gemm = next(piece for piece in slices if piece.arguments["operation"] == "gemm1")
    assert gemm.arguments["tflops"] == pytest.approx(1e9 / 50.0 / 1e6)
    assert gemm.arguments["after"] == "wait1"


def test_a_measured_and_a_simulated_run_share_one_trace(ring: Any, tmp_path: Path) -> None:
    measured = ring(2, origin="measured", start_us=9e6, skew_us=4.0)
    slices = write([measured, ring(2)], tmp_path)
    names = {piece.process for piece in slices}
    assert names == {
        f"ag-gemm/ring, TP2, {origin}: rank {rank}"
        for origin in ("measured", "simulated")
        for rank in (0, 1)
    }
    for origin in ("measured", "simulated"):
        assert min(piece.begin_ns for piece in slices if origin in piece.process) == 0


def chain(tp: int, **change: Any) -> Timeline:
    """Every rank signals the one below in the very moment in which its own wait ends."""
    spans = []
    for rank in range(tp):
        awaited = () if rank == tp - 1 else (FlagEvent("go", rank, 0, 0, 1),)
        kind, operation = ("wait", "wait") if awaited else ("gemm", "work")
        spans.append(Span(operation, kind, rank, "s", 0, 0.0, 10.0, awaited=awaited))
        signalled = (FlagEvent("go", (rank - 1) % tp, 0, 0, 1),)
        spans.append(Span("signal", "signal", rank, "s", 0, 10.0, 10.0, signalled=signalled))
    known = {"name": "chain", "variant": "", "world_size": tp, "shape": (), "dtype": "bf16"}
    told = {"transport": "t", "origin": "simulated", "machine": "m", "spans": tuple(spans)}
    return Timeline(**(known | told | change))  # type: ignore[arg-type]


def test_arrows_within_one_nanosecond_point_the_right_way(tmp_path: Path) -> None:
    expected = {(SpanKey(0, rank + 1, "signal"), SpanKey(0, rank, "wait")) for rank in range(5)}
    assert set(arrows(write(chain(6), tmp_path))) == expected


def test_signals_that_release_each_other_lose_no_slice(tmp_path: Path) -> None:
    base = chain(3)
    awaited = (FlagEvent("go", 2, 0, 0, 1),)
    spans = [dataclasses.replace(s, kind="wait", awaited=awaited) if s.operation == "work" else s
             for s in base.spans]  # fmt: skip
    path = tmp_path / "a.pftrace"
    write_trace(dataclasses.replace(base, spans=tuple(spans)), path)
    trace = pb.Trace.FromString(path.read_bytes())
    kinds = Counter(p.track_event.type for p in trace.packet if p.HasField("track_event"))
    assert kinds == {EVENT.TYPE_SLICE_BEGIN: 3, EVENT.TYPE_SLICE_END: 3, EVENT.TYPE_INSTANT: 3}


def test_spans_that_overlap_go_to_tracks_of_their_own(ring: Any, tmp_path: Path) -> None:
    timeline = ring(2)
    spans = [dataclasses.replace(span, end_us=span.end_us + 0.4) if span.kind == "gemm" else span
             for span in timeline.spans]  # fmt: skip
    slices = write(dataclasses.replace(timeline, spans=tuple(spans)), tmp_path)
    assert len(slices) == len(spans)
    assert {piece.thread for piece in slices} == {"compute", "compute (2)", "send", "receive"}


def test_a_wait_that_ends_before_its_signal_by_an_inexact_clock(tmp_path: Path) -> None:
    signalled, awaited = (FlagEvent("f", 1, 0, 0, 1),), (FlagEvent("f", 1, 0, 0, 1),)
    spans = (
        Span("put", "put", 0, "s", 0, 5.0, 10.2, signalled=signalled, bytes=4, peer=1),
        Span("wait", "wait", 1, "s", 0, 0.0, 10.0, awaited=awaited),
    )
    timeline = chain(2, spans=spans, origin="measured", clock_error_us=0.5)
    assert set(arrows(write(timeline, tmp_path))) == {(SpanKey(0, 0, "put"), SpanKey(0, 1, "wait"))}
    late = (dataclasses.replace(spans[0], start_us=10.1), spans[1])
    assert not arrows(write(dataclasses.replace(timeline, spans=late), tmp_path))


def test_same_bytes_every_time(ring: Any, tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_trace([ring(4, skew_us=3.0), ring(4)], tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_without_perfetto_it_says_what_to_install(
    ring: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "perfetto":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "perfetto", None)
    with pytest.raises(Unavailable, match="pip install perfetto"):
        check_trace_path(tmp_path / "a.pftrace")
    with pytest.raises(Unavailable, match="pip install perfetto"):
        write_trace(ring(2), tmp_path / "a.pftrace")
    check_trace_path(tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_write_is_refused(ring: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no timeline"):
        write_trace([], tmp_path / "a.pftrace")
    with pytest.raises(InvalidInput, match="no directory"):
        write_trace(ring(2), tmp_path / "absent" / "a.pftrace")
