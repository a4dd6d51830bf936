"""Is the memory really there?  Asked before a segment is mapped.

A shared page that cannot be backed is no error code but a SIGBUS, or the out-of-memory killer, in
the middle of a copy.  So a shortage is looked for first (`require`), and then the pages are
reserved (`stretto.transports.posix.segment.reserve`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from stretto.schedules.language import InvalidInput

__all__ = ["Supply", "directory_supply", "memory_supply", "require"]

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


class Supply(NamedTuple):
    """How many bytes can be had, what says so, and what would give more."""

    free_bytes: int
    source: str
    remedy: str


def require(needed_bytes: int, purpose: str, supplies: list[Supply]) -> None:
    """Refuse what does not fit.

    Raises
    ------
    InvalidInput
        If any supply is smaller than the need; the message names both and what to do.
    """
    tightest = min(supplies, key=lambda supply: supply.free_bytes)
    if needed_bytes > tightest.free_bytes:
        raise InvalidInput(
            f"{purpose} needs {_text(needed_bytes)} of shared memory, but only "
            f"{_text(max(tightest.free_bytes, 0))} is free ({tightest.source}); use smaller "
            f"buffers, fewer slots or fewer ranks, or {tightest.remedy}."
        )


def memory_supply() -> list[Supply]:
    """Return what limits memory: the machine, and every control group of this process."""
    supplies = []
    available = _fields(_MEMINFO).get("MemAvailable:")
    if available is not None:
        supplies.append(Supply(available * 1024, "MemAvailable of the machine", "free some memory"))
    return supplies + _cgroup_supplies()


def directory_supply(directory: Path) -> Supply:
    """Return what is free in the file system of `directory`."""
    status = os.statvfs(directory)
    return Supply(
        status.f_bavail * status.f_frsize,
        f"{directory}, which is used because memfd_create is missing",
        f"enlarge it (mount -o remount,size=..., or --shm-size of a container: {directory})",
    )


def _cgroup_supplies() -> list[Supply]:
    supplies = []
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, top = ("memory.max", "memory.current", "inactive_file"), _CGROUP_ROOT
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = _CGROUP_ROOT / "memory"
        else:
            continue
        # Limits of parents bind too.  Inside a container the path may not exist; its top does.
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(top):
                break
            supply = _cgroup_supply(group, *names)
            if supply is not None:
                supplies.append(supply)
    return supplies


def _cgroup_supply(group: Path, limit: str, usage: str, reclaimable: str) -> Supply | None:
    try:
        limit_text = (group / limit).read_text().strip()
        used = int((group / usage).read_text())
    except OSError:
        return None
    if limit_text == "max":
        return None
    cached = _fields(group / "memory.stat").get(reclaimable, 0)
    return Supply(
        int(limit_text) - used + cached,
        f"limit {group / limit}",
        "raise that limit (--memory of a container)",
    )


def _fields(path: Path) -> dict[str, int]:
    """Read lines of ``name number``; an absent file has none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}


def _text(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
