"""Figures: timelines, tables, curves and trace export.

Loads without matplotlib and perfetto, which come in when something is drawn or written.
"""

from __future__ import annotations

from stretto.figures.curves import CurvePoint, speedup_curve
from stretto.figures.describe import summary_rows
from stretto.figures.files import check_figure_path
from stretto.figures.lanes import Detail
from stretto.figures.perfetto_trace import check_trace_path, write_trace
from stretto.figures.timeline import draw_timeline

__all__ = [
    "CurvePoint",
    "Detail",
    "check_figure_path",
    "check_trace_path",
    "draw_timeline",
    "speedup_curve",
    "summary_rows",
    "write_trace",
]
