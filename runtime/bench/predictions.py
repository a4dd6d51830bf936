"""Predictions of what ``bench ag-gemm`` will measure, made before it does.

The benchmark measures bursts of graphs of several calls, so what counts is one more call among
many: the simulated time of `MANY` calls less that of half as many, divided by the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from stretto.schedules import schedule_class
from stretto.schedules.language import InvalidInput
from stretto.sim import Machine, simulate
from stretto.sim.machine import Validity, worst

__all__ = ["errors_of", "predict_rows", "widened"]

MANY = 8


def predict_rows(
    machine: Machine,
    *,
    world_size: int,
    shapes: Sequence[tuple[str, int, int]],
    rows: Sequence[int],
    variants: Sequence[str],
    dtype: str = "bf16",
) -> list[dict[str, Any]]:
    """Return, for every shape and number of rows, the microseconds of a call by variant.

    Parameters
    ----------
    machine
        Whose numbers.
    world_size
        Number of ranks.
    shapes
        Projections: name, and one rank's n and k.
    rows
        Global rows.
    variants
        Of ``ag-gemm``; ``unfused`` runs on the profile's library.
    dtype
        Of operands.

    Raises
    ------
    Unsupported
        If the profile lacks a transport, or has too few ranks in a domain.
    """
    return [
        {
            "projection": name,
            "m": m,
            "n": n,
            "k": k,
            "gemm_us": round(machine.gemm_us(m, n, k, dtype), 2),
            **_times(machine, variants, world_size, m, n, k, dtype),
        }
        for name, n, k in shapes
        for m in rows
    ]


def widened(machine: Machine, like: Machine) -> Machine:
    """Return a machine of the same GPUs in the domain of another: more ranks, and its collectives.

    Everything of one rank and of a pair stays as it was measured; that every pair has the rate of
    the measured one is assumed, and so is how the library's times grow, which are the other's.

    Raises
    ------
    InvalidInput
        If the other one's fabric is of another kind.
    """
    own, other = machine.profile, like.profile
    if own.fabric.topology != other.fabric.topology:
        raise InvalidInput(f"Machines {machine.name!r} and {like.name!r} differ in their fabric.")
    transports = dict(own.transports)
    for name, transport in other.transports.items():
        if name in transports and transport.collectives:
            mine = transports[name]
            curves = {
                kind: {**transport.collectives.get(kind, {}), **mine.collectives.get(kind, {})}
                for kind in {**transport.collectives, **mine.collectives}
            }
            transports[name] = mine.model_copy(update={"collectives": curves})
    return Machine.from_profile(
        own.model_copy(
            update={
                "name": f"{own.name} in the domain of {other.name}",
                "domain_size": other.domain_size,
                "transports": transports,
                "validation": (),
            }
        )
    )


def _times(
    machine: Machine,
    variants: Sequence[str],
    world_size: int,
    m: int,
    n: int,
    k: int,
    dtype: str,
) -> dict[str, Any]:
    """Return the time of every variant, and the validity of the least certain number used."""
    found = {variant: _steady(machine, variant, world_size, m, n, k, dtype) for variant in variants}
    return {
        "us": {variant: round(us, 2) for variant, (us, _) in found.items()},
        "numbers": worst(validity for _, validity in found.values()),
    }


def _steady(
    machine: Machine, variant: str, world_size: int, m: int, n: int, k: int, dtype: str
) -> tuple[float, Validity]:
    transport = machine.transport(machine.default_transport(variant))
    program = schedule_class("ag-gemm", variant)(
        world_size=world_size,
        m=m,
        n=n,
        k=k,
        dtype=dtype,  # type: ignore[arg-type]
        capabilities=transport.capabilities,
    ).build()
    many, half = (
        simulate(program.repeated(calls), machine, mode="graph") for calls in (MANY, MANY // 2)
    )
    return (many.makespan_us - half.makespan_us) / (MANY - MANY // 2), many.validity


def errors_of(
    predicted: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the errors of predictions: by row and variant, and their median and largest size.

    Parameters
    ----------
    predicted
        From `predict_rows`.
    measured
        Rows of the benchmark: projection, m, and microseconds by method.
    """
    found = {(row["projection"], row["m"]): row["us"] for row in measured}
    rows = []
    for row in predicted:
        times = found.get((row["projection"], row["m"]), {})
        errors = {
            variant: round(us / times[variant] - 1, 4)
            for variant, us in row["us"].items()
            if variant in times
        }
        if errors:
            rows.append({"projection": row["projection"], "m": row["m"], "errors": errors})
    sizes = [abs(one) for row in rows for one in row["errors"].values()]
    return {
        "cases": len(sizes),
        "median_error_pct": round(100 * median(sizes), 2) if sizes else None,
        "largest_error_pct": round(100 * max(sizes), 2) if sizes else None,
        "rows": rows,
    }
