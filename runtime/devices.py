"""What this machine computes with, found without importing torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["describe_devices", "driver_version", "gpu_condition"]

_THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
"""Bits of ``nvmlDeviceGetCurrentClocksThrottleReasons``."""


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


def driver_version() -> str:
    """Return the version of NVIDIA's driver, or why it is not known."""
    try:
        import pynvml
    except ImportError:
        return "unknown (nvidia-ml-py is not installed)"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"unknown ({error})"
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return f"unknown ({error})"
    finally:
        pynvml.nvmlShutdown()


def gpu_condition(index: int) -> dict[str, object]:
    """Return an NVIDIA GPU's SM clock, temperature, power and throttle reasons; only read.

    Parameters
    ----------
    index
        As CUDA counts (``CUDA_VISIBLE_DEVICES`` is honoured).

    Returns
    -------
    dict
        ``sm_mhz``, ``celsius``, ``watts``, ``throttle_reasons`` (the bits) and ``throttled_by``
        (their names); ``unknown`` says why there is nothing.
    """
    try:
        import pynvml
    except ImportError:
        return {"unknown": "nvidia-ml-py is not installed"}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"unknown": str(error)}
    try:
        handle = _handle(pynvml, index)
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return {
            "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
            "throttle_reasons": reasons,
            "throttled_by": [name for bit, name in _THROTTLE_REASONS.items() if reasons & bit],
        }
    except pynvml.NVMLError as error:
        return {"unknown": str(error)}
    finally:
        pynvml.nvmlShutdown()


def _handle(pynvml: Any, index: int) -> Any:
    """Return NVML's handle of a GPU that CUDA counts as `index`."""
    visible = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if index < len(visible) and visible[index]:
        if not visible[index].isdigit():
            return pynvml.nvmlDeviceGetHandleByUUID(visible[index])
        index = int(visible[index])
    return pynvml.nvmlDeviceGetHandleByIndex(index)
