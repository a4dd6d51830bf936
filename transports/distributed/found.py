"""Which collective library there is, for which device, and what tells one GPU from another.

Functions that ask torch take it as an argument: they are tested with stand-ins for builds that are
not at hand.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from stretto.schedules.language import InvalidInput, Unsupported
from stretto.transports.interface import Availability

__all__ = ["availability", "device_index", "identity", "lacking", "library", "refuse_shared"]

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def library(torch: Any, device: Any) -> str:
    """Return name and version of the library that serves a device; None is the CPU."""
    if device is None:
        return f"gloo of torch {torch.__version__.split('+')[0]}"
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    if torch.version.hip:
        return f"RCCL {version} (HIP {torch.version.hip})"
    return f"NCCL {version}"


def availability(torch: Any) -> Availability:
    """Say whether this build of torch has a library for the devices of this machine."""
    if not torch.distributed.is_available():
        return Availability(False, "this PyTorch is built without torch.distributed")
    if not torch.cuda.is_available():
        if not torch.distributed.is_gloo_available():
            return Availability(False, "PyTorch finds no GPU, and is built without gloo")
        return Availability(True, f"{library(torch, None)}, on the CPU: PyTorch finds no GPU")
    rocm = bool(torch.version.hip)
    if not torch.distributed.is_nccl_available():
        name = "RCCL" if rocm else "NCCL"
        return Availability(False, f"this PyTorch is built without {name}")
    found, count = library(torch, torch.device("cuda", 0)), torch.cuda.device_count()
    if rocm:
        return Availability(True, f"{found}, {count} GPU(s); not run on hardware")
    return Availability(True, f"{found} without NVLS, {count} GPU(s)")


def device_index(torch: Any, device: int | str | None, rank: int) -> int | None:
    """Return the number of a rank's GPU, None for the CPU.

    Parameters
    ----------
    torch
        The module.
    device
        What was asked for: a number, "cpu", or None for the rank modulo the number of GPUs.
    rank
        Whose.

    Raises
    ------
    InvalidInput
        If there is no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device is None and not count):
        return None
    if device is None:
        return rank % count
    if not isinstance(device, int) or not 0 <= device < count:
        raise InvalidInput(
            f"There is no device {device!r}: give 'cpu' or the number of one of {count} GPU(s)."
        )
    return device


def identity(torch: Any, index: int) -> str:
    """Return what tells a GPU from the others of this host, however processes number them."""
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    if uuid.strip("0-"):
        return uuid
    # ROCm may know none: the same number among the same visible devices is the same GPU.
    seen = [os.environ.get(name, "") for name in VISIBLE_DEVICES]
    return f"{index} of {seen}"


def refuse_shared(devices: Sequence[str | None], name: str) -> None:
    """Raise if ranks share a GPU, or some have one and others have none.

    Parameters
    ----------
    devices
        What tells each rank's GPU from others; None is the CPU.
    name
        Of the library, for the message.

    Raises
    ------
    Unsupported
        If two ranks have one GPU.
    InvalidInput
        If ranks are on CPU and GPU.
    """
    without = [rank for rank, device in enumerate(devices) if device is None]
    if without and len(without) < len(devices):
        raise InvalidInput(
            f"rank {without[0]} is on the CPU and others are on GPUs; give all ranks a GPU, or "
            "none (device='cpu')."
        )
    first: dict[str, int] = {}
    for rank, device in enumerate(devices):
        if device is not None and first.setdefault(device, rank) != rank:
            raise Unsupported(
                f"Ranks {first[device]} and {rank} share a GPU, which {name} refuses; start no "
                f"more ranks than GPUs (--tp), or hide the GPUs ({VISIBLE_DEVICES[0]}=) to use "
                "gloo on the CPU."
            )


def lacking(verb: str) -> Unsupported:
    """Return the error of a verb that no library of collectives has."""
    return Unsupported(
        f"Transport 'rccl' has no {verb}; use --variant unfused, or --transport copy_engine or "
        "shared_memory."
    )
