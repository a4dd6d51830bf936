"""Fitting the GEMM model to measured times, thinning a table, and judging the result.

The fit minimises a robust loss of log(model / measured) by Levenberg-Marquardt steps on the
logarithms of the parameters, from several starting points; it is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.schedules.language import DTYPE_BYTES, DType, InvalidInput
from stretto.sim.machine.gemm import GemmCost, model_us
from stretto.sim.machine.schema import (
    FitReport,
    GemmModel,
    GemmProfile,
    GemmTable,
    GemmTile,
    Origin,
)

__all__ = ["GemmPoints", "fit_gemm_model", "fit_gemm_profile", "held_out_sites", "spanning_m"]

Array = NDArray[np.float64]

TILES = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 128), (256, 256))
_HUBER = 0.05
_FIXED = 8  # parameters before the quantising ones
_SAMPLE = 3000
_STARTS = 6


class GemmPoints(NamedTuple):
    """Measured GEMMs as columns of one length; m, n, k must be wide enough to be multiplied."""

    m: NDArray[np.int64]
    n: NDArray[np.int64]
    k: NDArray[np.int64]
    us: Array

    def where(self, chosen: NDArray[np.bool_]) -> GemmPoints:
        """Return the chosen points."""
        return self.take(np.flatnonzero(chosen))

    def take(self, places: NDArray[np.int64]) -> GemmPoints:
        """Return the points at these places."""
        return GemmPoints(self.m[places], self.n[places], self.k[places], self.us[places])

    def table(self, *, origin: Origin, source: str) -> GemmTable:
        """Return them as a table; times are kept to four digits."""
        us = [float(f"{value:.4g}") for value in self.us]
        rows = zip(self.m.tolist(), self.n.tolist(), self.k.tolist(), us, strict=True)
        return GemmTable.from_rows(rows, origin=origin, source=source)


@dataclass(frozen=True)
class _Setting:
    """What the model takes as given."""

    peak_tflops: float
    sm_count: int
    hbm_gb_per_s: float
    element_bytes: int
    quantised: bool
    source: str

    def model(self, logs: Array) -> GemmModel:
        """Return the model with these parameters (their logarithms)."""
        values = np.exp(logs).tolist()
        launch, read, write, tile, rounding, exponent, split, sustained = values[:_FIXED]
        row, step = values[_FIXED : _FIXED + 2] if self.quantised else (0.0, 0.0)
        efficiencies = values[_FIXED + 2 * self.quantised :]
        return GemmModel(
            origin="fitted",
            source=self.source,
            launch_us=launch,
            read_gb_per_s=read,
            write_gb_per_s=write,
            tile_us=tile,
            wave_rounding=rounding / (1 + rounding),
            overlap_exponent=1 + exponent,
            split_k_us=split,
            sustained_slowdown=sustained,
            quantise_row_ns=row,
            quantise_pass_ns=step,
            tiles=tuple(
                GemmTile(m=m, n=n, efficiency=efficiency)
                for (m, n), efficiency in zip(TILES, efficiencies, strict=True)
            ),
        )

    def start(self) -> Array:
        """Return a plausible first guess."""
        rate = 0.85 * self.hbm_gb_per_s
        quantise = [3.0, 4.0] if self.quantised else []
        guess = [2.2, rate, rate, 0.5, 1.0, 2.0, 3.0, 0.05, *quantise]
        return np.log([*guess, 0.5, 0.6, 0.65, 0.6, 0.7, 0.8, 0.8, 0.8])

    def predict(self, model: GemmModel, points: GemmPoints) -> Array:
        """Return the model's times."""
        return model_us(
            model,
            points.m,
            points.n,
            points.k,
            peak_tflops=self.peak_tflops,
            sm_count=self.sm_count,
            element_bytes=self.element_bytes,
            hbm_gb_per_s=self.hbm_gb_per_s,
        )


