"""A counterexample as a picture: which operations are at fault, and in what order it comes to that.

Imported only when something is drawn.  A counterexample has an order and no times, so there is no
time axis, no makespan and nothing exposed: bars are as long as their names, and what comes first
stands further left.  The operations that the finding names stand out, numbered as in the list above
the picture; an arrow leads from every signal to the wait that it released::

    rank 0   compute   |gemm0|      (1) gemm1 of call 0 ............|
             send      |put0 |
             receive   [wait0    ]
    rank 1   send      |put0 |----^      (2) put0 of call 1 ........|

All lengths are inches, in the axes too.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch, Patch, Rectangle
from matplotlib.patheffects import withStroke

from stretto.figures.canvas import (
    MOST_NAME,
    POINTS,
    fitted,
    legend_below,
    legend_height,
    new_figure,
    plain,
    text_width,
)
from stretto.figures.describe import conditions, headline
from stretto.figures.lanes import stream_order
from stretto.figures.style import FAULT, FAULT_INK, GREY, GROUPS, INK, SIGNAL, group_of, lighter
from stretto.schedules.language import Mark, Span, SpanKey, Timeline

__all__ = ["compose_counterexample"]

_TITLE, _CAPTION, _TEXT, _NAME, _LABEL = 8.0, 8.5, 7.0, 6.5, 6.5  # points
_LINE = {_TITLE: 0.17, _CAPTION: 0.165, _TEXT: 0.15}  # inches
_PARAGRAPH = 0.045
_SLACK = 1.04  # of a line of text, since hinting makes letters wider on a screen than on paper
_BAR, _LANE_GAP, _RANK_PAD = 0.22, 0.07, 0.07
_LEAST_BAR, _LANE_ROOM = 0.10, 16.0
_LABEL_PAD = 0.12
_BADGE = 0.17
_STEP = 0.10  # from one begin or end to the next
_ARROW_ROOM = 0.16  # from the end of a signal to the end of the wait that it releases
_MOST_WIDTH = 24.0
_MOST_SPREAD = 2.5  # of what names need
_MOST_LISTED = 16
_MOST_CAPTION = 24  # lines
_MARGIN, _TOP, _GAP = 0.14, 0.10, 0.10
_SMALLEST = 4.6
_NOTE = "order only: lengths have no meaning"


@dataclass(frozen=True)
class _Bar:
    """A span in its row; `number` and `mark` are set if it is one of those at fault."""

    span: Span
    label: str
    top: float
    number: int = 0
    mark: Mark | None = None
    begun: bool = True


@dataclass(frozen=True)
class _Row:
    """One row of bars, at `top`, with the name of its stream."""

    stream: str
    top: float


@dataclass(frozen=True)
class _Rank:
    rank: int
    top: float
    bottom: float
    rows: tuple[_Row, ...]


@dataclass(frozen=True)
class _Line:
    """A line above the picture; `number` is that of a mark, `above` an additional gap."""

    text: str
    size: float = _TEXT
    weight: str = "normal"
    colour: str = INK
    number: int = 0
    above: float = 0.0


def compose_counterexample(timeline: Timeline, title: str | None, width: float) -> Figure:
    """Return the picture of a counterexample, as wide as its names need and at least `width`."""
    return _Picture(timeline, title, width).draw()


class _Picture:
    """Lays out and draws one counterexample."""

    def __init__(self, timeline: Timeline, title: str | None, width: float) -> None:
        self.timeline = timeline
        self.number_of = {mark.key: place for place, mark in enumerate(timeline.marks, 1)}
        spans = [*timeline.spans, *self._not_begun()]
        self.bar = _bar_height(spans)
        self.size = min(_LABEL, 0.62 * self.bar * POINTS)
        self.ranks, self.bars = self._placed(spans)
        self.height = self.ranks[-1].bottom
        names = [text_width(plain(row.stream), _NAME) for one in self.ranks for row in one.rows]
        last = max(one.rank for one in self.ranks)
        self.left = (
            _MARGIN
            + text_width(f"rank {last}", _TEXT, "bold")
            + 0.14
            + min(MOST_NAME, max(names))
            + 0.08
        )
        room = width - self.left - _MARGIN
        self.times, self.places = self._axis(room)
        self.width = max(width, self.left + self.places[-1] + _MARGIN)
        self.title = title
        self.header = self._header()

    # ---- where things lie --------------------------------------------------------------------

    def _not_begun(self) -> Iterator[Span]:
        """Yield stand-ins for marked operations that never began, at the end of their streams."""
        timeline = self.timeline
        for mark in timeline.marks:
            if mark.key in timeline.by_key:
                continue
            reached = [
                span.end_us
                for span in timeline.spans
                if (span.rank, span.stream) == (mark.rank, mark.stream)
            ]
            start = max(reached, default=timeline.start_us)
            end = max(timeline.end_us, start + 1.0)
            yield Span(mark.operation, "wait", mark.rank, mark.stream, mark.call, start, end)

    def _placed(self, spans: Sequence[Span]) -> tuple[list[_Rank], list[_Bar]]:
        """Return the ranks that do something, from the top, and the bars of all rows."""
        order = stream_order(spans)
        first_call = min(span.call for span in spans)
        ranks, bars = [], []
        y = 0.0
        for rank in sorted({span.rank for span in spans}):
            top, rows = y, []
            y += _RANK_PAD
            for stream in order:
                here = [span for span in spans if (span.rank, span.stream) == (rank, stream)]
                for number, row in enumerate(_without_overlap(here)):
                    rows.append(_Row("" if number else stream, y))
                    call = first_call
                    for span in row:
                        bars.append(self._bar(span, y, span.call != call))
                        call = span.call
                    y += self.bar + _LANE_GAP
            y += _RANK_PAD - _LANE_GAP
            ranks.append(_Rank(rank, top, y, tuple(rows)))
        return ranks, bars

    def _bar(self, span: Span, top: float, new_call: bool) -> _Bar:
        number = self.number_of.get(span.key, 0)
        if number:
            mark = self.timeline.marks[number - 1]
            begun = span.key in self.timeline.by_key
            return _Bar(span, plain(mark.name), top, number, mark, begun)
        name = (span.note or span.operation) if span.kind == "opaque" else span.operation
        return _Bar(span, plain(f"call {span.call}: {name}" if new_call else name), top)

    def _needed(self, bar: _Bar) -> float:
        weight = "bold" if bar.number else "normal"
        return (
            text_width(bar.label, self.size, weight) + _LABEL_PAD + (_BADGE if bar.number else 0.0)
        )

    def _axis(self, room: float) -> tuple[list[float], list[float]]:
        """Return the times of all begins and ends, and where they lie: so that names fit.

        From left to right every time is put as near as the bars that end then allow; if there is
        room, all is spread evenly, but not so far that names are lost in their bars.
        """
        times = sorted({time for bar in self.bars for time in (bar.span.start_us, bar.span.end_us)})
        ending: dict[float, list[_Bar]] = {}
        for bar in self.bars:
            ending.setdefault(bar.span.end_us, []).append(bar)
        released: dict[float, list[float]] = {}
        for wait, signals in self.timeline.matches.items():
            for signal in signals:
                end = self.timeline.by_key[signal].end_us
                released.setdefault(self.timeline.by_key[wait].end_us, []).append(end)
        at: dict[float, float] = {}
        x = 0.0
        for place, time in enumerate(times):
            x += _STEP if place else 0.0
            for bar in ending.get(time, ()):
                if bar.span.start_us < time:
                    x = max(x, at[bar.span.start_us] + self._needed(bar))
            for end in released.get(time, ()):
                if end < time:
                    x = max(x, at[end] + _ARROW_ROOM)
            at[time] = x
        most = _MOST_WIDTH - self.left - _MARGIN
        factor = min(max(1.0, room / x), _MOST_SPREAD, most / x) if x else 1.0
        return times, [factor * at[time] for time in times]

    def _x(self, time_us: float) -> float:
        return self.places[bisect.bisect_left(self.times, time_us)]

    # ---- above the picture -------------------------------------------------------------------

    def _header(self) -> list[_Line]:
        timeline = self.timeline
        room = self.width - 2 * _MARGIN
        lines = [] if self.title is None else [_Line(plain(self.title), _TITLE, "bold")]
        lines.append(_Line(plain(headline(timeline)), _TITLE, "bold"))
        facts = "  ·  ".join(map(plain, conditions(timeline)))
        lines += [_Line(text, colour=GREY) for text in _wrapped(facts, _TEXT, room)]
        for note in timeline.notes:
            texts = _wrapped(plain(note), _CAPTION, room)
            if len(texts) > _MOST_CAPTION:
                texts[_MOST_CAPTION - 1 :] = [texts[_MOST_CAPTION - 1] + " …"]
            lines += [
                _Line(text, _CAPTION, above=0.0 if place else _PARAGRAPH)
                for place, text in enumerate(texts)
            ]
        for number, mark in enumerate(timeline.marks[:_MOST_LISTED], 1):
            begun = mark.key in timeline.by_key
            does = ", and ".join(filter(None, (mark.role, "" if begun else "has not begun")))
            text = f"{mark.name} (rank {mark.rank}, stream {mark.stream}) {does}"
            text = fitted(plain(text), _TEXT, (room - _BADGE - 0.05) / _SLACK)
            above = _PARAGRAPH if number == 1 else 0.0
            lines.append(_Line(text, colour=FAULT_INK, number=number, above=above))
        more = len(timeline.marks) - _MOST_LISTED
        if more > 0:
            lines.append(_Line(f"and {more} more, numbered in the picture", colour=FAULT_INK))
        idle = timeline.world_size - len(self.ranks)
        if idle:
            text = f"Without a part in it, and left out: {idle} of {timeline.world_size} ranks"
            lines.append(_Line(text, colour=GREY, above=_PARAGRAPH))
        return lines

    # ---- the drawing -------------------------------------------------------------------------

    def draw(self) -> Figure:
        handles = self._legend()
        legend = legend_height(handles, self.width)
        header = sum(_LINE[line.size] + line.above for line in self.header) + _GAP
        below = 0.24 + legend
        height = _TOP + header + self.height + below
        figure = new_figure(self.width, height)
        page = figure.add_axes((0.0, 0.0, 1.0, 1.0), zorder=-1)
        axes = figure.add_axes(
            (
                self.left / self.width,
                below / height,
                self.places[-1] / self.width,
                self.height / height,
            )
        )
        for each, (right, bottom) in (
            (page, (self.width, height)),
            (axes, (self.places[-1], self.height)),
        ):
            each.set_axis_off()
            each.set_xlim(0.0, right)
            each.set_ylim(bottom, 0.0)
        self._draw_header(page)
        self._draw_ranks(axes)
        self._draw_together(axes)
        for bar in self.bars:
            self._draw_bar(axes, bar)
        self._draw_arrows(axes)
        self._draw_direction(axes)
        legend_below(figure, handles)
        return figure

    def _draw_header(self, page: Axes) -> None:
        y = _TOP
        for line in self.header:
            middle = y + line.above + 0.5 * _LINE[line.size]
            x = _MARGIN
            if line.number:
                self._draw_badge(page, x + 0.5 * _BADGE - 0.02, middle, line.number, 0.062)
                x += _BADGE + 0.05
            page.text(
                x,
                middle,
                line.text,
                fontsize=line.size,
                fontweight=line.weight,
                color=line.colour,
                va="center_baseline",
            )
            y += _LINE[line.size] + line.above

    def _draw_ranks(self, axes: Axes) -> None:
        for position, one in enumerate(self.ranks):
            if position % 2 == 0:
                band = Rectangle(
                    (0.0, one.top),
                    self.places[-1],
                    one.bottom - one.top,
                    facecolor="#F1F2F5",
                    linewidth=0,
                    zorder=0,
                )
                axes.add_patch(band)
            axes.text(
                _MARGIN - self.left,
                0.5 * (one.top + one.bottom),
                f"rank {one.rank}",
                fontsize=_TEXT,
                fontweight="bold",
                color=INK,
                va="center",
            )
            for row in one.rows:
                axes.text(
                    -0.08,
                    row.top + 0.5 * self.bar,
                    fitted(plain(row.stream), self.size, MOST_NAME),
                    fontsize=self.size,
                    color=GREY,
                    ha="right",
                    va="center_baseline",
                )

    def _draw_together(self, axes: Axes) -> None:
        """Shade the end of the picture, from where all that goes on then has begun."""
        ongoing = [bar for bar in self.bars if bar.mark is not None and bar.mark.ongoing]
        if len(ongoing) < 2:
            return
        left = max(self._x(bar.span.start_us) for bar in ongoing)
        shade = Rectangle(
            (left, 0.0),
            self.places[-1] - left,
            self.height,
            facecolor=lighter(FAULT, 0.86),
            linewidth=0,
            zorder=1,
        )
        shade.set_gid("together")
        axes.add_patch(shade)

    def _draw_bar(self, axes: Axes, bar: _Bar) -> None:
        look = GROUPS[group_of(bar.span.kind)]
        left, right = self._x(bar.span.start_us), self._x(bar.span.end_us)
        at_fault = bar.number > 0
        face, edge, ink = lighter(look.face, 0.72), lighter(look.edge, 0.35), INK
        if at_fault and bar.begun:
            face, edge, ink = look.face, FAULT, (FAULT_INK if look.outlined else look.ink)
        elif at_fault:
            face, edge, ink = "#FFFFFF", FAULT, FAULT_INK
        inset = 0.012 if at_fault else 0.0
        shape = Rectangle(
            (left + inset, bar.top + inset),
            max(right - left - 2 * inset, 0.015),
            self.bar - 2 * inset,
            facecolor=face,
            edgecolor=edge,
            linewidth=2.0 if at_fault else 0.6,
            linestyle="solid" if bar.begun else (0, (2.2, 1.4)),
            joinstyle="miter",
            zorder=4 if at_fault else 3,
        )
        key = bar.span.key
        shape.set_gid(f"{'mark' if at_fault else 'span'}-{_id(key)}")
        axes.add_patch(shape)
        middle = bar.top + 0.5 * self.bar
        if at_fault:
            radius = min(0.07, 0.36 * self.bar)
            self._draw_badge(axes, left + radius + 0.04, middle, bar.number, radius)
        if self.size < _SMALLEST or self._needed(bar) > right - left + 1e-6:
            return
        axes.text(
            0.5 * (left + right + (_BADGE if at_fault else 0.0)),
            middle,
            bar.label,
            fontsize=self.size,
            fontweight="bold" if at_fault else "normal",
            color=ink,
            ha="center",
            va="center_baseline",
            zorder=7,
            path_effects=[withStroke(linewidth=2.0, foreground=face)],
        )

    def _draw_badge(self, axes: Axes, x: float, y: float, number: int, radius: float) -> None:
        circle = Circle(
            (x, y), radius, facecolor=FAULT, edgecolor="white", linewidth=0.6, zorder=7.5
        )
        axes.add_patch(circle)
        axes.text(
            x,
            y,
            str(number),
            fontsize=1.35 * radius * POINTS if number < 10 else 1.05 * radius * POINTS,
            fontweight="bold",
            color="white",
            ha="center",
            va="center_baseline",
            zorder=8,
        )

    def _arrows(self) -> Iterator[tuple[_Bar, _Bar]]:
        """Yield signal and wait wherever one released the other, but not within one row."""
        bar_of = {bar.span.key: bar for bar in self.bars}
        for wait, signals in self.timeline.matches.items():
            for signal in signals:
                if bar_of[signal].top != bar_of[wait].top:
                    yield bar_of[signal], bar_of[wait]

    def _draw_arrows(self, axes: Axes) -> None:
        """Draw an arrow from the end of every signal to the end of the wait that it released.

        A kernel that waits, and a wait that goes on for another reason, has it where it came.
        """
        for source, target in self._arrows():
            tail, head = self._x(source.span.end_us), self._x(target.span.end_us)
            goes_on = target.mark is not None and target.mark.ongoing
            if target.span.kind != "wait" or goes_on:
                came = max(tail, self._x(target.span.start_us))
                head = min(head, came + _ARROW_ROOM)
            down = target.top > source.top
            arrow = FancyArrowPatch(
                (min(tail, head), source.top + 0.5 * self.bar),
                (head, target.top + (0.0 if down else self.bar)),
                arrowstyle="-|>,head_length=2.6,head_width=1.5",
                mutation_scale=1.0,
                shrinkA=0.0,
                shrinkB=0.0,
                linewidth=0.9,
                color=SIGNAL,
                zorder=6,
                path_effects=[withStroke(linewidth=2.2, foreground="white")],
            )
            arrow.set_gid(f"signal-{_id(source.span.key)}-to-{_id(target.span.key)}")
            axes.add_patch(arrow)

    def _draw_direction(self, axes: Axes) -> None:
        """Say under the picture which way things go."""
        y = self.height + 0.13
        axes.text(0.0, y, _NOTE, fontsize=_TEXT, color=GREY, va="center_baseline")
        start = text_width(_NOTE, _TEXT) + 0.12
        if start + 0.5 < self.places[-1]:
            arrow = FancyArrowPatch(
                (start, y),
                (self.places[-1], y),
                arrowstyle="-|>,head_length=3,head_width=1.6",
                mutation_scale=1.0,
                shrinkA=0.0,
                shrinkB=0.0,
                linewidth=0.7,
                color=GREY,
                clip_on=False,
            )
            axes.add_patch(arrow)

    def _legend(self) -> list[Artist]:
        shown = {group_of(bar.span.kind) for bar in self.bars if bar.begun}
        handles: list[Artist] = [
            Patch(
                facecolor=lighter(look.face, 0.72),
                edgecolor=lighter(look.edge, 0.35),
                linewidth=0.6,
                label=look.label,
            )
            for name, look in GROUPS.items()
            if name in shown
        ]
        if any(True for _ in self._arrows()):
            handles.append(
                Line2D([], [], color=SIGNAL, linewidth=0.9, marker=">", markersize=3.5,
                       markevery=[1], label="signal, and the wait it is for")
            )  # fmt: skip
        if self.number_of:
            handles.append(
                Patch(
                    facecolor="white", edgecolor=FAULT, linewidth=1.6, label="named by the finding"
                )
            )
        if any(not bar.begun for bar in self.bars):
            handles.append(
                Patch(facecolor="white", edgecolor=FAULT, linewidth=1.2, linestyle=(0, (2, 1.2)),
                      label="has not begun")
            )  # fmt: skip
        if sum(mark.ongoing for mark in self.timeline.marks) > 1:
            handles.append(
                Patch(
                    facecolor=lighter(FAULT, 0.86), linewidth=0, label="all of these go on at once"
                )
            )
        return handles


def _bar_height(spans: Sequence[Span]) -> float:
    lanes = len({(span.rank, span.stream) for span in spans})
    return max(_LEAST_BAR, min(_BAR, _LANE_ROOM / lanes - _LANE_GAP))


def _without_overlap(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Split the spans of a stream over several rows where one goes on while the next has begun."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_us, span.end_us, span.call)):
        for row in rows:
            if row[-1].end_us <= span.start_us:
                row.append(span)
                break
        else:
            rows.append([span])
    yield from rows


def _wrapped(text: str, size: float, room: float) -> list[str]:
    """Return `text` in lines no wider than `room` inches, as far as words allow."""
    lines: list[str] = []
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and _SLACK * text_width(longer, size) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _id(key: SpanKey) -> str:
    return f"{key.call}-{key.rank}-{key.operation}"
