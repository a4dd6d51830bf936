"""What every test shares: safe defaults, hypothesis profiles, the gpu marker."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import pytest
from hypothesis import settings

# Set before torch loads: multicast stays off here and in child processes; no display is needed.
for _name, _value in {
    "MPLBACKEND": "Agg",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}.items():
    os.environ[_name] = _value

# The test timeout bounds time; a deadline per example fails on a busy machine only.  The same
# examples every time, so that the gate says the same of the same commit: HYPOTHESIS_PROFILE=search
# looks for new ones.
settings.register_profile("gate", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu(count)`` where there are fewer devices, and say so."""
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        count = _count_of(*marker.args, **marker.kwargs)
        reason = _lacking(count)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _count_of(count: int = 1) -> int:
    return count


def _lacking(count: int) -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    found = _cuda_devices()
    return None if found >= count else f"needs {count} CUDA device(s), found {found}"


@cache
def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()