def fit_gemm_model(
    points: GemmPoints,
    *,
    dtype: DType,
    peak_tflops: float,
    sm_count: int,
    hbm_gb_per_s: float,
    source: str,
    seed: int = 0,
) -> GemmModel:
    """Fit the model of tiles and waves to measured GEMMs.

    Parameters
    ----------
    points
        At least fifty.
    dtype
        With one-byte elements, the measured operation is taken to quantise its rows first.
    peak_tflops, sm_count, hbm_gb_per_s
        Of the machine; `hbm_gb_per_s` is a starting point only.
    source
        Which data, in words.

    Raises
    ------
    InvalidInput
        If there are too few points.
    """
    if len(points.us) < 50:
        raise InvalidInput(
            f"Fitting a GEMM model needs at least 50 measured GEMMs, not {len(points.us)}; "
            "give the profile its table without a model."
        )
    setting = _Setting(
        peak_tflops,
        sm_count,
        hbm_gb_per_s,
        DTYPE_BYTES[dtype],
        quantised=DTYPE_BYTES[dtype] == 1,
        source=source,
    )
    random = np.random.default_rng(seed)
    size = min(_SAMPLE, len(points.us))
    sample = points.take(random.permutation(len(points.us))[:size])
    best: tuple[float, Array] | None = None
    for attempt in range(_STARTS):
        start = setting.start()
        if attempt:
            start = start + random.normal(0, 0.4, len(start))
            start[-len(TILES) :] = np.log(random.uniform(0.3, 0.95, len(TILES)))
        found = _descend(setting, sample, start)
        if best is None or found[0] < best[0]:
            best = found
    assert best is not None  # _STARTS is above zero
    return _rounded(_used_tiles(setting, setting.model(best[1]), points))


def _descend(setting: _Setting, points: GemmPoints, logs: Array) -> tuple[float, Array]:
    """Return the loss and the parameters at the end of a Levenberg-Marquardt descent."""
    measured = np.log(points.us)

    def errors(at: Array) -> Array:
        return np.log(setting.predict(setting.model(at), points)) - measured

    here, damping = errors(logs), 1e-2
    loss = _huber(here)
    for _ in range(60):
        slopes = np.empty((len(measured), len(logs)))
        for place in range(len(logs)):
            moved = logs.copy()
            moved[place] += 1e-3
            slopes[:, place] = (errors(moved) - here) / 1e-3
        weights = np.minimum(1.0, _HUBER / np.maximum(np.abs(here), 1e-12))
        curvature = slopes.T @ (slopes * weights[:, None])
        gradient = slopes.T @ (weights * here)
        before = loss
        for _ in range(8):
            scaled = curvature + damping * np.diag(np.diag(curvature) + 1e-6)
            step = np.clip(-np.linalg.solve(scaled, gradient), -0.5, 0.5)
            trial = np.clip(logs + step, np.log(1e-4), np.log(1e6))
            there = errors(trial)
            if _huber(there) < loss:
                logs, here, loss, damping = trial, there, _huber(there), max(damping / 3, 1e-6)
                break
            damping *= 4
        if before - loss < 1e-5 * before:
            break
    return loss, logs


def _huber(errors: Array) -> float:
    size = np.abs(errors)
    return float(np.where(size < _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2)).sum())


def _used_tiles(setting: _Setting, model: GemmModel, points: GemmPoints) -> GemmModel:
    """Drop the tiles without which the predictions stay what they are."""
    full = setting.predict(model, points)
    tiles = list(model.tiles)
    for tile in model.tiles:
        fewer = [other for other in tiles if other != tile]
        if fewer:
            slimmer = model.model_copy(update={"tiles": tuple(fewer)})
            changed = np.abs(setting.predict(slimmer, points) / full - 1)
            if changed.mean() < 1e-3:
                tiles = fewer
    return model.model_copy(update={"tiles": tuple(tiles)})


def _rounded(model: GemmModel) -> GemmModel:
    """Keep four digits: a file is read by people too."""

    def short(value: object) -> object:
        if isinstance(value, float):
            return float(f"{value:.4g}")
        if isinstance(value, dict):
            return {key: short(inner) for key, inner in value.items()}
        if isinstance(value, tuple):
            return tuple(short(inner) for inner in value)
        return value

    return GemmModel.model_validate(short(model.model_dump()))


def held_out_sites(points: GemmPoints, *, share: float, seed: int) -> NDArray[np.bool_]:
    """Mark the points of a random share of the (n, k) sites."""
    sites, site = np.unique(np.stack([points.n, points.k]), axis=1, return_inverse=True)
    count = sites.shape[1]
    chosen = np.random.default_rng(seed).permutation(count)[: max(1, int(share * count))]
    return np.isin(site.reshape(-1), chosen)


