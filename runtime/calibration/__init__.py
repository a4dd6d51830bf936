"""Calibration: this machine, measured into a profile that the simulator uses."""

from __future__ import annotations

from stretto.runtime.calibration.host import HostPlan, calibrate_host, plan_for

__all__ = ["HostPlan", "calibrate_host", "plan_for"]
