"""Timelines made by hand: a ring all-gather GEMM laid out with round numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from stretto.schedules.language import FlagEvent, Span, Timeline

Build = Callable[..., Timeline]


@pytest.fixture
def ring() -> Build:
    """Return the builder of ring timelines."""
    return build_ring


def build_ring(
    tp: int,
    *,
    gemm_us: float = 50.0,
    put_us: float = 35.0,
    latency_us: float = 2.0,
    skew_us: float = 0.0,
    calls: int = 1,
    start_us: float = 1000.0,
    roof_us: float | None = None,
    origin: Literal["measured", "simulated"] = "simulated",
    validity: str | None = "interpolated",
    clock_error_us: float = 0.0,
    machine: str = "h200-sxm",
    notes: tuple[str, ...] = (),
) -> Timeline:
    """Lay out a ring: FIFO streams, a put's signal releases the wait after `latency_us`.

    `skew_us` delays rank r by a share of it that looks random and is not.
    """
    spans: list[Span] = []
    free: dict[tuple[int, str], float] = {}
    noise = [skew_us * ((rank * 7919 + 13) % 101) / 101 for rank in range(tp)]

    def add(rank: int, stream: str, ready: float, long: float, **what: object) -> float:
        begin = max(ready, free.get((rank, stream), start_us + noise[rank]))
        end = begin + long
        free[rank, stream] = end
        spans.append(Span(rank=rank, stream=stream, start_us=begin, end_us=end, **what))  # type: ignore[arg-type]
        return end

    for call in range(calls):
        arrived: dict[tuple[int, int], float] = {}
        for rank in range(tp):
            add(
                rank,
                "compute",
                0,
                gemm_us,
                operation="gemm0",
                kind="gemm",
                call=call,
                step=0,
                shard=rank,
                flops=1e9,
            )
        for step in range(1, tp):
            put_end: dict[int, float] = {}
            for rank in range(tp):
                to = (rank + 1) % tp
                event = FlagEvent("full", to, call % 2, step, call + 1)
                put_end[to] = add(
                    rank,
                    "send",
                    arrived.get((rank, step - 1), 0),
                    put_us * (1 + noise[rank] / 400),
                    operation=f"put{step}",
                    kind="put",
                    call=call,
                    step=step,
                    shard=(rank - step + 1) % tp,
                    peer=to,
                    bytes=1_000_000,
                    signalled=(event,),
                )
            for rank in range(tp):
                source = (rank - step) % tp
                begin = free.get((rank, "receive"), start_us + noise[rank])
                end = max(begin, put_end[rank] + latency_us)
                arrived[rank, step] = end
                event = FlagEvent("full", rank, call % 2, step, call + 1, seen=call + 1)
                add(
                    rank,
                    "receive",
                    begin,
                    end - begin,
                    operation=f"wait{step}",
                    kind="wait",
                    call=call,
                    step=step,
                    shard=source,
                    awaited=(event,),
                )
                add(
                    rank,
                    "compute",
                    end,
                    gemm_us * (1 + noise[rank] / 900),
                    operation=f"gemm{step}",
                    kind="gemm",
                    call=call,
                    step=step,
                    shard=source,
                    flops=1e9,
                    after=(f"wait{step}",),
                )
        for rank in range(tp):
            add(
                rank,
                "compute",
                0,
                0.0,
                operation="credit",
                kind="signal",
                call=call,
                note="credit",
                signalled=(FlagEvent("free", (rank - 1) % tp, 0, 0, call + 1),),
            )
    return Timeline(
        name="ag-gemm",
        variant="ring",
        world_size=tp,
        shape=(("m", 1024 * tp), ("n", 2048), ("k", 7168)),
        dtype="bf16",
        transport="copy_engine",
        origin=origin,
        machine=machine,
        spans=tuple(spans),
        roof_us=calls * tp * gemm_us if roof_us is None else roof_us,
        clock_error_us=clock_error_us,
        validity=None if origin == "measured" else validity,
        notes=notes,
    )
