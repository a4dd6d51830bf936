"""GEMM time: the measured tables first, between and beyond them a model of tiles and waves.

The model says what the shape costs in principle; where a table knows how far the truth lies from
the model, that distance is carried over to neighbouring shapes::

    same (n, k), m in the table         the table's time
    same (n, k), m between two rows     between their times, at the place the model gives m
    another (n, k)                      model x distance of the eight nearest sites, by 1/d^2
    another source's (n, k), other m    as the line above, times its own distance, fading with m

Rejected, by errors at sites held out of 366 (vllm 0.24, H200 and GB300): the model alone (a third
more error for bf16, twice for fp8); a roofline instead of tiles and waves under the same tables (as
good for bf16 at those sites, which are multiples of any tile; up to twice the error for fp8);
Gaussian processes (no better than 1/d^2 with eight neighbours).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stretto.schedules.language import InvalidInput
from stretto.sim.machine.estimates import Estimate, Validity, capped, worst
from stretto.sim.machine.schema import GemmModel, GemmProfile, GemmTable, GemmTile, Origin, Site

__all__ = ["FALLBACK_MODEL", "QUANTISE_PASS", "SPLITS", "GemmCost", "model_us"]

Array = NDArray[np.float64]

SPLITS = (1, 2, 4, 8)
"""Parts that k may be split into."""

QUANTISE_PASS = 2048
"""Elements of a row that one pass of a quantising kernel takes."""

_NEIGHBOURS = 8
_NUGGET = 1e-9  # squared log distance below which two sites are one
_TOWARDS_MODEL = 0.3  # weight of "no distance at all" among the neighbours' 1/d^2
_FADING = 2.0  # log distance in m over which a source's own distance from the others halves
_FLAT = 0.02  # log ratio below which the model cannot tell two m apart

FALLBACK_MODEL = GemmModel(
    origin="assumed",
    source="common figures of GEMM libraries, for a profile that gives no model of its own",
    launch_us=2.5,
    tile_us=0.5,
    wave_rounding=0.5,
    overlap_exponent=2.0,
    split_k_us=2.5,
    sustained_slowdown=0.0,
    tiles=(
        GemmTile(m=64, n=64, efficiency=0.4),
        GemmTile(m=128, n=128, efficiency=0.65),
        GemmTile(m=128, n=256, efficiency=0.7),
    ),
)


def model_us(
    model: GemmModel,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    peak_tflops: float,
    sm_count: int,
    element_bytes: int,
    hbm_gb_per_s: float,
) -> Array:
    """Return what the model says GEMMs of these shapes take, in microseconds.

    The library is assumed to pick the best of a few output tiles and of a few ways to split k;
    `sm_count` tiles run at a time, in waves.

    Parameters
    ----------
    m, n, k
        Shapes; arrays of one length, or numbers.
    peak_tflops, sm_count
        Of the machine, for this dtype.
    element_bytes
        Of an operand; results of 1-byte operands have two bytes.
    hbm_gb_per_s
        Memory rate, where the model gives none of its own.
    """
    m, n, k = (np.atleast_1d(np.asarray(axis, dtype=np.float64)) for axis in (m, n, k))
    read = model.read_gb_per_s or hbm_gb_per_s
    write = model.write_gb_per_s or hbm_gb_per_s
    result_bytes = max(element_bytes, 2) * m * n
    memory_us = element_bytes * (m + n) * k / read / 1e3 + result_bytes / write / 1e3
    # one row for each way to run the kernel, one column for each shape
    ways = np.array([(t.m, t.n, t.efficiency, parts) for t in model.tiles for parts in SPLITS]).T[
        :, :, None
    ]
    tile_m, tile_n, efficiency, parts = ways
    rate = peak_tflops * 1e6 / sm_count * efficiency  # flops per us on one SM
    waves = np.ceil(m / tile_m) * np.ceil(n / tile_n) * parts / sm_count
    waves += model.wave_rounding * (np.ceil(waves) - waves)
    run_us = waves * (2.0 * tile_m * tile_n * (k / parts) / rate + model.tile_us)
    # partial sums go out and come back in four bytes each
    run_us += (parts > 1) * (model.split_k_us + 8.0 * m * n / read / 1e3)
    compute_us = run_us.min(axis=0)
    compute_us *= 1 + model.sustained_slowdown * compute_us / (compute_us + 1e3)
    power = model.overlap_exponent
    larger = np.maximum(compute_us, memory_us)
    shares = (compute_us / larger) ** power + (memory_us / larger) ** power
    both_us = larger * shares ** (1 / power)
    passes = np.ceil(k / QUANTISE_PASS)
    quantise_us = m * (model.quantise_row_ns + model.quantise_pass_ns * passes) / 1e3
    return np.asarray(model.launch_us + both_us + quantise_us)


class _Measured(NamedTuple):
    """One site of a table, with its distances from the model."""

    m: Array
    log_m: Array
    us: tuple[float, ...]
    log_us: Array
    distance: Array
    origin: Origin


_Table = dict[tuple[int, int], _Measured]


class _Curve(NamedTuple):
    """What is known of one (n, k): log times at some m, and how good each is."""

    m: list[int]
    us: list[float]
    log_us: list[float]
    log_model: list[float]
    origin: list[Origin | None]  # None: carried over from neighbours
    carried: Validity  # of what is carried over


class GemmCost:
    """GEMM times of one dtype on one machine.

    Parameters
    ----------
    profile
        Tables and model; either may be missing.
    peak_tflops, sm_count, element_bytes, hbm_gb_per_s
        See `model_us`.
    """

    def __init__(
        self,
        profile: GemmProfile,
        *,
        peak_tflops: float,
        sm_count: int,
        element_bytes: int,
        hbm_gb_per_s: float,
    ) -> None:
        self.model = profile.model or FALLBACK_MODEL
        self.peak_tflops = peak_tflops
        self.model_times: Callable[..., Array] = partial(
            model_us,
            self.model,
            peak_tflops=peak_tflops,
            sm_count=sm_count,
            element_bytes=element_bytes,
            hbm_gb_per_s=hbm_gb_per_s,
        )
        self._tables = [self._prepared(table) for table in profile.tables]
        self._field: _Table = max(self._tables, key=len, default={})
        self._sites = np.log(np.array(list(self._field), dtype=np.float64).reshape(-1, 2))
        self._known = list(self._field.values())
        self._curve = lru_cache(maxsize=4096)(self._make_curve)
        self.estimate = lru_cache(maxsize=1 << 16)(self._estimate)

    @property
    def best_tflops(self) -> float:
        """The rate that a large GEMM reaches."""
        best = max(tile.efficiency for tile in self.model.tiles)
        return self.peak_tflops * best / (1 + self.model.sustained_slowdown)

    def _estimate(self, m: int, n: int, k: int) -> Estimate:
        if min(m, n, k) < 0:
            raise InvalidInput(f"A GEMM of m={m}, n={n}, k={k} has a negative size.")
        if min(m, n, k) == 0:
            return Estimate(0.0, "measured")
        curve = self._curve(n, k)
        log_model = float(np.log(self.model_times(m, n, k)[0]))
        if not curve.m:
            return Estimate(math.exp(log_model), capped("extrapolated", self.model.origin))
        place = bisect_left(curve.m, m)
        if place < len(curve.m) and curve.m[place] == m:
            origin = curve.origin[place]
            return Estimate(
                curve.us[place],
                curve.carried if origin is None else capped("measured", origin),
            )
        if place in (0, len(curve.m)):  # beyond: the distance at the edge goes on
            edge = 0 if place == 0 else -1
            distance = curve.log_us[edge] - curve.log_model[edge]
            origin = curve.origin[edge]
            validity = curve.carried if origin is None else capped("measured", origin)
            return Estimate(math.exp(log_model + distance), worst((validity, "extrapolated")))
        return self._between(curve, place, m, log_model)

    def _between(self, curve: _Curve, place: int, m: int, log_model: float) -> Estimate:
        """Interpolate between two m, monotone, with the model's waves in between."""
        low, high = curve.log_model[place - 1 : place + 1]
        if high - low > _FLAT:
            share = min(max((log_model - low) / (high - low), 0.0), 1.0)
        else:
            share = math.log(m / curve.m[place - 1]) / math.log(curve.m[place] / curve.m[place - 1])
        below, above = curve.log_us[place - 1 : place + 1]
        ends = curve.origin[place - 1 : place + 1]
        validity = worst(
            curve.carried if origin is None else capped("interpolated", origin) for origin in ends
        )
        return Estimate(math.exp(below + share * (above - below)), validity)

    def _prepared(self, table: GemmTable) -> _Table:
        return {(site.n, site.k): self._measured(site, table.origin) for site in table.sites}

    def _measured(self, site: Site, origin: Origin) -> _Measured:
        m = np.array(site.m, dtype=np.float64)
        log_us = np.log(np.array(site.us))
        distance = log_us - np.log(self._model_at(m, site.n, site.k))
        return _Measured(m, np.log(m), site.us, log_us, distance, origin)

    def _make_curve(self, n: int, k: int) -> _Curve:
        """Collect what is known of (n, k): from neighbours, then from tables that have it."""
        m, log_us, carried = self._from_neighbours(n, k)
        origin: list[Origin | None] = [None] * len(m)
        for table in reversed(self._tables):  # the first one has the last word
            if (n, k) in table:
                m, log_us, origin = self._overlaid(table[n, k], m, log_us, origin)
        if not len(m):
            return _Curve([], [], [], [], [], carried)
        log_model = np.log(self._model_at(m, n, k))
        us = {
            int(x): time
            for table in reversed(self._tables)
            if (n, k) in table
            for x, time in zip(table[n, k].m, table[n, k].us, strict=True)
        }
        whole = [int(x) for x in m]
        exact = [
            us[x] if known is not None else math.exp(log)
            for x, log, known in zip(whole, log_us, origin, strict=True)
        ]
        return _Curve(whole, exact, log_us.tolist(), log_model.tolist(), origin, carried)

    def _from_neighbours(self, n: int, k: int) -> tuple[Array, Array, Validity]:
        """Return m, log times and their validity, from other sites of the largest table."""
        here = np.log([n, k])
        squares = ((self._sites - here) ** 2).sum(axis=1)
        nearest = [
            place
            for place in np.argsort(squares, kind="stable")[: _NEIGHBOURS + 1]
            if squares[place] > _NUGGET
        ][:_NEIGHBOURS]
        if not nearest:
            return np.empty(0), np.empty(0), "extrapolated"
        m = np.unique(np.concatenate([self._known[place].m for place in nearest]))
        log_m = np.log(m)
        total, weights = np.zeros(len(m)), np.full(len(m), _TOWARDS_MODEL)
        for place in nearest:
            known = self._known[place]
            weight = 1 / (squares[place] + _gap(log_m, known) ** 2)
            total += weight * np.interp(log_m, known.log_m, known.distance)
            weights += weight
        low, high = self._sites.min(axis=0), self._sites.max(axis=0)
        within = bool(np.all(low <= here) and np.all(here <= high))
        validity = capped("interpolated" if within else "extrapolated", self._known[0].origin)
        return m, np.log(self._model_at(m, n, k)) + total / weights, validity

    def _model_at(self, m: Array, n: int, k: int) -> Array:
        return self.model_times(m, np.full(m.shape, n), np.full(m.shape, k))

    @staticmethod
    def _overlaid(
        own: _Measured, m: Array, log_us: Array, origin: list[Origin | None]
    ) -> tuple[Array, Array, list[Origin | None]]:
        """Put one table's own rows in place of what else is known inside their range of m."""
        outside = (m < own.m[0]) | (m > own.m[-1])
        if len(m):
            carried = np.array([one is None for one in origin])
            at_own = np.interp(own.log_m, np.log(m), log_us)
            bias = own.log_us - at_own
            edge = np.where(m < own.m[0], bias[0], bias[-1])
            fading = edge / (1 + (_gap(np.log(m), own) / _FADING) ** 2)
            log_us = np.where(carried, log_us + fading, log_us)
        kept = np.flatnonzero(outside)
        all_m = np.concatenate([m[kept], own.m])
        order = np.argsort(all_m, kind="stable")
        origins = [origin[place] for place in kept] + [own.origin] * len(own.m)
        return (
            all_m[order],
            np.concatenate([log_us[kept], own.log_us])[order],
            [origins[place] for place in order],
        )


def _gap(log_m: Array, known: _Measured) -> Array:
    """Return how far each log m lies outside what is known."""
    low, high = known.log_m[0], known.log_m[-1]
    return np.asarray(np.maximum(np.maximum(low - log_m, log_m - high), 0.0))
