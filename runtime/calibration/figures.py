"""Figures of all ranks, summed up: slowest rank of each round, then the median over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

__all__ = ["Figures", "growing", "spread"]


class Figures:
    """What the ranks of a calibration found.

    Parameters
    ----------
    ranks
        By rank, what `stretto.runtime.calibration.gpu_probes.measure_gpu` returned.
    """

    def __init__(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        self.ranks = list(ranks)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.ranks[0]["world_size"])

    @property
    def device(self) -> Mapping[str, Any]:
        """What rank 0's GPU is."""
        found: Mapping[str, Any] = self.ranks[0]["device"]
        return found

    @property
    def versions(self) -> dict[str, str]:
        """Software versions."""
        return dict(self.ranks[0]["versions"])

    @property
    def date(self) -> str:
        """When they were measured (ISO)."""
        return str(self.ranks[0]["date"])

    def keys(self, phase: str, prefix: str = "") -> list[str]:
        """Return the cases of a phase that begin with `prefix`, without it."""
        found: dict[str, None] = {}
        for rank in self.ranks:
            for key in rank["phases"].get(phase, {}).get("us", {}):
                if key.startswith(prefix):
                    found[key.removeprefix(prefix)] = None
        return list(found)

    def times(self, phase: str, key: str) -> list[float]:
        """Return the slowest rank's time of every round; ranks that took no part do not count."""
        own = [rank["phases"].get(phase, {}).get("us", {}).get(key, []) for rank in self.ranks]
        return [max(values) for values in zip(*(one for one in own if one), strict=False)]

    def us(self, phase: str, key: str) -> float | None:
        """Return the median over rounds of `times`; None if there is none."""
        found = self.times(phase, key)
        return median(found) if found else None

    def least(self, phase: str, key: str) -> float | None:
        """Return the smallest rank's median (of shares that must be large enough)."""
        own = [rank["phases"].get(phase, {}).get("us", {}).get(key, []) for rank in self.ranks]
        return min((median(one) for one in own if one), default=None)

    def curve(self, phase: str, prefix: str) -> list[tuple[int, float]]:
        """Return (bytes, us) of the cases ``<prefix><bytes>``, times not falling."""
        points = [(int(key), self.us(phase, prefix + key)) for key in self.keys(phase, prefix)]
        return growing([(size, us) for size, us in points if us is not None])

    def reason(self, phase: str) -> str:
        """Return why a phase, or the first case of it that failed, was not measured."""
        for rank in self.ranks:
            failed = rank["phases"].get(phase, {}).get("failed", {})
            for key, reason in failed.items():
                return f"{key}: {reason}" if key else str(reason)
        return "it was not reached"

    def failures(self) -> list[str]:
        """Return everything that was not measured, with the reason, once."""
        found: dict[str, str] = {}
        for rank in self.ranks:
            for phase, content in rank["phases"].items():
                for key, reason in content.get("failed", {}).items():
                    found.setdefault(f"{phase} {key}".strip(), reason)
        return [f"{what}: {reason}" for what, reason in found.items()]

    def sentinel(self, phase: str) -> list[float]:
        """Return the slowest rank's sentinel times."""
        own = [rank["phases"].get(phase, {}).get("sentinel_us", []) for rank in self.ranks]
        return [max(values) for values in zip(*own, strict=False)]

    @property
    def noise(self) -> float | None:
        """Return the spread of the sentinel within a phase, the largest of all phases."""
        found = [spread(self.sentinel(phase)) for phase in self.ranks[0]["phases"]]
        return max((one for one in found if one is not None), default=None)

    def sentinel_medians(self) -> dict[str, float]:
        """Return the sentinel's median time by phase."""
        found = {phase: self.sentinel(phase) for phase in self.ranks[0]["phases"]}
        return {phase: median(times) for phase, times in found.items() if times}

    def throttled_by(self) -> list[str]:
        """Return every throttle reason seen but idleness."""
        names = {
            str(name)
            for condition in self._conditions()
            for name in condition.get("throttled_by", ())
            if name != "idle"
        }
        return sorted(names)

    def range_of(self, what: str) -> tuple[float, float] | None:
        """Return the least and the most of a condition: ``sm_mhz``, ``celsius``, ``watts``."""
        values = [float(one[what]) for one in self._conditions() if what in one]
        return (min(values), max(values)) if values else None

    def _conditions(self) -> list[Mapping[str, Any]]:
        return [
            condition
            for rank in self.ranks
            for phase in rank["phases"].values()
            for condition in phase.get("conditions", ())
        ]


def growing(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return points by size with times that do not fall (noise among the small ones)."""
    highest, out = 0.0, []
    for size, us in sorted(points):
        highest = max(highest, us)
        out.append((size, highest))
    return out


def spread(values: Sequence[float]) -> float | None:
    """Return the 10th to 90th percentile range over the median; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return (ordered[round(last * 0.9)] - ordered[round(last * 0.1)]) / median(ordered)
