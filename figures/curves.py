"""Speed-up curves: how methods compare with a baseline as m grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.figures.files import check_figure_path
from stretto.figures.style import GREY, INK, METHOD_COLOURS, METHOD_MARKERS, ROOF_DASHES
from stretto.schedules.language import InvalidInput

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CurvePoint", "speedup_curve"]

_LEFT, _RIGHT, _BOTTOM, _TOP = 0.56, 0.15, 0.38, 0.12


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One method at one m.

    Attributes
    ----------
    method
        Name in the legend.
    m
        Global rows.
    ratio
        Time of the baseline over time of the method; None if the case was skipped, which the
        figure shows as a cross at its foot.
    low, high
        An interval around the ratio, if there is one.
    """

    method: str
    m: int
    ratio: float | None
    low: float | None = None
    high: float | None = None


def speedup_curve(
    rows: Sequence[CurvePoint],
    path: Path | None = None,
    *,
    baseline: str = "baseline",
    title: str | None = None,
    width: float = 5.0,
    height: float = 3.0,
) -> Figure:
    """Draw the ratio to the baseline over m, one line a method.

    Parameters
    ----------
    rows
        In any order; methods appear in the order of their first row.
    path
        Where to write the figure: PNG, SVG or PDF, by its ending.
    baseline
        Its name, for the axis.
    title
        A line above everything.
    width, height
        Of the figure, in inches, without the legend.

    Returns
    -------
    matplotlib.figure.Figure
        Apart from pyplot and its global state.

    Raises
    ------
    InvalidInput
        If there is nothing to draw, a number is no positive one, or `path` cannot be written.
    """
    if path is not None:
        check_figure_path(path)
    methods = _by_method(rows)
    from stretto.figures.canvas import drawing_style, save_figure

    with drawing_style():
        figure = _composed(methods, baseline, title, width, height)
    if path is not None:
        save_figure(figure, path)
    return figure


def _by_method(rows: Sequence[CurvePoint]) -> dict[str, list[CurvePoint]]:
    methods: dict[str, list[CurvePoint]] = {}
    for row in rows:
        numbers = (row.m, row.ratio, row.low, row.high)
        if any(number is not None and not 0 < number < math.inf for number in numbers):
            raise InvalidInput(f"m and ratios must be above zero; {row.method!r} has {row}.")
        methods.setdefault(row.method, []).append(row)
    if not any(row.ratio is not None for row in rows):
        raise InvalidInput("There is no ratio to draw; give at least one.")
    if len(methods) > len(METHOD_COLOURS):
        raise InvalidInput(
            f"{len(methods)} methods are more than one figure can tell apart; "
            f"give at most {len(METHOD_COLOURS)}."
        )
    return {name: sorted(points, key=lambda row: row.m) for name, points in methods.items()}


def _composed(
    methods: dict[str, list[CurvePoint]],
    baseline: str,
    title: str | None,
    width: float,
    height: float,
) -> Figure:
    from stretto.figures.canvas import legend_below, legend_height, new_figure, plain

    figure = new_figure(width, height)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    handles = [
        _draw_method(axes, points, METHOD_COLOURS[place], METHOD_MARKERS[place], name)
        for place, (name, points) in enumerate(methods.items())
    ]
    legend = legend_height(handles, width)
    top = _TOP + (0.2 if title else 0.0)
    total = height + legend
    figure.set_figheight(total)
    axes.set_position(
        (
            _LEFT / width,
            (legend + _BOTTOM) / total,
            1.0 - (_LEFT + _RIGHT) / width,
            (height - _BOTTOM - top) / total,
        )
    )
    if title:
        at = (_LEFT / width, 1.0 - 0.16 / total)
        figure.text(*at, plain(title), fontsize=9.0, fontweight="bold", va="center")
    rows = sorted({row.m for points in methods.values() for row in points})
    _draw_frame(axes, rows, baseline, width - _LEFT - _RIGHT)
    legend_below(figure, handles)
    return figure


def _draw_method(
    axes: Axes, points: list[CurvePoint], colour: str, marker: str, name: str
) -> Artist:
    from stretto.figures.canvas import plain

    drawn = [(row, row.ratio) for row in points if row.ratio is not None]
    if any(row.low is not None or row.high is not None for row, _ in drawn):
        axes.fill_between(
            [row.m for row, _ in drawn],
            [ratio if row.low is None else row.low for row, ratio in drawn],
            [ratio if row.high is None else row.high for row, ratio in drawn],
            color=colour,
            alpha=0.18,
            linewidth=0,
        ).set_gid(f"interval-{name}")
    (line,) = axes.plot(
        [row.m for row, _ in drawn],
        [ratio for _, ratio in drawn],
        color=colour,
        marker=marker,
        markersize=4.2,
        markeredgecolor="white",
        markeredgewidth=0.4,
        linewidth=1.3,
        label=plain(name),
    )
    line.set_gid(f"method-{name}")
    skipped = [row.m for row in points if row.ratio is None]
    if skipped:
        (crosses,) = axes.plot(
            skipped,
            [0.0] * len(skipped),
            transform=axes.get_xaxis_transform(),
            color=colour,
            linestyle="none",
            marker="x",
            markersize=4.0,
            clip_on=False,
        )
        crosses.set_gid(f"skipped-{name}")
    return line


def _draw_frame(axes: Axes, rows: list[int], baseline: str, inches: float) -> None:
    from stretto.figures.canvas import plain

    axes.set_xscale("log", base=2)
    axes.margins(x=0.03, y=0.08)
    ticks = _legible(rows, inches)
    axes.set_xticks(ticks, [str(m) for m in ticks])
    axes.set_xticks(rows, [""] * len(rows), minor=True)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.95), max(high, 1.05))
    axes.axhline(1.0, color=INK, linewidth=0.9, linestyle=ROOF_DASHES, zorder=1)
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(GREY)
    axes.tick_params(which="both", color=GREY, labelcolor=INK, labelsize=7.0)
    axes.set_xlabel("m (global rows)", fontsize=7.0, color=INK, labelpad=2.0)
    axes.set_ylabel(f"speed-up over {plain(baseline)}", fontsize=7.0, color=INK)


def _legible(rows: list[int], inches: float) -> list[int]:
    """Return the values of m whose labels do not touch each other on an axis of so many inches."""
    from stretto.figures.canvas import text_width

    octaves = math.log2(rows[-1] / rows[0]) or 1.0
    kept: list[int] = []
    free = 0.0
    for m in rows:
        x = math.log2(m / rows[0]) / octaves * inches
        half = 0.5 * text_width(str(m), 7.0) + 0.04
        if not kept or x - half >= free:
            kept.append(m)
            free = x + half
    return kept
