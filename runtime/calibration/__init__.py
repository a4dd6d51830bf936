"""Calibration: this machine, measured into a profile that the simulator uses."""

from __future__ import annotations

from stretto.runtime.calibration.gpu import GpuPlan, calibrate_gpus, gpu_plan
from stretto.runtime.calibration.host import HostPlan, calibrate_host, plan_for

__all__ = ["GpuPlan", "HostPlan", "calibrate_gpus", "calibrate_host", "gpu_plan", "plan_for"]
