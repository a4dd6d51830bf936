"""NVLink multicast stays off: in this process, and in every one that it starts.

Whoever is about to import torch for a GPU calls `switch_multicast_off` first, before torch, NCCL or
NVSHMEM can bind it.  Only an ``nvls`` transport that was asked for by name would not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["MULTICAST_OFF", "switch_multicast_off"]

MULTICAST_OFF: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Environment variables, and what they are set to; children inherit them."""


def switch_multicast_off() -> None:
    """Set the variables, whatever they were."""
    os.environ.update(MULTICAST_OFF)
