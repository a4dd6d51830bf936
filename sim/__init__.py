"""Everything in simulated time: machine profiles, the timed engine, the numpy interpreter."""

from __future__ import annotations

from stretto.sim.engine import SimResult, Skew, roof_us, simulate
from stretto.sim.machine import Machine

__all__ = ["Machine", "SimResult", "Skew", "roof_us", "simulate"]
