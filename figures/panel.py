"""One panel of a timeline figure: header, marks, ranks and streams, calls; `Bars` does the spans.

Imported only when something is drawn.  All lengths are inches until they reach matplotlib; the
axes of a panel have time across and lane units down, so a lane is equally high in all panels.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from stretto.figures.bars import Bars
from stretto.figures.canvas import MOST_NAME, POINTS, fitted, plain, text_width
from stretto.figures.describe import conditions, headline, key_numbers
from stretto.figures.lanes import Block, Layout, Scale
from stretto.figures.style import EXPOSED_EDGE, GREY, INK, ROOF_DASHES, group_of, long_number
from stretto.schedules.language import Span, Timeline

__all__ = ["Panel"]

_TITLE, _TEXT, _NOTE = 8.0, 7.0, 6.5  # points
_LINE_HEIGHT = {_TITLE: 0.165, _TEXT: 0.140, _NOTE: 0.130}  # inches
_MARK_ROW = 0.135
_HEADER_GAP = 0.05
_MOST_CALLS_NAMED = 12
_MOST_NOTES = 4
_CLOSEST_CALLS = 5.0  # points from one separator to the next, on average
_DOT = "  ·  "


@dataclass(frozen=True)
class _Mark:
    """A labelled vertical line; `row` counts from the axes upwards."""

    name: str
    time_us: float
    row: int


@dataclass(frozen=True)
class _Line:
    """A line of the header."""

    text: str
    size: float
    weight: str = "normal"
    colour: str = GREY


@dataclass
class Panel:
    """One timeline, ready to be drawn; `header_height` and `axes_height` say what room it needs.

    Attributes
    ----------
    index
        Of the panel in its figure.
    timeline, layout, scale
        What, in which lanes, and how large.
    """

    index: int
    timeline: Timeline
    layout: Layout
    scale: Scale
    _calls: list[tuple[int, float]] = field(init=False)
    _marks: list[_Mark] = field(init=False)
    _header: list[_Line] = field(init=False)
    _numbers: str | None = field(init=False)

    def __post_init__(self) -> None:
        self._calls = self._named_calls()
        self._marks = self._placed_marks()
        self._header, self._numbers = self._header_lines()

    @property
    def axes_height(self) -> float:
        """Height of the axes."""
        return self.layout.height * self.scale.lane

    @property
    def header_height(self) -> float:
        """Height of all that stands above the axes."""
        lines = sum(_LINE_HEIGHT[line.size] for line in self._header)
        return lines + _HEADER_GAP + _MARK_ROW * (1 + max(mark.row for mark in self._marks))

    @property
    def groups(self) -> set[str]:
        """Groups of kinds that are drawn, for the legend."""
        return {group_of(kind) for kind in self.layout.kinds}

    @property
    def has_exposed(self) -> bool:
        """Whether any strip has something in it."""
        return self.timeline.exposed_comm_us > 0

    @property
    def shows_calls(self) -> bool:
        """Whether there is more than one call, and room for a line where each begins."""
        calls = len({span.call for span in self.timeline.spans})
        return 1 < calls <= self.scale.width * POINTS / _CLOSEST_CALLS

    def draw(self, axes: Axes) -> None:
        """Draw everything into `axes`, which has the room that was asked for."""
        axes.set_ylim(self.layout.height, 0.0)
        axes.set_xlim(0.0, self.scale.longest)
        self._draw_frame(axes)
        self._draw_header(axes)
        for position, block in enumerate(self.layout.blocks):
            self._draw_block(axes, block, position)
        marks = [mark.time_us / self.scale.unit_us for mark in self._marks]
        Bars(self.timeline, self.layout, self.scale, f"panel{self.index}", marks).draw(axes)
        if self.shows_calls:
            self._draw_calls(axes)
        for mark in self._marks:
            self._draw_mark(axes, mark)

    # Above the axes: header, then marks, then the names of calls.

    def _header_lines(self) -> tuple[list[_Line], str | None]:
        """Return the lines, and the numbers if they fit to the right of the first line."""
        room = self.scale.width + self.scale.right - 0.1
        title, items = plain(headline(self.timeline)), key_numbers(self.timeline)
        numbers = _DOT.join(items)
        lines = [_Line(text, _TITLE, "bold", INK) for text in _wrapped(title, _TITLE, room)]
        beside = (
            text_width(title, _TITLE, "bold") + text_width(numbers, _TEXT) + 0.3 <= self.scale.width
        )
        if not beside:
            lines += [_Line(text, _TEXT, colour=INK) for text in _listed(items, room)]
        lines += [_Line(text, _TEXT) for text in _listed(conditions(self.timeline), room)]
        notes = [*self.layout.notes, *self.timeline.notes]
        if len({span.call for span in self.timeline.spans}) > 1 and not self.shows_calls:
            notes.insert(0, "The calls are too many to mark where each begins.")
        if len(notes) > _MOST_NOTES:
            notes[_MOST_NOTES - 1 :] = [f"{len(notes) - _MOST_NOTES + 1} more notes."]
        lines += [_Line(text, _NOTE) for note in notes for text in _wrapped(note, _NOTE, room)]
        return lines, numbers if beside else None

    def _draw_header(self, axes: Axes) -> None:
        top = self.axes_height + self.header_height
        if self._numbers is not None:
            y = (top - 0.5 * _LINE_HEIGHT[_TITLE] + 0.005) / self.axes_height
            axes.text(
                1.0,
                y,
                self._numbers,
                transform=axes.transAxes,
                fontsize=_TEXT,
                color=INK,
                ha="right",
                va="center",
            )
        for line in self._header:
            top -= _LINE_HEIGHT[line.size]
            axes.text(
                0.0,
                (top + 0.03) / self.axes_height,
                line.text,
                transform=axes.transAxes,
                fontsize=line.size,
                fontweight=line.weight,
                color=line.colour,
                va="bottom",
            )

    def _placed_marks(self) -> list[_Mark]:
        """Return makespan and roof; the later is a row higher where their labels would meet."""
        named = [("makespan", self.timeline.makespan_us)]
        if self.timeline.roof_us is not None:
            named.append(("roof", self.timeline.roof_us))
        row = 1 if self._calls else 0
        marks: list[_Mark] = []
        for name, time_us in sorted(named, key=lambda mark: mark[1]):
            mark = _Mark(name, time_us, row)
            if marks and self._label_left(mark) < self.scale.inches(marks[0].time_us) + 0.08:
                mark = _Mark(name, time_us, row + 1)
            marks.append(mark)
        return marks

    def _label_left(self, mark: _Mark) -> float:
        return self.scale.inches(mark.time_us) - text_width(self._mark_text(mark), _TEXT) - 0.05

    def _mark_text(self, mark: _Mark) -> str:
        number = long_number(mark.time_us / self.scale.unit_us)
        return f"{mark.name} {number} {self.scale.unit_name}"

    def _draw_mark(self, axes: Axes, mark: _Mark) -> None:
        x = mark.time_us / self.scale.unit_us
        line = LineCollection(
            [((x, self._above(mark.row + 1)), (x, self.layout.height))],
            colors=INK,
            linewidths=0.9,
            linestyles="solid" if mark.name == "makespan" else ROOF_DASHES,
            zorder=6,
            clip_on=False,
        )
        line.set_gid(f"panel{self.index}-{mark.name}")
        axes.add_collection(line, autolim=False)
        left = self._label_left(mark) >= 0
        axes.annotate(
            self._mark_text(mark),
            (x, self._above(mark.row + 0.5)),
            xytext=(-3.0 if left else 3.0, 0.0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=_TEXT,
            color=INK,
            annotation_clip=False,
        )

    def _above(self, row: float) -> float:
        """Return the lane coordinate of a row above the axes."""
        return -row * _MARK_ROW / self.scale.lane

    # The axes: frame, ranks and streams, calls.

    def _draw_frame(self, axes: Axes) -> None:
        axes.set_yticks([])
        axes.set_axisbelow(True)
        axes.grid(axis="x", color="#D9D9D9", linewidth=0.5, zorder=0.5)
        axes.patch.set_visible(False)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(GREY)
        axes.tick_params(axis="x", color=GREY, labelcolor=INK, labelsize=_TEXT)
        if self.has_exposed and self._named_blocks:
            self._beside(axes, self._above(0.5), "exposed, µs")

    def _draw_block(self, axes: Axes, block: Block, position: int) -> None:
        if position % 2 == 0:
            axes.axhspan(block.top, block.bottom, color="#F1F2F5", linewidth=0, zorder=0)
        transform = axes.get_yaxis_transform()
        if self._named_blocks or position % 8 == 0:
            axes.text(
                -(self.scale.left - 0.08) / self.scale.width,
                0.5 * (block.top + block.bottom),
                f"rank {block.rank}",
                transform=transform,
                fontsize=_TEXT,
                fontweight="normal" if self.layout.tight else "bold",
                color=INK,
                va="center",
            )
        for lane in () if self.layout.tight else block.lanes:
            axes.text(
                -0.06 / self.scale.width,
                lane.top + 0.5 * lane.height,
                fitted(plain(lane.name), self._small, MOST_NAME),
                transform=transform,
                fontsize=self._small,
                color=GREY,
                ha="right",
                va="center",
            )
        if self.has_exposed and self._named_blocks:
            exposed = self.timeline.shares[block.rank].exposed_comm_us
            y = block.strip_top + 0.5 * block.strip_height
            lowest = block.bottom - 0.05 / self.scale.lane
            self._beside(axes, min(y, lowest), long_number(exposed))

    @property
    def _named_blocks(self) -> bool:
        """Whether a block is high enough for a line of text."""
        smallest = min(block.bottom - block.top for block in self.layout.blocks)
        return smallest * self.scale.lane >= 0.11

    @property
    def _small(self) -> float:
        """Size of type that fits into one lane."""
        return min(_NOTE, 0.84 * self.scale.lane * POINTS)

    def _beside(self, axes: Axes, y: float, text: str) -> None:
        """Write about exposed communication to the right of the axes."""
        axes.text(
            1.0 + 0.07 / self.scale.width,
            y,
            text,
            transform=axes.get_yaxis_transform(),
            fontsize=_NOTE if y < 0 else self._small,
            color=EXPOSED_EDGE,
            va="center",
        )

    def _named_calls(self) -> list[tuple[int, float]]:
        """Return call and first start of every call, if their names fit above the axes."""
        first: dict[int, float] = {}
        for span in self.timeline.spans:
            start = span.start_us - self.timeline.start_us
            first[span.call] = min(first.get(span.call, start), start)
        calls = sorted(first.items(), key=lambda call: call[1])
        if not 1 < len(calls) <= _MOST_CALLS_NAMED:
            return []
        ends = [self.scale.inches(start) for _, start in calls[1:]] + [self.scale.width]
        fits = (
            self.scale.inches(start) + text_width(f"call {number}", _NOTE) + 0.08 <= end
            for (number, start), end in zip(calls, ends, strict=True)
        )
        return calls if all(fits) else []

    def _draw_calls(self, axes: Axes) -> None:
        """Draw where every call begins: on each lane, since ranks and streams are not in step."""
        lines = [
            ((x, lane.top), (x, lane.top + lane.height))
            for lane in self.layout.lanes
            for x in self._call_starts(lane.spans)
        ]
        separators = LineCollection(lines, colors=INK, linewidths=0.6, zorder=5.5)
        separators.set_gid(f"panel{self.index}-calls")
        axes.add_collection(separators, autolim=False)
        for number, start in self._calls:
            axes.annotate(
                f"call {number}",
                (start / self.scale.unit_us, self._above(0.5)),
                xytext=(1.0, 0.0),
                textcoords="offset points",
                va="center",
                fontsize=_NOTE,
                color=GREY,
                annotation_clip=False,
            )

    def _call_starts(self, spans: Iterable[Span]) -> list[float]:
        """Return where the second and every later call begins among the spans of one lane."""
        first: dict[int, float] = {}
        for span in spans:
            first[span.call] = min(first.get(span.call, span.start_us), span.start_us)
        starts = sorted(first.values())[1:]
        return [(start - self.timeline.start_us) / self.scale.unit_us for start in starts]


def _wrapped(text: str, size: float, room: float) -> list[str]:
    """Return `text` in lines no wider than `room` inches, as far as words allow."""
    text = plain(text)
    width = text_width(text, size, "bold")
    if width <= room:
        return [text]
    return textwrap.wrap(text, max(8, int(len(text) * room / max(width, room))))


def _listed(items: Iterable[str], room: float) -> list[str]:
    """Return items with dots between them, in lines no wider than `room` inches."""
    lines: list[str] = []
    for item in map(plain, items):
        longer = f"{lines[-1]}{_DOT}{item}" if lines else item
        if lines and text_width(longer, _TEXT) <= room:
            lines[-1] = longer
        else:
            lines += _wrapped(item, _TEXT, room)
    return lines
