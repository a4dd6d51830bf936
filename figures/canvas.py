"""matplotlib without pyplot: the settings it draws under, the size of text, bytes of a figure.

Imported only when something is drawn; `stretto.figures` itself loads without matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.textpath import text_to_path

from stretto.figures.files import FigureFormat, check_figure_path, write_whole
from stretto.figures.style import RC

__all__ = [
    "MOST_NAME",
    "POINTS",
    "drawing_style",
    "fitted",
    "legend_below",
    "legend_height",
    "new_figure",
    "plain",
    "save_figure",
    "text_width",
]

POINTS = 72.0
"""Points in an inch."""

MOST_NAME = 1.2
"""Inches for the longest name of a stream."""

_FONT = "DejaVu Sans"
_PNG_DPI = 200
_HANDLE_WIDTH = 0.42  # inches that one legend entry needs beside its text
_LEGEND_ROW = 0.16


@contextmanager
def drawing_style() -> Iterator[None]:
    """Draw with our settings and not those of the user's matplotlibrc; both are kept apart.

    matplotlib keeps its settings per process: two threads must not draw at the same time.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches that any thread may draw into memory."""
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Return the width of `text` in inches."""
    font = FontProperties(family=_FONT, size=size, weight=weight)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / POINTS


@lru_cache(maxsize=4096)
def plain(text: str) -> str:
    """Return `text` on one line, with a question mark for what the typeface has no letter for."""
    known = get_font(findfont(_FONT)).get_charmap()
    return "".join(letter if ord(letter) in known else "?" for letter in " ".join(text.split()))


def fitted(text: str, size: float, room: float) -> str:
    """Return `text`, cut with an ellipsis if it is wider than `room` inches."""
    while len(text) > 1 and text_width(text, size) > room:
        text = text.removesuffix("…")[:-1] + "…"
    return text


def legend_below(figure: Figure, handles: Sequence[Artist], size: float = 7.0) -> None:
    """Put a legend along the lower edge, in as few rows as fit; `legend_height` is its height."""
    columns = _legend_columns(handles, float(figure.get_figwidth()), size)
    figure.legend(
        handles=list(handles),
        loc="lower center",
        bbox_to_anchor=(0.5, 0.04 / float(figure.get_figheight())),
        ncols=columns,
        frameon=False,
        fontsize=size,
        handlelength=1.8,
        handleheight=0.9,
        columnspacing=1.4,
        handletextpad=0.5,
        borderaxespad=0.0,
        borderpad=0.2,
    )


def legend_height(handles: Sequence[Artist], figure_width: float, size: float = 7.0) -> float:
    """Return the inches that `legend_below` takes; a little space if there is no legend."""
    if not handles:
        return 0.1
    rows = -(-len(handles) // _legend_columns(handles, figure_width, size))
    return 0.1 + rows * _LEGEND_ROW


def save_figure(figure: Figure, path: Path) -> None:
    """Write `figure` as PNG, SVG or PDF, by the ending of `path`; the same figure, the same bytes.

    Raises
    ------
    InvalidInput
        If the ending is another one, or nothing can be written there.
    """
    file_format = check_figure_path(path)
    with drawing_style():
        data = _rendered(figure, file_format)
    write_whole(path, data)


def _rendered(figure: Figure, file_format: FigureFormat) -> bytes:
    undated: dict[FigureFormat, dict[str, None]] = {
        "png": {"Software": None},
        "svg": {"Date": None},
        "pdf": {"CreationDate": None},
    }
    buffer = io.BytesIO()
    figure.savefig(buffer, format=file_format, dpi=_PNG_DPI, metadata=undated[file_format])
    return buffer.getvalue()


def _legend_columns(handles: Sequence[Artist], figure_width: float, size: float) -> int:
    widest = max(text_width(str(handle.get_label()), size) for handle in handles) + _HANDLE_WIDTH
    total = sum(text_width(str(handle.get_label()), size) + _HANDLE_WIDTH for handle in handles)
    if total <= figure_width - 0.2:
        return len(handles)
    return max(1, int((figure_width - 0.2) // widest))
