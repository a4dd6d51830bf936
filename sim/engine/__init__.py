"""Programs in simulated time: the timed engine over a machine profile."""

from __future__ import annotations

from stretto.sim.engine.engine import Skew
from stretto.sim.engine.result import SimResult
from stretto.sim.engine.simulate import roof_us, simulate

__all__ = ["SimResult", "Skew", "roof_us", "simulate"]
