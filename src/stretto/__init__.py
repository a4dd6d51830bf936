"""Stretto: overlapped tensor-parallel schedules, written once, verified, then run or simulated."""

__all__ = ["__version__"]

__version__ = "0.1.0"
