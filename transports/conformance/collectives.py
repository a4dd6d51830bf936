"""Cases about collectives, held against numpy."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.schedules.language import (
    DTYPE_BYTES,
    CollectiveKind,
    DType,
    Extent,
    InvalidInput,
    RunFailed,
)
from stretto.transports.conformance.case import Case, RankContext, expect
from stretto.transports.interface import Launch, Memory, Transport, Workspace

__all__ = ["CASES"]

Array = npt.NDArray[Any]
_COLUMNS = 24
_LATENESS_S = 0.02
_STORED: dict[str, Any] = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}
_SIGNIFICANT_BITS = {"bf16": 8, "fp16": 11, "fp32": 24, "fp64": 53}


def all_gathers_are_right(context: RankContext) -> None:
    """Every rank gets all blocks, the short and the empty ones included."""
    _check_kind(context, "all_gather")


def reduce_scatters_are_right(context: RankContext) -> None:
    """Every rank gets its block of the sum."""
    _check_kind(context, "reduce_scatter")


def all_reduces_are_right(context: RankContext) -> None:
    """Every rank gets the whole sum."""
    _check_kind(context, "all_reduce")


def sums_are_rounded_once(context: RankContext) -> None:
    """Sums of random numbers are as near as one rounding, after adding in fp32 or better."""
    transport, rows = context.transport(), 8 * context.world_size
    workspace = _workspace(context, transport, rows)
    for dtype in context.harness.dtypes:
        given = [
            _rounded(np.random.default_rng(rank).standard_normal((rows, _COLUMNS)), dtype)
            for rank in range(context.world_size)
        ]
        exact, absolute = sum(given), sum(np.abs(one) for one in given)
        found = _once(context, transport, workspace, "all_reduce", given, dtype, rows)
        adding_bits = max(24, _SIGNIFICANT_BITS[dtype])
        allowed = np.abs(exact) * 2.0 ** -_SIGNIFICANT_BITS[dtype]
        allowed += absolute * context.world_size * 2.0**-adding_bits
        worst = float(np.max(np.abs(found - exact) - allowed))
        expect(worst <= 0, f"{dtype}: a sum is off by {worst} more than one rounding")
    transport.barrier()


def collectives_follow_each_other(context: RankContext) -> None:
    """Back to back on one slot, with ranks late to come and late to read: no result is overrun."""
    transport, rows = context.transport(), 3 * context.world_size - 1
    workspace = _workspace(context, transport, rows)
    offered = transport.offered()
    kinds = [kind for kind in offered.collectives if offered.lacks("collective", kind) is None]
    lazy = random.Random(context.rank)
    for turn in range(24):
        if lazy.random() < 0.3:
            time.sleep(_LATENESS_S)
        kind = kinds[turn % len(kinds)]
        given = [_integers(rank, turn, rows) for rank in range(context.world_size)]
        pause_s = _LATENESS_S if lazy.random() < 0.3 else 0.0
        found = _once(context, transport, workspace, kind, given, "fp32", rows, pause_s)
        expected = _expected(context, kind, given, rows)
        expect(np.array_equal(found, expected), f"turn {turn}: {kind} went wrong")
    transport.barrier()


def wrong_blocks_are_refused(context: RankContext) -> None:
    """Rectangles that do not fit the blocks are errors at preparation."""
    transport, ranks = context.transport(), context.world_size
    workspace = _workspace(context, transport, 2 * ranks)
    at = workspace.address("data", rank=context.rank, slot=0)
    source = context.local(bytes(4096))
    kind = transport.offered().collectives[0]
    refused = 0
    for blocks, row_bytes, dtype in (
        ([2] * (ranks + 1), 16, "fp32"),
        ([2] * ranks, 12, "fp32"),
        ([2] * ranks, 16, "fp31"),
    ):
        gathers, scatters = kind == "all_gather", kind == "reduce_scatter"
        taken = Memory(source.address, 2 if gathers else 2 * ranks, 16, 16)
        target = Memory(at, 2 if scatters else 2 * ranks, row_bytes, 16)
        try:
            transport.collective(workspace, kind, taken, target, dtype=dtype, blocks=blocks)
        except InvalidInput:
            refused += 1
    expect(refused == 3, f"{3 - refused} wrong collectives were prepared")
    transport.barrier()


def different_collectives_are_noticed(context: RankContext) -> None:
    """Ranks that issue collectives of different size get an error, not a mixture or a hang."""
    transport, rows = context.transport(timeout_s=5.0), 2 * context.world_size
    workspace = _workspace(context, transport, rows)
    shape = rows - (1 if context.rank == 0 else 0)
    kind = transport.offered().collectives[0]
    given = [np.zeros((rows, _COLUMNS)) for _ in range(context.world_size)]
    try:
        _once(context, transport, workspace, kind, given, "fp32", shape)
        failed = False
    except (InvalidInput, RunFailed):
        failed = True
    expect(failed, f"{kind} of different blocks went through")


def _check_kind(context: RankContext, kind: CollectiveKind) -> None:
    transport, ranks = context.transport(), context.world_size
    workspace = _workspace(context, transport, 5 * ranks)
    for dtype in context.harness.dtypes:
        for rows in sorted({1, ranks, ranks + 1, 2 * ranks + 1, 5 * ranks - 1}):
            given = [_integers(rank, rows, rows) for rank in range(ranks)]
            found = _once(context, transport, workspace, kind, given, dtype, rows)
            expected = _expected(context, kind, given, rows)
            expect(
                np.array_equal(found, expected),
                f"{kind} of {rows} rows, {dtype}: {np.sum(found != expected)} numbers are wrong",
            )
    transport.barrier()


def _workspace(context: RankContext, transport: Transport, rows: int) -> Workspace:
    stored = Extent(rows, "padded").stored(context.world_size)
    return context.workspace(transport, buffers=(("data", stored * _COLUMNS * 8, 1),))


def _once(
    context: RankContext,
    transport: Transport,
    workspace: Workspace,
    kind: CollectiveKind,
    given: list[Array],
    dtype: DType,
    rows: int,
    pause_s: float = 0.0,
) -> Array:
    """Run one collective of what the ranks give ([rows, columns] each); return this rank's result.

    In an all_gather each rank gives its block of its matrix.
    """
    extent, row_bytes = Extent(rows), _COLUMNS * DTYPE_BYTES[dtype]
    blocks = [extent.valid(rank, context.world_size) for rank in range(context.world_size)]
    begin = sum(blocks[: context.rank])
    own = given[context.rank][:rows]
    if kind == "all_gather":
        own = own[begin : begin + blocks[context.rank]]
    here = workspace.address("data", rank=context.rank, slot=0)
    count = blocks[context.rank] if kind == "reduce_scatter" else rows
    data = _encoded(own, dtype)
    source = context.local(data)._replace(rows=len(own), row_bytes=row_bytes, pitch_bytes=row_bytes)
    launch: Launch = transport.collective(
        workspace,
        kind,
        source,
        Memory(here, count, row_bytes, row_bytes),
        dtype=dtype,
        blocks=blocks,
        **context.on("main", kind),
    )
    context.run(launch)
    time.sleep(pause_s)
    return _decoded(context.device.read(here, count * row_bytes), dtype)


def _expected(context: RankContext, kind: CollectiveKind, given: list[Array], rows: int) -> Array:
    extent = Extent(rows)
    blocks = [extent.valid(rank, context.world_size) for rank in range(context.world_size)]
    begins = [sum(blocks[:rank]) for rank in range(context.world_size)]
    if kind == "all_gather":
        parts = zip(given, begins, blocks, strict=True)
        return np.concatenate([one[begin : begin + count] for one, begin, count in parts])
    total: Array = np.sum(given, axis=0)
    if kind == "all_reduce":
        return total
    return total[begins[context.rank] : begins[context.rank] + blocks[context.rank]]


def _integers(rank: int, turn: int, rows: int) -> Array:
    """Return whole numbers so small that every type adds them without rounding."""
    numbers = np.random.default_rng((rank, turn)).integers(-8, 9, (rows, _COLUMNS))
    return numbers.astype(np.float64)


def _rounded(numbers: Array, dtype: DType) -> Array:
    """Return the numbers of `dtype` next to the given ones (bf16: next below in size), in fp64."""
    return _decoded(_encoded(numbers, dtype), dtype)


def _encoded(numbers: Array, dtype: DType) -> bytes:
    if dtype == "bf16":
        bits = numbers.astype(np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).tobytes()
    return numbers.astype(_STORED[dtype]).tobytes()


def _decoded(data: bytes, dtype: DType) -> Array:
    if dtype == "bf16":
        bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        numbers: Array = bits.view(np.float32)
    else:
        numbers = np.frombuffer(data, _STORED[dtype])
    return numbers.astype(np.float64).reshape(-1, _COLUMNS)


CASES = (
    Case(all_gathers_are_right, ("collective",), "all_gather"),
    Case(reduce_scatters_are_right, ("collective",), "reduce_scatter"),
    Case(all_reduces_are_right, ("collective",), "all_reduce"),
    Case(sums_are_rounded_once, ("collective",), "all_reduce"),
    Case(collectives_follow_each_other, ("collective",)),
    Case(wrong_blocks_are_refused, ("collective",)),
    Case(different_collectives_are_noticed, ("collective",), least_ranks=2),
)
