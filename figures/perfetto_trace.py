"""Timelines as a Perfetto trace, to be opened in https://ui.perfetto.dev or queried with SQL.

A rank is a process, a stream one of its threads, a span a slice (an instant if it has no length),
and an arrow leads from every signal, or put that signals, to the wait that it released.  Every
timeline begins at 0, so that a measured and a simulated one can be compared in one trace.

Reference: Perfetto's ``TrackEvent``, https://perfetto.dev/docs/reference/synthetic-track-event.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from stretto.figures.describe import conditions, headline, key_numbers
from stretto.figures.files import check_path, write_whole
from stretto.figures.lanes import checked, lay_out, span_labels
from stretto.schedules.language import FlagEvent, Span, SpanKey, Timeline, Unavailable

__all__ = ["check_trace_path", "write_trace"]

_SEQUENCE = 1  # all packets come from one writer, so that ties in time keep the order of the file
_FIRST_THREAD = (
    1_000_000  # far from process ids: a thread with the id of its process is its main one
)


def check_trace_path(path: Path) -> None:
    """Raise if no trace could be written at `path`; call it before a long run, not after.

    A name that ends in ``.json`` stands for the Timeline itself, which needs no perfetto.

    Raises
    ------
    InvalidInput
        If nothing can be written there.
    Unavailable
        If the perfetto package is not installed.
    """
    check_path(path)
    if path.suffix.lower() != ".json":
        _protocol()


def write_trace(timelines: Timeline | Sequence[Timeline], path: Path) -> None:
    """Write one or more timelines to `path` as one Perfetto trace (protobuf).

    Raises
    ------
    InvalidInput
        If there is nothing to write, or nothing can be written there.
    Unavailable
        If the perfetto package is not installed.
    """
    timelines = checked(timelines)
    check_path(path)
    write_whole(path, _trace(timelines))


def _protocol() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise Unavailable(
            "A trace is written with the perfetto package, which is missing here; "
            "install it with: pip install perfetto"
        ) from error
    return perfetto_trace_pb2


@dataclass(eq=False)
class _Event:
    """A begin, an end or an instant on one track, before it is a packet."""

    time_ns: int
    kind: str
    track: int
    span: Span
    flows: list[int] = field(default_factory=list)
    ended_flows: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Track:
    uuid: int
    name: str
    spans: tuple[Span, ...]


def _trace(timelines: Sequence[Timeline]) -> bytes:
    protocol = _protocol()
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    builder = TraceProtoBuilder()
    uuids = iter(range(1, 1 << 62))
    flows = iter(range(1, 1 << 62))
    processes = iter(range(1, 1 << 30))
    chains: list[list[_Event]] = []
    arrows: list[tuple[_Event, _Event]] = []
    for timeline in timelines:
        of_timeline: list[list[_Event]] = []
        for block in lay_out(timeline, "streams").blocks:
            process, tracks = next(processes), []
            parent = next(uuids)
            for lane in block.lanes:
                tracks += [
                    _Track(next(uuids), f"{lane.name}{suffix}", spans)
                    for suffix, spans in _without_overlap(lane.spans)
                ]
            name = f"rank {block.rank}"
            if len(timelines) > 1:
                name = f"{headline(timeline)}: {name}"
            _add_process(builder, process, parent, name, timeline)
            for number, track in enumerate(tracks):
                thread = _FIRST_THREAD * process + number
                _add_thread(builder, process, thread, parent, track)
                of_timeline.append(_events(track, timeline.start_us))
        arrows += _join_flows(timeline, of_timeline, flows)
        chains += of_timeline
    for event in _in_order(chains, arrows):
        _add_event(builder, protocol, event)
    data: bytes = builder.serialize()
    return data


def _without_overlap(spans: Iterable[Span]) -> Iterator[tuple[str, tuple[Span, ...]]]:
    """Split spans that overlap over several tracks, since the slices of one track must nest.

    Streams are FIFO, so this happens only where clocks or records are inexact.
    """
    rows: list[list[Span]] = []
    for span in spans:
        for row in rows:
            if _ns(row[-1].end_us) <= _ns(span.start_us):
                row.append(span)
                break
        else:
            rows.append([span])
    for number, row in enumerate(rows):
        yield (f" ({number + 1})" if number else ""), tuple(row)


def _events(track: _Track, start_us: float) -> list[_Event]:
    """Return the events of one track in the order in which they must be read."""
    origin = _ns(start_us)
    events = []
    for span in track.spans:
        begin, end = _ns(span.start_us) - origin, _ns(span.end_us) - origin
        if begin == end:
            events.append(_Event(begin, "instant", track.uuid, span))
        else:
            events.append(_Event(begin, "begin", track.uuid, span))
            events.append(_Event(end, "end", track.uuid, span))
    return events


def _join_flows(
    timeline: Timeline, chains: list[list[_Event]], flows: Iterator[int]
) -> list[tuple[_Event, _Event]]:
    """Number the arrows from a signal's begin to the wait's end; return both ends of each.

    Perfetto lets an arrow start at what it reads first; where clocks are so inexact that a wait
    ends before its signal begins, there is none.
    """
    of_span: defaultdict[SpanKey, list[_Event]] = defaultdict(list)
    for chain in chains:
        for event in chain:
            of_span[event.span.key].append(event)
    arrows = []
    for wait, signals in timeline.matches.items():
        target = of_span[wait][-1]
        for signal in signals:
            source = of_span[signal][0]
            if source.time_ns <= target.time_ns:
                number = next(flows)
                source.flows.append(number)
                target.ended_flows.append(number)
                arrows.append((source, target))
    return arrows


def _in_order(chains: list[list[_Event]], arrows: list[tuple[_Event, _Event]]) -> Iterator[_Event]:
    """Yield events by time; those of equal time by track, and the tail of an arrow before its head.

    Perfetto sorts by time and keeps the order of the file where times are equal, which is common:
    in simulated time a wait may end in the nanosecond in which its signal is sent.
    """
    edges = [edge for chain in chains for edge in pairwise(chain)] + arrows
    place = {
        id(event): position
        for position, event in enumerate(event for chain in chains for event in chain)
    }
    followers: defaultdict[int, list[_Event]] = defaultdict(list)
    waits_for: defaultdict[int, int] = defaultdict(int)
    for before, after in edges:
        followers[id(before)].append(after)
        waits_for[id(after)] += 1
    ready = [
        (event.time_ns, place[id(event)], event)
        for chain in chains
        for event in chain
        if not waits_for[id(event)]
    ]
    heapq.heapify(ready)
    while ready:
        _, _, event = heapq.heappop(ready)
        yield event
        for follower in followers[id(event)]:
            waits_for[id(follower)] -= 1
            if not waits_for[id(follower)]:
                heapq.heappush(ready, (follower.time_ns, place[id(follower)], follower))
    # Signals that release each other in one nanosecond: no order is right, yet none may be lost.
    left = [event for chain in chains for event in chain if waits_for[id(event)]]
    yield from sorted(left, key=lambda event: (event.time_ns, place[id(event)]))


def _add_process(builder: Any, process: int, uuid: int, name: str, timeline: Timeline) -> None:
    descriptor = builder.add_packet().track_descriptor
    descriptor.uuid = uuid
    descriptor.process.pid = process
    descriptor.process.process_name = name
    facts = (headline(timeline), *conditions(timeline), *key_numbers(timeline), *timeline.notes)
    descriptor.description = ", ".join(facts)


def _add_thread(builder: Any, process: int, thread: int, parent: int, track: _Track) -> None:
    descriptor = builder.add_packet().track_descriptor
    descriptor.uuid = track.uuid
    descriptor.parent_uuid = parent
    descriptor.thread.pid = process
    descriptor.thread.tid = thread
    descriptor.thread.thread_name = track.name


def _add_event(builder: Any, protocol: Any, event: _Event) -> None:
    packet = builder.add_packet()
    packet.timestamp = event.time_ns
    packet.trusted_packet_sequence_id = _SEQUENCE
    written = packet.track_event
    written.type = {
        "begin": protocol.TrackEvent.TYPE_SLICE_BEGIN,
        "end": protocol.TrackEvent.TYPE_SLICE_END,
        "instant": protocol.TrackEvent.TYPE_INSTANT,
    }[event.kind]
    written.track_uuid = event.track
    written.flow_ids.extend(event.flows)
    written.terminating_flow_ids.extend(event.ended_flows)
    if event.kind == "end":
        return
    written.name = span_labels(event.span)[0]
    written.categories.append(event.span.kind)
    for name, value in _arguments(event.span):
        argument = written.debug_annotations.add()
        argument.name = name
        if isinstance(value, str):
            argument.string_value = value
        elif isinstance(value, float):
            argument.double_value = value
        else:
            argument.int_value = value


def _arguments(span: Span) -> Iterator[tuple[str, int | float | str]]:
    """Yield what a reader may ask about a slice; nothing is said of what the span lacks."""
    known = ("operation", "kind", "call", "step", "shard", "peer", "note")
    for name in known:
        value = getattr(span, name)
        if value is not None:
            yield name, value
    for name in ("bytes", "flops"):
        if getattr(span, name):
            yield name, getattr(span, name)
    if span.bytes and span.duration_us > 0:
        yield "gb_per_s", span.bytes / span.duration_us / 1e3
    if span.flops and span.duration_us > 0:
        yield "tflops", span.flops / span.duration_us / 1e6
    if span.after:
        yield "after", ", ".join(span.after)
    if span.signalled:
        yield "signalled", ", ".join(_flag(event) for event in span.signalled)
    if span.awaited:
        yield "awaited", ", ".join(_flag(event) for event in span.awaited)


def _flag(event: FlagEvent) -> str:
    """Return a flag's word and value: ``gathered[slot 0][2] of rank 1 = 7 (saw 7)``."""
    seen = "" if event.seen is None else f" (saw {event.seen})"
    word = f"{event.flag}[slot {event.slot}][{event.index}] of rank {event.home}"
    return f"{word} = {event.value}{seen}"


def _ns(time_us: float) -> int:
    return round(time_us * 1000.0)
