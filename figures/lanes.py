"""Which spans are drawn in which lane, and where the lanes lie: a figure without its ink.

Heights are in lane units: a lane that carries work is one unit high.  They grow downwards, rank by
rank; under its lanes every rank has a strip for the exposed communication::

    rank 0   compute   |##########||##########|
             send      |=====|      |=====|
             receive   [.....][............]       waits only, so it is thinner
             strip                  //////         communication runs, compute does not
    rank 1   ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from stretto.schedules.language import (
    COMMUNICATION_KINDS,
    COMPUTE_KINDS,
    InvalidInput,
    Span,
    Timeline,
)

__all__ = [
    "Block",
    "Detail",
    "Lane",
    "Layout",
    "Scale",
    "checked",
    "chosen_detail",
    "lay_out",
    "span_labels",
    "stream_order",
]

Detail = Literal["auto", "streams", "ranks", "extremes"]
"""How much a timeline shows.

``streams``: a lane for every rank and stream.  ``ranks``: a row for every rank, compute above and
communication below.  ``extremes``: the fastest, the median and the slowest rank, by stream.
``auto``: the first of these that stays legible.
"""

_MOST_LANES = 100
_MOST_RANKS = 160
_WAIT_LANE = 0.62
_PASSIVE_KINDS = frozenset({"wait", "signal"})


@dataclass(frozen=True)
class Lane:
    """One row of bars; `name` is its stream."""

    name: str
    top: float
    height: float
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Block:
    """All that is drawn of one rank: from `top` to `bottom`, the strip included."""

    rank: int
    top: float
    bottom: float
    lanes: tuple[Lane, ...]
    strip_top: float
    strip_height: float


@dataclass(frozen=True)
class Layout:
    """All blocks of one timeline.

    Attributes
    ----------
    blocks
        From the top.
    notes
        What a reader must be told about the choice of them.
    tight
        Whether a block is one row with no space inside; else each of its lanes is a stream.
    """

    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = ()
    tight: bool = False

    @property
    def height(self) -> float:
        """In lane units."""
        return self.blocks[-1].bottom

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Lanes of all blocks, from the top."""
        return tuple(lane for block in self.blocks for lane in block.lanes)

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of the spans that are drawn."""
        return frozenset(span.kind for lane in self.lanes for span in lane.spans)


@dataclass(frozen=True)
class Scale:
    """How time and lanes become inches; all panels of a figure share it.

    Attributes
    ----------
    unit_us, unit_name
        Of the time axis: 1 and µs, or 1000 and ms.
    longest
        The axis ends here, in that unit.
    width
        Of the axes.
    left, right
        Margins beside the axes.
    lane
        Height of a lane unit.
    """

    unit_us: float
    unit_name: str
    longest: float
    width: float
    left: float
    right: float
    lane: float

    def inches(self, time_us: float) -> float:
        """Return the length of a time on the axis."""
        return time_us / self.unit_us / self.longest * self.width


def checked(timelines: Timeline | Sequence[Timeline]) -> list[Timeline]:
    """Return the timelines as a list, if there is something in them that can be drawn.

    Raises
    ------
    InvalidInput
        If there is no timeline, or one without spans, or a span that cannot be: of a rank that
        does not exist, or that ends before it begins.
    """
    found = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not found:
        raise InvalidInput("There is no timeline to draw; give at least one.")
    for timeline in found:
        if not timeline.spans:
            raise InvalidInput(f"The timeline of {timeline.name!r} has no spans; record it again.")
        for span in timeline.spans:
            wrong = _wrong(span, timeline.world_size)
            if wrong:
                raise InvalidInput(
                    f"In the timeline of {timeline.name!r}, span {span.operation!r} of rank "
                    f"{span.rank} {wrong}; record it again."
                )
    return found


def chosen_detail(timelines: Sequence[Timeline], detail: Detail) -> Detail:
    """Return the detail that all timelines of one figure are drawn with, never ``auto``."""
    if detail != "auto":
        return detail
    if sum(len(timeline.lanes) for timeline in timelines) <= _MOST_LANES:
        return "streams"
    if sum(timeline.world_size for timeline in timelines) <= _MOST_RANKS:
        return "ranks"
    return "extremes"


def lay_out(timeline: Timeline, detail: Detail) -> Layout:
    """Return the lanes of `timeline`; `detail` is not ``auto``."""
    by_rank: dict[int, list[Span]] = {rank: [] for rank in range(timeline.world_size)}
    for span in sorted(timeline.spans, key=lambda span: (span.start_us, span.end_us, span.call)):
        by_rank[span.rank].append(span)
    if detail == "ranks":
        rows = {rank: _two_rows(spans) for rank, spans in by_rank.items()}
        note = "One row per rank, compute above communication; waits and signals are not shown."
        return Layout(_stacked(rows, pad=0.05, strip=0.16), (note,), tight=True)
    notes: tuple[str, ...] = ()
    if detail == "extremes":
        by_rank, notes = _extremes(by_rank)
    streams = stream_order(timeline.spans)
    lanes = {rank: _stream_rows(spans, streams) for rank, spans in by_rank.items()}
    return Layout(_stacked(lanes, pad=0.14, strip=0.36), notes)


def span_labels(span: Span) -> tuple[str, ...]:
    """Return what may be written into the bar of `span`, the most telling first."""
    kind = span.kind.replace("_", " ")
    if span.shard is not None:
        rows = f"r{span.shard}"
        return (f"{kind} {rows}", rows)
    if span.kind in COMPUTE_KINDS | COMMUNICATION_KINDS:
        named = (span.note, kind) if span.note else (kind,)
        return named if span.step is None else (*named, f"s{span.step}")
    return (span.note, kind) if span.note else (kind,)


def _wrong(span: Span, world_size: int) -> str | None:
    """Return what is wrong with a span, as the end of a sentence."""
    for rank in (span.rank, span.peer):
        if rank is not None and not 0 <= rank < world_size:
            return f"names rank {rank} of {world_size}"
    if not (math.isfinite(span.start_us) and math.isfinite(span.end_us)):
        return "has no finite time"
    return "ends before it begins" if span.end_us < span.start_us else None


_Rows = list[tuple[str, float, tuple[Span, ...]]]


def stream_order(spans: Iterable[Span]) -> list[str]:
    """Return the streams: those that compute, those that move data, then those that only wait."""
    kinds: dict[str, set[str]] = {}
    for span in spans:
        kinds.setdefault(span.stream, set()).add(span.kind)

    def place(stream: str) -> tuple[int, str]:
        for position, these in enumerate((COMPUTE_KINDS, COMMUNICATION_KINDS)):
            if kinds[stream] & these:
                return position, stream
        return 2, stream

    return sorted(kinds, key=place)


def _stream_rows(spans: list[Span], streams: list[str]) -> _Rows:
    """Return name, height and spans of the lanes of one rank; a rank that did nothing has one."""
    rows: _Rows = []
    for stream in streams:
        here = tuple(span for span in spans if span.stream == stream)
        if here:
            passive = all(span.kind in _PASSIVE_KINDS for span in here)
            rows.append((stream, _WAIT_LANE if passive else 1.0, here))
    return rows or [("", 1.0, ())]


def _two_rows(spans: list[Span]) -> _Rows:
    return [
        (name, height, tuple(span for span in spans if span.kind in kinds))
        for name, height, kinds in (
            ("compute", 0.50, COMPUTE_KINDS),
            ("communication", 0.28, COMMUNICATION_KINDS),
        )
    ]


def _extremes(by_rank: dict[int, list[Span]]) -> tuple[dict[int, list[Span]], tuple[str, ...]]:
    """Return the spans of the fastest, the median and the slowest rank, and a note that says so."""
    ends = {
        rank: max((span.end_us for span in spans), default=0.0) for rank, spans in by_rank.items()
    }
    ordered = sorted(by_rank, key=lambda rank: (ends[rank], rank))
    fastest, median, slowest = ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1]
    note = (
        f"{len({fastest, median, slowest})} of {len(ordered)} ranks, by when they end: "
        f"fastest {fastest}, median {median}, slowest {slowest}."
    )
    chosen = dict.fromkeys((fastest, median, slowest))
    return {rank: by_rank[rank] for rank in chosen}, (note,)


def _stacked(rows: dict[int, _Rows], *, pad: float, strip: float) -> tuple[Block, ...]:
    blocks = []
    y = 0.0
    for rank, lanes_of_rank in rows.items():
        top = y
        y += pad
        lanes = []
        for name, height, spans in lanes_of_rank:
            lanes.append(Lane(name, y, height, spans))
            y += height
        blocks.append(Block(rank, top, y + strip + pad, tuple(lanes), y, strip))
        y += strip + pad
    return tuple(blocks)
