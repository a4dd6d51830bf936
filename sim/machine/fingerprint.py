"""Which host this is: what a cpu profile is bound to."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from stretto.sim.machine.schema import HostFingerprint

__all__ = ["host_fingerprint"]


def host_fingerprint() -> HostFingerprint:
    """Return the processor's model and the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return HostFingerprint(cpu_model=_cpu_model(Path("/proc/cpuinfo")), cores=cores)


def _cpu_model(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"
