"""What a benchmark ran on, for its report."""

from __future__ import annotations

from stretto.runtime.calibration.gpu_probes import versions

__all__ = ["gpu_machine"]


def gpu_machine() -> dict[str, str]:
    """Return the GPUs and the versions of what times depend on."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {"gpu": f"{torch.cuda.device_count()} x {properties.name}", **versions()}
