"""What a benchmark ran on, for its report."""

from __future__ import annotations

import platform

__all__ = ["gpu_machine"]


def gpu_machine() -> dict[str, str]:
    """Return GPUs and versions; the driver's where nvidia-ml-py is installed."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": f"{torch.cuda.device_count()} x {properties.name}",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
        "python": platform.python_version(),
        "driver": _driver(),
    }


def _driver() -> str:
    try:
        import pynvml
    except ImportError:
        return "unknown: nvidia-ml-py is not installed"
    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
