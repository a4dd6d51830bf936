"""Timeline: what a run did and when, real or simulated, in one form.

A real run and the simulator write the same spans: one for every operation of every rank and call.
What a signal wrote and what a wait saw is in them too, so that the matching of waits to signals
and the happens-before that follows can be worked out, and compared, from the record alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

from stretto.schedules.language.buffers import cyclic_reached
from stretto.schedules.language.expressions import FORBID_EXTRA
from stretto.schedules.language.operations import COMMUNICATION_KINDS, COMPUTE_KINDS

__all__ = [
    "TIMELINE_VERSION",
    "FlagEvent",
    "Mark",
    "RankShare",
    "Span",
    "SpanKey",
    "Timeline",
    "exposed_intervals",
    "merged",
]

TIMELINE_VERSION = 1
Intervals = list[tuple[float, float]]
Place = tuple[str, int, int, int]


class SpanKey(NamedTuple):
    """Which span: one operation of one rank in one call."""

    call: int
    rank: int
    operation: str


@dataclass(frozen=True, slots=True)
class FlagEvent:
    """One word that a span signalled or awaited.

    Attributes
    ----------
    flag, home, slot, index
        The word.
    value
        What was written, or expected.
    seen
        For a wait: what the word held when the wait passed; None if it was not recorded.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    flag: str
    home: int
    slot: int
    index: int
    value: int
    seen: int | None = None

    @property
    def word(self) -> Place:
        """The word without the value."""
        return self.flag, self.home, self.slot, self.index


@dataclass(frozen=True, slots=True)
class Span:
    """One operation of one rank in one call.

    Times are microseconds on the Timeline's one clock.  A wait's span begins when its stream
    reached it; a put's when its stream handed it to the copy engine.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    operation: str
    kind: str
    rank: int
    stream: str
    call: int
    start_us: float
    end_us: float
    step: int | None = None
    shard: int | None = None
    peer: int | None = None
    note: str | None = None
    bytes: int = 0
    flops: float = 0.0
    after: tuple[str, ...] = ()
    signalled: tuple[FlagEvent, ...] = ()
    awaited: tuple[FlagEvent, ...] = ()

    @property
    def key(self) -> SpanKey:
        """Which span this is."""
        return SpanKey(self.call, self.rank, self.operation)

    @property
    def duration_us(self) -> float:
        """Length in microseconds."""
        return self.end_us - self.start_us


@dataclass(frozen=True, slots=True)
class Mark:
    """An operation that a Timeline is about: one of those that a finding names.

    Attributes
    ----------
    call, rank, stream, operation
        Which operation.  It has no span if it never began.
    name
        What a text calls it: ``put0 of call 1``.
    role
        What it does there, as the end of a sentence (``reads rows 4 to 6 of 'gathered' on rank
        0``); empty if it does nothing but not begin.
    ongoing
        Whether it is still going on when the record ends.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    call: int
    rank: int
    stream: str
    operation: str
    name: str
    role: str
    ongoing: bool = False

    @property
    def key(self) -> SpanKey:
        """Key of its span."""
        return SpanKey(self.call, self.rank, self.operation)


