"""Programs, buffers and numbers written out by hand, for the interpreter's tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stretto.schedules.language import (
    Body,
    Buffer,
    Extent,
    Flag,
    OperationBase,
    Phase,
    Program,
)


def caller(name: str, rows: int, columns: int = 2, *, role: str = "input", **fields) -> Buffer:
    initial = "undefined" if role == "output" else "caller"
    return Buffer(name, role, "fp32", Extent(rows), Extent(columns), initial=initial, **fields)


def symmetric(name: str, rows: int, columns: int = 2, **fields) -> Buffer:
    fields.setdefault("reuse", "never")
    return Buffer(
        name, "workspace", "fp32", Extent(rows), Extent(columns), kind="symmetric", **fields
    )


def program(
    world_size: int,
    buffers: Sequence[Buffer],
    flags: Sequence[Flag],
    *bodies: Sequence[OperationBase],
) -> Program:
    """Return a Program of one phase; with several bodies, one a rank."""
    return Program(
        name="by-hand",
        variant="test",
        world_size=world_size,
        shape=(),
        dtype="fp32",
        transport="test",
        buffers=tuple(buffers),
        flags=tuple(flags),
        phases=(
            Phase(
                "call",
                tuple(Body(tuple(body)) for body in bodies),
                tuple(range(world_size)) if len(bodies) > 1 else (),
            ),
        ),
    )


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(float)


def sharded(name: str, rows: int, columns: int = 2, *, role: str) -> Buffer:
    initial = "undefined" if role == "output" else "caller"
    return Buffer(name, role, "fp32", Extent(rows, "shard"), Extent(columns), initial=initial)
