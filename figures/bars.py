"""The bars of a timeline: spans by kind, what is written in them, and exposed communication.

Imported only when something is drawn.  Bars of one group are one collection, however many there
are; its gid (``panel0-gemm-bars``) is its name, in an SVG too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from stretto.figures.canvas import POINTS, plain, text_width
from stretto.figures.lanes import Lane, Layout, Scale, span_labels
from stretto.figures.style import EXPOSED_EDGE, EXPOSED_FACE, EXPOSED_HATCH, GROUPS, group_of
from stretto.schedules.language import Span, Timeline, exposed_intervals

__all__ = ["Bars"]

_FILL, _TIGHT_FILL = 0.80, 0.96  # of a lane's height
_SLIVER_POINTS = 1.6  # a white edge would eat narrower bars: theirs is of their own colour
_LABEL_SIZE, _SMALLEST_LABEL = 6.5, 4.6
_LABEL_PAD = 0.07
_LABELLED_SHARE = 0.7  # of the bars of a group; with fewer, labels look like chance
_TICK_POINTS = 1.1

_Corners = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class _Wish:
    """A label that a bar would like to have: its forms, longest first, and where there is room."""

    forms: tuple[str, ...]
    start: float
    end: float
    y: float
    size: float

    def text(self, form: int) -> str:
        return self.forms[min(form, len(self.forms) - 1)]


@dataclass
class Bars:
    """What is drawn of the spans of one timeline.

    Attributes
    ----------
    timeline, layout, scale
        What, in which lanes, and how large.
    name
        Prefix of every gid.
    marks
        Times, on the axis, of vertical lines that labels keep clear of.
    """

    timeline: Timeline
    layout: Layout
    scale: Scale
    name: str
    marks: Sequence[float]
    _bars: defaultdict[str, list[_Corners]] = field(init=False)
    _slivers: defaultdict[str, list[_Corners]] = field(init=False)
    _ticks: defaultdict[str, list[_Corners]] = field(init=False)
    _wishes: defaultdict[str, list[_Wish]] = field(init=False)

    def __post_init__(self) -> None:
        self._bars, self._slivers = defaultdict(list), defaultdict(list)
        self._ticks, self._wishes = defaultdict(list), defaultdict(list)
        for lane in self.layout.lanes:
            size = min(_LABEL_SIZE, 0.66 * _FILL * lane.height * self.scale.lane * POINTS)
            for span in lane.spans:
                self._sort_in(span, lane, size)

    def draw(self, axes: Axes) -> None:
        """Draw bars, labels and the strips of exposed communication."""
        for group in GROUPS:
            self._add_shapes(axes, group)
            self._add_labels(axes, group)
        self._add_exposed(axes)

    def _sort_in(self, span: Span, lane: Lane, size: float) -> None:
        group = group_of(span.kind)
        start, end = self._position(span.start_us), self._position(span.end_us)
        margin = 0.5 * lane.height * (1.0 - (_TIGHT_FILL if self.layout.tight else _FILL))
        low, high = lane.top + margin, lane.top + lane.height - margin
        points = self.scale.inches(span.duration_us) * POINTS
        if points <= (0.8 if group == "signal" else 0.0):
            self._ticks[group].append(((start, low), (start, high)))
            return
        corners = _corners(start, end, low, high)
        wide = points >= _SLIVER_POINTS and not self.layout.tight
        (self._bars if wide else self._slivers)[group].append(corners)
        if size >= _SMALLEST_LABEL:
            forms = tuple(plain(text) for text in span_labels(span))
            wish = _Wish(forms, start, end, 0.5 * (low + high), size)
            self._wishes[group].append(wish)

    def _position(self, time_us: float) -> float:
        return (time_us - self.timeline.start_us) / self.scale.unit_us

    def _add_shapes(self, axes: Axes, group: str) -> None:
        look = GROUPS[group]
        layer = 3.0 if look.outlined else 4.0
        for what, shapes, edge, width in (
            ("bars", self._bars[group], look.edge if look.outlined else "white", 0.5),
            ("slivers", self._slivers[group], look.edge, 0.25),
        ):
            if shapes:
                bars = PolyCollection(
                    list(np.asarray(shapes)),
                    facecolors=look.face,
                    edgecolors=edge,
                    linewidths=width,
                )
                bars.set_zorder(layer)
                bars.set_gid(f"{self.name}-{group}-{what}")
                axes.add_collection(bars, autolim=False)
        if self._ticks[group]:
            room = self.scale.width * POINTS * len(self.layout.blocks) / len(self._ticks[group])
            ticks = LineCollection(
                self._ticks[group],
                colors=look.edge,
                linewidths=min(_TICK_POINTS, max(0.25, 0.2 * room)),
            )
            ticks.set_zorder(layer + 0.5)
            ticks.set_gid(f"{self.name}-{group}-ticks")
            axes.add_collection(ticks, autolim=False)

    def _add_labels(self, axes: Axes, group: str) -> None:
        """Write the longest form of label that most bars of the group have room for, or none."""
        wishes = self._wishes[group]
        for form in range(max((len(wish.forms) for wish in wishes), default=0)):
            fit = sum(self._needed(wish, form) <= wish.end - wish.start for wish in wishes)
            if fit >= _LABELLED_SHARE * len(wishes):
                break
        else:
            return
        for wish in wishes:
            placed = self._placed(wish, form)
            if placed is not None:
                axes.text(
                    placed[0],
                    wish.y,
                    placed[1],
                    fontsize=wish.size,
                    color=GROUPS[group].ink,
                    ha="center",
                    va="center_baseline",
                    zorder=5,
                    clip_on=True,
                )

    def _placed(self, wish: _Wish, form: int) -> tuple[float, str] | None:
        """Return the middle and the text of a label: amid the bar or, if need be, beside a mark."""
        inside = [mark for mark in self.marks if wish.start < mark < wish.end]
        edges = sorted((wish.start, *inside, wish.end))
        for shorter in range(form, max(form + 1, len(wish.forms))):
            need = self._needed(wish, shorter)
            middle = 0.5 * (wish.start + wish.end)
            if need > wish.end - wish.start:
                continue
            if all(abs(mark - middle) >= 0.5 * need for mark in inside):
                return middle, wish.text(shorter)
            left, right = max(pairwise(edges), key=lambda part: part[1] - part[0])
            if need <= right - left:
                return 0.5 * (left + right), wish.text(shorter)
        return None

    def _needed(self, wish: _Wish, form: int) -> float:
        """Return the time that the label's width stands for."""
        inches = text_width(wish.text(form), wish.size) + _LABEL_PAD
        return inches / self.scale.width * self.scale.longest

    def _add_exposed(self, axes: Axes) -> None:
        exposed = exposed_intervals(self.timeline)
        shapes = []
        for block in self.layout.blocks:
            low, high = block.strip_top, block.strip_top + block.strip_height
            margin = 0.06 * block.strip_height
            for start, end in exposed[block.rank]:
                left, right = self._position(start), self._position(end)
                shapes.append(_corners(left, right, low + margin, high - margin))
        if not shapes:
            return
        # One path with one hatch: a collection would draw the hatch anew for every rectangle.
        hatched = not self.layout.tight
        strips = PathPatch(
            Outline.make_compound_path_from_polys(np.asarray(shapes)),
            facecolor=EXPOSED_FACE if hatched else EXPOSED_EDGE,
            edgecolor=EXPOSED_EDGE,
            linewidth=0.4 if hatched else 0.2,
            hatch=EXPOSED_HATCH if hatched else None,
            zorder=4,
        )
        strips.set_gid(f"{self.name}-exposed")
        axes.add_artist(strips)


def _corners(start: float, end: float, low: float, high: float) -> _Corners:
    return (start, low), (end, low), (end, high), (start, high)
