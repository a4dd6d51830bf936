"""How figures look: colours by kind, sizes of type, and the settings they are drawn under.

Colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which stay apart for the
common forms of colour blindness, and differ in lightness where they meet in one lane.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    "EXPOSED_EDGE",
    "EXPOSED_FACE",
    "EXPOSED_HATCH",
    "FAULT",
    "FAULT_INK",
    "GREY",
    "GROUPS",
    "INK",
    "METHOD_COLOURS",
    "METHOD_MARKERS",
    "RC",
    "ROOF_DASHES",
    "SIGNAL",
    "Group",
    "group_of",
    "lighter",
    "long_number",
]


class Group(NamedTuple):
    """Kinds that are drawn alike.

    Attributes
    ----------
    label
        In the legend.
    face, edge, ink
        Colours of the bar, of its outline, and of the text in it.
    """

    label: str
    face: str
    edge: str
    ink: str

    @property
    def outlined(self) -> bool:
        """Whether it is drawn as an outline: nothing happens in it."""
        return self.face == "#FFFFFF"


GROUPS: dict[str, Group] = {
    "gemm": Group("GEMM", "#0072B2", "#0072B2", "white"),
    "fused": Group("fused GEMM", "#3B2C85", "#3B2C85", "white"),
    "other": Group("other compute", "#56B4E9", "#56B4E9", "#0B2A3C"),
    "put": Group("put", "#E69F00", "#E69F00", "#3A2800"),
    "collective": Group("collective", "#009E73", "#009E73", "white"),
    "wait": Group("wait", "#FFFFFF", "#A3A3A3", "#757575"),
    "signal": Group("signal", "#A8387F", "#A8387F", "white"),
}
"""Every group, in the order of the legend."""

INK = "#1A1A1A"
GREY = "#5F5F5F"
ROOF_DASHES = (0, (3.0, 1.6))

EXPOSED_FACE = "#FBE3D6"
EXPOSED_EDGE = "#D55E00"
EXPOSED_HATCH = "//////"

FAULT = "#C4122F"
FAULT_INK = "#9A0E25"
SIGNAL = "#A8387F"
"""Of a counterexample: what the finding names, text about it, and arrows."""

_GROUP_OF_KIND = {
    "gemm": "gemm",
    "gather_gemm": "fused",
    "gemm_reduce_scatter": "fused",
    "gemm_all_reduce": "fused",
    "put": "put",
    "collective": "collective",
    "wait": "wait",
    "signal": "signal",
}

METHOD_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#A8387F", "#E69F00", "#56B4E9", "#3B2C85")
METHOD_MARKERS = ("o", "s", "D", "^", "v", "P", "X")

RC: dict[Any, Any] = {
    "axes.linewidth": 0.6,
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, so figures are the same everywhere
    "font.size": 7.0,
    "hatch.linewidth": 0.7,
    "path.simplify": True,
    "pdf.compression": 6,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "stretto",
    "text.parse_math": False,  # names are shown as they are, dollars and all
    "xtick.major.size": 2.5,
    "xtick.major.width": 0.6,
    "ytick.major.size": 2.5,
    "ytick.major.width": 0.6,
}
"""Settings on top of matplotlib's own defaults, whatever the user's matplotlibrc says."""


def group_of(kind: str) -> str:
    """Return the group that spans of this kind are drawn in."""
    return _GROUP_OF_KIND.get(kind, "other")


def lighter(colour: str, share: float) -> str:
    """Return a colour, as ``#RRGGBB``, mixed with so much white (0 to 1)."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02X}" for part in parts)


def long_number(value: float) -> str:
    """Return `value` with at least three digits that count: 12345, 345.2, 12.35, 0.1235."""
    for limit, digits in ((1000, 0), (100, 1), (1, 2)):
        if abs(value) >= limit:
            return f"{value:.{digits}f}"
    return f"{value:.4f}".rstrip("0").rstrip(".") if value else "0"
