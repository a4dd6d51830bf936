"""Estimates and how far they can be trusted; interpolation in measured curves."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal, NamedTuple

from stretto.sim.machine.schema import Curve, Origin

__all__ = ["Estimate", "Validity", "capped", "log_log", "piecewise_linear", "worst"]

Validity = Literal["measured", "interpolated", "extrapolated", "not validated"]
"""From good to bad: a measured point; between measured points; beyond them; from numbers that
nobody measured on such a machine."""

_ORDER: tuple[Validity, ...] = ("measured", "interpolated", "extrapolated", "not validated")

_BEST: dict[Origin, Validity] = {
    "measured": "measured",
    "published": "measured",
    "fitted": "interpolated",
    "derived": "not validated",
    "assumed": "not validated",
}


class Estimate(NamedTuple):
    """A predicted time, and where the prediction stands towards measurements."""

    us: float
    validity: Validity


def worst(validities: Iterable[Validity]) -> Validity:
    """Return the worst of some validities; ``measured`` of none."""
    return max(validities, key=_ORDER.index, default="measured")


def capped(validity: Validity, origin: Origin) -> Validity:
    """Return `validity`, or a worse one if numbers of this origin are never that good."""
    return worst((validity, _BEST[origin]))


def piecewise_linear(curve: Curve, size_bytes: float) -> float:
    """Read a curve in microseconds; right where time is a latency plus bytes over a rate.

    Below the first point the time stays that of the first point; above the last one it grows at
    the rate between the last two.
    """
    points = curve.points
    if size_bytes <= points[0][0]:
        return points[0][1]
    above = min(bisect_left(points, size_bytes, key=lambda point: point[0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[above - 1], points[above]
    return y0 + (y1 - y0) * (size_bytes - x0) / (x1 - x0)


def log_log(curve: Curve, size_bytes: float, *, least_us_per_byte: float = 0.0) -> Estimate:
    """Read a curve by interpolating the logarithms; exact at its points.

    Outside: constant below the first point; above the last one, at the rate between the last two,
    but not faster than `least_us_per_byte`.
    """
    points = curve.points
    (first, least_us), (last, most_us) = points[0], points[-1]
    if size_bytes < first:
        return Estimate(least_us, capped("extrapolated", curve.origin))
    if size_bytes > last:
        before, before_us = points[-2]
        slope = max((most_us - before_us) / (last - before), least_us_per_byte)
        us = most_us + slope * (size_bytes - last)
        return Estimate(us, capped("extrapolated", curve.origin))
    above = bisect_left(points, size_bytes, key=lambda point: point[0])
    x1, y1 = points[above]
    if x1 == size_bytes:
        return Estimate(y1, capped("measured", curve.origin))
    x0, y0 = points[above - 1]
    share = math.log(size_bytes / x0) / math.log(x1 / x0)
    return Estimate(y0 * (y1 / y0) ** share, capped("interpolated", curve.origin))
