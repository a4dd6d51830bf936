"""Transports: put, signal, wait and collective, one file a backend.

Names are resolved here, once; whoever has a `Transport` never asks for its name.  A backend is
imported when it is asked for, so that what one needs (a GPU, torch) is no need of the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from stretto.schedules.language import Unavailable, UnknownName
from stretto.transports.interface import Availability, Transport

__all__ = ["TRANSPORTS", "Availability", "Transport", "availability", "load_transport"]

Loader = Callable[[], type[Transport]]


def _lazily(module: str, cls: str) -> Loader:
    def load() -> type[Transport]:
        found: type[Transport] = getattr(importlib.import_module(module), cls)
        return found

    return load


TRANSPORTS: Mapping[str, Loader] = MappingProxyType(
    {
        "copy_engine": _lazily("stretto.transports.copy_engine", "CopyEngineTransport"),
        "rccl": _lazily("stretto.transports.rccl", "RcclTransport"),
        "shared_memory": _lazily("stretto.transports.shared_memory", "SharedMemoryTransport"),
    }
)
"""Every backend: its name, and what imports it."""

OTHER_NAMES: Mapping[str, str] = MappingProxyType({"nccl": "rccl"})
"""What backends are called besides: one file serves whichever library torch was built with."""


def load_transport(name: str) -> type[Transport]:
    """Import and return the backend of this name.

    Raises
    ------
    UnknownName
        If there is none; the message lists those there are.
    Unavailable
        If something that it imports is not installed.
    """
    loader = TRANSPORTS.get(OTHER_NAMES.get(name, name))
    if loader is None:
        raise UnknownName("transport", name, list(TRANSPORTS))
    try:
        return loader()
    except ImportError as error:
        raise Unavailable(f"Transport {name!r} cannot be used here: {error}.") from error


def availability() -> dict[str, Availability]:
    """Say for every backend whether it can be used here, or why not."""
    return {name: _availability(name) for name in TRANSPORTS}


def _availability(name: str) -> Availability:
    try:
        return load_transport(name).available()
    except Unavailable as error:
        return Availability(False, str(error))
