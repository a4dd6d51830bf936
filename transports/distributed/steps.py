"""A collective as three steps: copies, the library's call, copies.

The library works on the given memory where it can: all blocks full, both sides contiguous and
apart, and numbers of a type that is added in itself.  Otherwise rows go through staging of the
workspace, in which every block is full.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from stretto.transports.cuda.stream import CudaStream
from stretto.transports.distributed.memory import bytes_at, torch_dtype
from stretto.transports.distributed.shape import SUMMED_IN, Shape, span_bytes
from stretto.transports.distributed.workspace import LocalWorkspace
from stretto.transports.interface import Memory

__all__ = ["Steps", "on_stream", "options", "prepare"]

Action = Callable[[], Any]
Staging = Callable[[str, int, int, Any], Any]
"""Gives a matrix of so many rows and columns, of this dtype, for a role."""


class Steps(NamedTuple):
    """What a launch does; `issue` returns the library's work, or None if the stream orders it."""

    before: tuple[Action, ...]
    issue: Action
    after: tuple[Action, ...]


def prepare(
    shape: Shape,
    workspace: LocalWorkspace,
    others: Sequence[LocalWorkspace],
    *,
    backend: Callable[[], Any],
    device: Any,
    key: Hashable,
) -> Steps:
    """Resolve everything that one collective does on one rank.

    Parameters
    ----------
    shape
        Checked.
    workspace
        Who owns the staging.
    others
        Whose memory source and destination may be in, `workspace` included.
    backend
        Returns the library's group at the time of the call.
    device
        The torch.device, None for the CPU.
    key
        Names the operation: what is prepared again under one key uses one staging.
    """
    bytewise = shape.kind == "all_gather"
    source, destination = (
        _matrix(memory, None if bytewise else shape.dtype, others, device)
        for memory in (shape.source, shape.destination)
    )
    scatter = _scatter if device is not None else _scatter_of_gloo
    make = {"all_gather": _gather, "reduce_scatter": scatter, "all_reduce": _reduce}

    def staging(role: str, rows: int, columns: int, dtype: Any) -> Any:
        return workspace.staging((key, role), rows, columns, dtype)

    return make[shape.kind](shape, source, destination, staging, backend)


def on_stream(holder: CudaStream, device: Any) -> AbstractContextManager[Any]:
    """Return the context in which a stream is torch's current one."""
    import torch

    if torch.cuda.current_stream(device).cuda_stream == holder.handle:
        return nullcontext()
    if not holder.handle:
        return torch.cuda.stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(torch.cuda.ExternalStream(holder.handle, device=device))


def options(name: str) -> Any:
    """Return the library's options of this name: on the current stream, not one of its own."""
    from torch.distributed import distributed_c10d

    made = getattr(distributed_c10d, name)()
    made.asyncOp = False
    return made


def _gather(
    shape: Shape, source: Any, destination: Any, staging: Staging, backend: Action
) -> Steps:
    before, after = [], []
    taken, given, columns = source, destination, source.shape[1]
    if not _holds(source, shape.full) or shape.overlapping:
        taken = staging("taken", shape.full, columns, source.dtype)
        before.append(_copy(source[: shape.own], taken[: shape.own]))
    if not _holds(destination, shape.stored):
        given = staging("given", shape.stored, columns, source.dtype)
        after.append(_copy(given[: shape.valid], destination[: shape.valid]))
    flat, into, how = taken.view(-1), given.view(-1), options("AllgatherOptions")
    return Steps(tuple(before), lambda: backend()._allgather_base(into, flat, how), tuple(after))


def _scatter(
    shape: Shape, source: Any, destination: Any, staging: Staging, backend: Action
) -> Steps:
    wide, columns = torch_dtype(SUMMED_IN[shape.dtype]), source.shape[1]
    before, after = [], []
    taken, given = source, destination
    if source.dtype != wide or not _holds(source, shape.stored) or shape.overlapping:
        taken = staging("taken", shape.stored, columns, wide)
        before.append(_copy(source[: shape.valid], taken[: shape.valid]))
    if source.dtype != wide or not _holds(destination, shape.full):
        given = staging("given", shape.full, columns, wide)
        after.append(_copy(given[: shape.own], destination[: shape.own]))
    flat, into, how = taken.view(-1), given.view(-1), options("ReduceScatterOptions")
    return Steps(
        tuple(before), lambda: backend()._reduce_scatter_base(into, flat, how), tuple(after)
    )


def _scatter_of_gloo(
    shape: Shape, source: Any, destination: Any, staging: Staging, backend: Action
) -> Steps:
    """Reduce everything and keep the own block.

    Gloo's reduce_scatter does the same inside, but the work that it returns cannot be waited for
    with a limit, so a lost rank would not be noticed.
    """
    total = staging("total", shape.valid, source.shape[1], torch_dtype(SUMMED_IN[shape.dtype]))
    begin = shape.rank * shape.full
    flat, how = total.view(-1), options("AllreduceOptions")
    return Steps(
        (_copy(source[: shape.valid], total),),
        lambda: backend().allreduce([flat], how),
        (_copy(total[begin : begin + shape.own], destination[: shape.own]),),
    )


def _reduce(
    shape: Shape, source: Any, destination: Any, staging: Staging, backend: Action
) -> Steps:
    wide = torch_dtype(SUMMED_IN[shape.dtype])
    source, destination = source[: shape.valid], destination[: shape.valid]
    one, other = shape.source, shape.destination
    in_place = (one.address, one.pitch_bytes) == (other.address, other.pitch_bytes)
    before, after, given = [], [], destination
    apart = in_place or not shape.overlapping
    if source.dtype != wide or not destination.is_contiguous() or not apart:
        given = staging("given", shape.valid, source.shape[1], wide)
        before.append(_copy(source, given))
        after.append(_copy(given, destination))
    elif not in_place:
        before.append(_copy(source, given))
    flat, how = given.view(-1), options("AllreduceOptions")
    return Steps(tuple(before), lambda: backend().allreduce([flat], how), tuple(after))


def _holds(matrix: Any, rows: int) -> bool:
    """Whether the library can work on `rows` rows of this memory as they are."""
    return matrix.shape[0] == rows and matrix.is_contiguous()


def _matrix(
    memory: Memory, dtype: str | None, workspaces: Sequence[LocalWorkspace], device: Any
) -> Any:
    """Return memory as a matrix [rows, elements of a row]; of bytes if `dtype` is None."""
    import torch

    kind = torch.uint8 if dtype is None else torch_dtype(dtype)
    columns = memory.row_bytes // kind.itemsize
    span = span_bytes(memory)
    if not span:
        return torch.empty((memory.rows, columns), dtype=kind, device=device)
    parts = (one.part(memory.address, span) for one in workspaces)
    found = next((one for one in parts if one is not None), None)
    flat = bytes_at(memory.address, span, device) if found is None else found
    pitch = memory.pitch_bytes // kind.itemsize if memory.rows > 1 else columns
    return flat.view(kind).as_strided((memory.rows, columns), (pitch, 1))


def _copy(source: Any, destination: Any) -> Action:
    def copy() -> None:
        destination.copy_(source)

    return copy