def spanning_m(points: GemmPoints, distance: Array, count: int) -> list[int]:
    """Return `count` values of m between which the others are interpolated well.

    The ends and powers of two from 64 on, which are what people ask for, come first; then values
    are added one at a time, the best each time.  `distance` is log(measured / model).
    """
    m = np.unique(points.m)
    if len(m) <= count:
        return [int(value) for value in m]
    log_m = np.log(m)
    sites, site = np.unique(np.stack([points.n, points.k]), axis=1, return_inverse=True)
    curves = np.empty((sites.shape[1], len(m)))
    for place in range(sites.shape[1]):
        own = np.flatnonzero(site.reshape(-1) == place)
        own = own[np.argsort(points.m[own])]
        curves[place] = np.interp(log_m, np.log(points.m[own]), distance[own])
    weights = np.gradient(log_m) ** 0.5  # data sets crowd m at a few places
    asked = [place for place, value in enumerate(m) if value >= 64 and value & (value - 1) == 0]
    chosen = sorted({0, len(m) - 1, *asked[: max(0, count - 2)]})
    while len(chosen) < count:
        losses = {
            place: _interpolation_loss(curves, log_m, sorted([*chosen, place]), weights)
            for place in range(len(m))
            if place not in chosen
        }
        chosen.append(min(losses, key=lambda place: losses[place]))
    return [int(m[place]) for place in sorted(chosen)]


def _interpolation_loss(curves: Array, log_m: Array, nodes: Sequence[int], weights: Array) -> float:
    hats = np.stack([np.interp(log_m, log_m[nodes], row) for row in np.eye(len(nodes))])
    return float((np.abs(curves[:, nodes] @ hats - curves) @ weights).mean())


def fit_gemm_profile(
    points: GemmPoints,
    *,
    dtype: DType,
    peak_tflops: float,
    sm_count: int,
    hbm_gb_per_s: float,
    source: str,
    m_values: int | None = None,
    seed: int = 0,
) -> GemmProfile:
    """Fit a model, make a table, and report how both do on sites held out of a first fit.

    Parameters
    ----------
    m_values
        Keep that many values of m in the table; all if None.
    points, dtype, peak_tflops, sm_count, hbm_gb_per_s, source, seed
        See `fit_gemm_model`.
    """

    def made(some: GemmPoints) -> GemmProfile:
        model = fit_gemm_model(
            some,
            dtype=dtype,
            peak_tflops=peak_tflops,
            sm_count=sm_count,
            hbm_gb_per_s=hbm_gb_per_s,
            source=source,
            seed=seed,
        )
        kept = some
        if m_values is not None:
            cost = bound(GemmProfile(model=model))
            distance = np.log(some.us / cost.model_times(some.m, some.n, some.k))
            kept = some.where(np.isin(some.m, spanning_m(some, distance, m_values)))
        table = kept.table(origin="published", source=source)
        return GemmProfile(tables=(table,), model=model)

    def bound(profile: GemmProfile) -> GemmCost:
        return GemmCost(
            profile,
            peak_tflops=peak_tflops,
            sm_count=sm_count,
            element_bytes=DTYPE_BYTES[dtype],
            hbm_gb_per_s=hbm_gb_per_s,
        )

    held_out = held_out_sites(points, share=0.2, seed=seed)
    trial, unseen = bound(made(points.where(~held_out))), points.where(held_out)
    reports = tuple(
        _report(trial, unseen.where(chosen), what=what, seed=seed)
        for what, chosen in (
            ("all shapes", np.ones(len(unseen.us), dtype=np.bool_)),
            ("m >= 128, n >= 512, k >= 512", _planning(unseen)),
        )
        if chosen.any()
    )
    final = made(points)
    assert final.model is not None  # made() always sets one
    return final.model_copy(update={"model": final.model.model_copy(update={"fit": reports})})


def _planning(points: GemmPoints) -> NDArray[np.bool_]:
    return np.asarray((points.m >= 128) & (points.n >= 512) & (points.k >= 512))


def _report(cost: GemmCost, points: GemmPoints, *, what: str, seed: int) -> FitReport:
    shapes = zip(points.m.tolist(), points.n.tolist(), points.k.tolist(), strict=True)
    predicted = np.array([cost.estimate(*shape).us for shape in shapes])
    errors_pct = 100 * np.abs(predicted / points.us - 1)
    return FitReport(
        what=what,
        sites=len(set(zip(points.n.tolist(), points.k.tolist(), strict=True))),
        points=len(points.us),
        median_error_pct=round(float(np.median(errors_pct)), 2),
        p90_error_pct=round(float(np.percentile(errors_pct, 90)), 2),
        protocol=(
            "model and table made without a random 20 % of the (n, k) sites "
            f"(seed {seed}), then compared there"
        ),
    )
