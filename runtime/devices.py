"""What this machine computes with, found without importing torch."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["describe_devices"]


def describe_devices() -> dict[str, str]:
    """Return the CPU and GPUs of this machine, for people; absent ones say why they are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cores": str(cores), "memory": _memory(), "nvidia gpus": _nvidia(), "amd gpus": _amd()}


def _memory() -> str:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return f"{int(line.split()[1]) / 2**20:.1f} GiB available"
    except OSError:
        pass
    return "unknown"


def _nvidia() -> str:
    try:
        import pynvml
    except ImportError:
        present = Path("/proc/driver/nvidia/version").exists()
        return "driver found, nvidia-ml-py is not installed" if present else "none found"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"none found ({error})"
    try:
        names = [
            pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
    finally:
        pynvml.nvmlShutdown()
    return f"{len(names)}: {', '.join(sorted(set(names)))}" if names else "none found"


def _amd() -> str:
    nodes = list(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id"))
    found = [node for node in nodes if node.read_text().strip() not in ("", "0")]
    return f"{len(found)} found" if found else "none found"


def gpu_condition(index: int) -> dict[str, object]:
    """Return an NVIDIA GPU's SM clock, temperature, power and throttle reasons; read only."""
    try:
        import pynvml
    except ImportError:
        return {"unknown": "nvidia-ml-py is not installed"}
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return {
            "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
            "throttle_reasons": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        }
    finally:
        pynvml.nvmlShutdown()
