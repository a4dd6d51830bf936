"""The library's group: the caller's, or a private one over the ranks' store.

A private group is the library's own object.  ``torch.distributed``'s default group is neither
needed nor touched: it may be the caller's, or another transport's, with another library.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from stretto.schedules.language import InvalidInput
from stretto.transports.distributed.steps import options

__all__ = ["given_backend", "private_backend", "warm"]

LATER_S = 1.0
"""The library's own timeout comes so much after the transport's, which says more."""


def given_backend(group: Any, rank: int, world_size: int, device: Any) -> Any:
    """Return the part of the caller's group that serves a device (None is the CPU).

    Raises
    ------
    InvalidInput
        If the group has other ranks, or nothing for the device.
    """
    import torch

    if (group.rank(), group.size()) != (rank, world_size):
        raise InvalidInput(
            f"The group given has {group.size()} ranks and this is its rank {group.rank()}; "
            f"the transport is for rank {rank} of {world_size}."
        )
    kind, fits = ("cpu", "gloo") if device is None else ("cuda", "nccl")
    try:
        backend = group._get_backend(torch.device(kind))
    except RuntimeError as error:
        raise InvalidInput(
            f"The group given has nothing for {kind}; make it with backend={fits!r}."
        ) from error
    if device is not None and backend.name() == "gloo":
        raise InvalidInput("The group given has gloo for GPUs; make it with backend='nccl'.")
    return backend


def private_backend(
    store: Any,
    key: str,
    rank: int,
    world_size: int,
    device: Any,
    *,
    timeout_s: float,
    join_timeout_s: float,
) -> Any:
    """Make a group of all ranks, together with them.

    Raises
    ------
    InvalidInput
        If the store is not one of torch.distributed.
    """
    import torch.distributed as dist

    if not isinstance(store, dist.Store):
        raise InvalidInput(
            "Transport 'rccl' needs a torch.distributed store, TCPStore or FileStore, "
            f"not {type(store).__name__}."
        )
    place = dist.PrefixStore(key, store)
    if device is None:
        limit = timedelta(seconds=join_timeout_s)
        backend = dist.ProcessGroupGloo(place, rank, world_size, timeout=limit)
        backend._set_default_timeout(timedelta(seconds=timeout_s + LATER_S))
        return backend
    made = dist.ProcessGroupNCCL.Options()
    made.global_ranks_in_group = list(range(world_size))
    made.group_name = key
    with _unwatched():
        return dist.ProcessGroupNCCL(place, rank, world_size, made)


@contextmanager
def _unwatched() -> Iterator[None]:
    """Let a group be made whose failures torch only notes.

    By default its watchdog ends the process when a rank is lost or late.  The transport notices
    itself, and says which rank and which operation; so it is told to leave that alone.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def warm(backend: Any, world_size: int, device: Any) -> None:
    """Let the library connect, and load its kernels; it must not while a graph is captured."""
    import torch

    one, many = torch.zeros(1, device=device), torch.zeros(world_size, device=device)
    for work in (
        backend.allreduce([one], options("AllreduceOptions")),
        backend._allgather_base(many, one, options("AllgatherOptions")),
        backend._reduce_scatter_base(one, many, options("ReduceScatterOptions")),
    ):
        if work is not None:
            work.wait()
    torch.cuda.synchronize(device)