class RankShare(NamedTuple):
    """How one rank spent the makespan; the three parts add up to it."""

    rank: int
    compute_us: float
    exposed_comm_us: float
    idle_us: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one execution, and what is known about them.

    Attributes
    ----------
    name, variant, world_size, shape, dtype, transport
        Of the Program.
    origin
        ``measured`` on real processes, ``simulated``, or a ``counterexample`` of the verifier: its
        times give an order and nothing else.
    machine
        Name of the machine or profile.
    spans
        In no particular order.
    roof_us
        Lower bound for this machine's own numbers, if it was worked out.
    clock_error_us
        Largest error of aligning the ranks' clocks; 0 in simulated time.
    validity
        For a simulation: ``measured``, ``interpolated``, ``extrapolated`` or ``not validated``.
    notes
        Anything a reader should know, one sentence each; of a counterexample, the finding first.
    marks
        Of a counterexample: the operations that the finding names, in its order.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    name: str
    variant: str
    world_size: int
    shape: tuple[tuple[str, int], ...]
    dtype: str
    transport: str
    origin: Literal["measured", "simulated", "counterexample"]
    machine: str
    spans: tuple[Span, ...]
    roof_us: float | None = None
    clock_error_us: float = 0.0
    validity: str | None = None
    notes: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()
    timeline_version: int = field(default=TIMELINE_VERSION)

    @cached_property
    def start_us(self) -> float:
        """When the first span begins."""
        return min((span.start_us for span in self.spans), default=0.0)

    @cached_property
    def end_us(self) -> float:
        """When the last span ends."""
        return max((span.end_us for span in self.spans), default=0.0)

    @property
    def makespan_us(self) -> float:
        """From the first begin to the last end, over all ranks."""
        return self.end_us - self.start_us

    @cached_property
    def by_key(self) -> dict[SpanKey, Span]:
        """Spans by call, rank and operation."""
        return {span.key: span for span in self.spans}

    @cached_property
    def lanes(self) -> tuple[tuple[int, str], ...]:
        """The (rank, stream) pairs, by rank, streams in order of their first span."""
        first: dict[tuple[int, str], float] = {}
        for span in self.spans:
            lane = (span.rank, span.stream)
            first[lane] = min(first.get(lane, span.start_us), span.start_us)
        return tuple(sorted(first, key=lambda lane: (lane[0], first[lane], lane[1])))

    @cached_property
    def matches(self) -> dict[SpanKey, tuple[SpanKey, ...]]:
        """For every wait, the signals that released it, one per awaited word.

        An awaited value is matched with the signal of the same word that wrote the smallest value
        reaching it, among those that had begun when the wait ended; where all wrote the same (a
        mailbox), the k-th wait with the k-th signal.  A wait that found what was there before the
        record is matched with nothing.
        """
        written: dict[Place, list[tuple[int, Span]]] = {}
        letters: dict[Place, Iterator[Span]] = {}
        for span in sorted(self.spans, key=lambda span: span.end_us):
            for event in span.signalled:
                written.setdefault(event.word, []).append((event.value, span))
        for word, signals in written.items():
            if len(signals) > 1 and len({value for value, _ in signals}) == 1:
                letters[word] = iter([span for _, span in signals])
        found: dict[SpanKey, tuple[SpanKey, ...]] = {}
        for span in sorted(self.spans, key=lambda span: span.end_us):
            if span.awaited:
                until_us = span.end_us + self.clock_error_us
                releasers = [
                    next(letters[event.word], None)
                    if event.word in letters
                    else _releaser(event.value, written.get(event.word, []), until_us)
                    for event in span.awaited
                ]
                found[span.key] = tuple(one.key for one in releasers if one is not None)
        return found

    @cached_property
    def happens_before(self) -> frozenset[tuple[SpanKey, SpanKey]]:
        """The direct edges: next on the stream within a call, ``after``, signal to wait."""
        edges: set[tuple[SpanKey, SpanKey]] = set()
        previous: dict[tuple[int, int, str], Span] = {}
        for span in sorted(self.spans, key=lambda span: (span.start_us, span.end_us)):
            lane = (span.call, span.rank, span.stream)
            if lane in previous:
                edges.add((previous[lane].key, span.key))
            previous[lane] = span
            edges |= {(SpanKey(span.call, span.rank, id), span.key) for id in span.after}
        for wait, signals in self.matches.items():
            edges |= {(signal, wait) for signal in signals}
        return frozenset(edges)

    @cached_property
    def shares(self) -> tuple[RankShare, ...]:
        """How each rank spent the makespan.

        Exposed communication is time in which a put from or to the rank, or a collective, runs
        and no compute of that rank does.
        """
        shares = []
        for rank, (compute, communication) in enumerate(_activity(self)):
            busy = length(compute)
            exposed = length(_minus(communication, compute))
            shares.append(RankShare(rank, busy, exposed, self.makespan_us - busy - exposed))
        return tuple(shares)

    @property
    def exposed_comm_us(self) -> float:
        """Exposed communication of the rank that has most of it."""
        return max((share.exposed_comm_us for share in self.shares), default=0.0)


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals as sorted, disjoint intervals."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the summed length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def exposed_intervals(timeline: Timeline) -> Mapping[int, list[tuple[float, float]]]:
    """Return, by rank, when communication runs and compute on that rank does not."""
    return {
        rank: _minus(communication, compute)
        for rank, (compute, communication) in enumerate(_activity(timeline))
    }


def _activity(timeline: Timeline) -> list[tuple[Intervals, Intervals]]:
    """Return, for every rank, when compute ran and when communication did."""
    compute: list[Intervals] = [[] for _ in range(timeline.world_size)]
    communication: list[Intervals] = [[] for _ in range(timeline.world_size)]
    for span in timeline.spans:
        interval = (span.start_us, span.end_us)
        if span.kind in COMPUTE_KINDS:
            compute[span.rank].append(interval)
        elif span.kind in COMMUNICATION_KINDS and span.bytes:
            communication[span.rank].append(interval)
            if span.peer is not None and span.peer != span.rank:
                communication[span.peer].append(interval)
    return [(merged(one), merged(other)) for one, other in zip(compute, communication, strict=True)]


def _minus(
    intervals: list[tuple[float, float]], holes: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for start, end in intervals:
        for hole_start, hole_end in holes:
            if hole_end <= start or hole_start >= end:
                continue
            if hole_start > start:
                out.append((start, hole_start))
            start = max(start, hole_end)
        if start < end:
            out.append((start, end))
    return out


def _releaser(expected: int, written: list[tuple[int, Span]], before_us: float) -> Span | None:
    """Return the span that wrote the smallest value reaching `expected`, if any did by then.

    A larger value than expected counts only where the record holds a smaller one, too: else the
    word may have reached the expected value before the record began.
    """
    reaching = [
        ((value - expected) & 0xFFFFFFFF, span.end_us, span.rank, span)
        for value, span in written
        if cyclic_reached(value, expected) and span.start_us <= before_us
    ]
    if not reaching:
        return None
    beyond, _, _, first = min(reaching, key=lambda item: item[:3])
    if beyond and all(cyclic_reached(value, expected) for value, _ in written):
        return None
    return first
