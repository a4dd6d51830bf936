"""Overlap timelines: what every rank did and when, several executions on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.figures.files import check_figure_path
from stretto.figures.lanes import Detail, Layout, Scale, checked, chosen_detail, lay_out
from stretto.figures.style import (
    EXPOSED_EDGE,
    EXPOSED_FACE,
    EXPOSED_HATCH,
    GROUPS,
    INK,
)
from stretto.schedules.language import InvalidInput, Timeline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

    from stretto.figures.panel import Panel

__all__ = ["draw_timeline"]

_MILLISECONDS_FROM_US = 10_000.0
_LANE_ROOM = 7.0  # inches that all lanes together should take, if that keeps them legible
_LEAST_LANE, _MOST_LANE = 0.088, 0.25
_AXIS_HEIGHT, _PANEL_GAP, _TITLE_HEIGHT, _TOP = 0.36, 0.22, 0.27, 0.08


def draw_timeline(
    timelines: Timeline | Sequence[Timeline],
    path: Path | None = None,
    *,
    title: str | None = None,
    detail: Detail = "auto",
    width: float = 9.0,
) -> Figure:
    """Draw timelines one above the other on a shared time axis, each from its own start.

    A counterexample of the verifier is drawn by itself and without an axis: it has no times.

    Parameters
    ----------
    timelines
        At least one; say, a measured one and the simulation of the same Program.
    path
        Where to write the figure: PNG, SVG or PDF, by its ending.  The same timelines give the
        same bytes.
    title
        A line above everything.
    detail
        ``streams`` (a lane per rank and stream), ``ranks`` (a row per rank), ``extremes``
        (the fastest, the median and the slowest rank); ``auto`` takes the first that is legible.
    width
        Of the figure, in inches; the height follows.  A counterexample is wider if its names need
        it, and always shows streams.

    Returns
    -------
    matplotlib.figure.Figure
        Apart from pyplot and its global state.

    Raises
    ------
    InvalidInput
        If there is nothing to draw, a counterexample is to share a figure, or `path` cannot be
        written (before anything is drawn).
    """
    if path is not None:
        check_figure_path(path)
    timelines = checked(timelines)
    if width < 4.0:
        raise InvalidInput(f"A timeline {width} inches wide is illegible; give 4 or more.")
    shows_order = any(timeline.origin == "counterexample" for timeline in timelines)
    if shows_order and len(timelines) > 1:
        raise InvalidInput("A counterexample has no times to compare; draw it by itself.")
    from stretto.figures.canvas import drawing_style, save_figure

    with drawing_style():
        if shows_order:
            from stretto.figures.counterexample import compose_counterexample

            figure = compose_counterexample(timelines[0], title, width)
        else:
            figure = _composed(timelines, title, chosen_detail(timelines, detail), width)
    if path is not None:
        save_figure(figure, path)
    return figure


def _composed(
    timelines: Sequence[Timeline], title: str | None, detail: Detail, width: float
) -> Figure:
    from stretto.figures.canvas import legend_below, legend_height, new_figure, plain
    from stretto.figures.panel import Panel

    layouts = [lay_out(timeline, detail) for timeline in timelines]
    scale = _scale(timelines, layouts, width)
    panels = [
        Panel(index, timeline, layout, scale)
        for index, (timeline, layout) in enumerate(zip(timelines, layouts, strict=True))
    ]
    handles = _legend_handles(panels)
    legend = legend_height(handles, width)
    above = _TOP + (_TITLE_HEIGHT if title else 0.0)
    panel_heights = [panel.header_height + panel.axes_height for panel in panels]
    height = above + sum(panel_heights) + _PANEL_GAP * (len(panels) - 1) + _AXIS_HEIGHT + legend
    figure = new_figure(width, height)
    if title:
        figure.text(
            scale.left / width,
            1.0 - (_TOP + 0.4 * _TITLE_HEIGHT) / height,
            plain(title),
            va="center",
            fontsize=9.5,
            fontweight="bold",
            color=INK,
        )
    y = height - above
    first = None
    for panel, panel_height in zip(panels, panel_heights, strict=True):
        y -= panel_height
        axes = figure.add_axes(
            (scale.left / width, y / height, scale.width / width, panel.axes_height / height),
            sharex=first,
        )
        first = first or axes
        y -= _PANEL_GAP
        panel.draw(axes)
        last = panel is panels[-1]
        axes.tick_params(axis="x", labelbottom=last)
        if last:
            axes.set_xlabel(f"time ({scale.unit_name})", fontsize=7.0, color=INK, labelpad=2.0)
    if handles:
        legend_below(figure, handles)
    return figure


def _scale(timelines: Sequence[Timeline], layouts: Sequence[Layout], width: float) -> Scale:
    from stretto.figures.canvas import MOST_NAME, plain, text_width

    longest_us = max(max(timeline.makespan_us, timeline.roof_us or 0.0) for timeline in timelines)
    unit_us, unit_name = (1000.0, "ms") if longest_us >= _MILLISECONDS_FROM_US else (1.0, "µs")
    lanes = sum(layout.height for layout in layouts)
    names = {plain(lane.name) for layout in layouts if not layout.tight for lane in layout.lanes}
    streams = max((min(text_width(name, 6.5), MOST_NAME) + 0.14 for name in names), default=0.0)
    last_rank = max(timeline.world_size for timeline in timelines) - 1
    left = 0.14 + text_width(f"rank {last_rank}", 7.0, "bold") + streams
    right = 0.78
    return Scale(
        unit_us=unit_us,
        unit_name=unit_name,
        longest=1.004 * longest_us / unit_us or 1.0,
        width=width - left - right,
        left=left,
        right=right,
        lane=min(_MOST_LANE, max(_LEAST_LANE, _LANE_ROOM / lanes)),
    )


def _legend_handles(panels: Sequence[Panel]) -> list[Artist]:
    from matplotlib.patches import Patch

    shown = set().union(*(panel.groups for panel in panels))
    handles: list[Artist] = []
    for name, look in GROUPS.items():
        if name not in shown:
            continue
        if name == "signal":
            handles.append(_tick(look.edge, look.label, 1.4))
        else:
            handles.append(
                Patch(facecolor=look.face, edgecolor=look.edge, linewidth=0.5, label=look.label)
            )
    if any(panel.has_exposed for panel in panels):
        hatched = not panels[0].layout.tight
        handles.append(
            Patch(
                facecolor=EXPOSED_FACE if hatched else EXPOSED_EDGE,
                edgecolor=EXPOSED_EDGE,
                linewidth=0.4,
                hatch=EXPOSED_HATCH if hatched else None,
                label="exposed communication",
            )
        )
    if any(panel.shows_calls for panel in panels):
        handles.append(_tick(INK, "call begins", 0.6))
    return handles


def _tick(colour: str, label: str, width: float) -> Artist:
    from matplotlib.lines import Line2D

    return Line2D(
        [],
        [],
        color=colour,
        linestyle="none",
        marker="|",
        markersize=7,
        markeredgewidth=width,
        label=label,
    )
