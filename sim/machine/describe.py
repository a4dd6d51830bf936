"""A machine as a list of facts, for tables that people read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pydantic

from stretto.sim.machine.machine import Machine
from stretto.sim.machine.schema import (
    Count,
    Curve,
    GemmModel,
    GemmProfile,
    GemmTable,
    Quantity,
    TransportProfile,
)

__all__ = ["Fact", "describe"]

_UNITS = (
    ("_gb_per_s", "GB/s"),
    ("_tflops", "TFLOP/s"),
    ("_bytes", "bytes"),
    ("_us", "us"),
    ("_ns", "ns"),
    ("_pct", "%"),
)


class Fact(NamedTuple):
    """One line about a machine; `origin` and `source` are empty where a line needs none."""

    section: str
    name: str
    value: str
    unit: str = ""
    origin: str = ""
    source: str = ""


def describe(machine: Machine) -> list[Fact]:
    """Return what a machine's profile says, in the profile's order.

    Tables and curves are summed up in one line each.
    """
    profile = machine.profile
    facts = [
        Fact("machine", "name", profile.name),
        Fact("machine", "description", profile.description),
        Fact("machine", "kind", profile.kind),
        *_numbers("machine", "domain_size", profile.domain_size),
    ]
    for dtype, peak in profile.compute.peak_tflops.items():
        facts += _numbers("compute", f"peak_tflops.{dtype}", peak, unit="TFLOP/s")
    for name in ("sm_count", "hbm_gb_per_s", "moved_floor_us"):
        facts += _numbers("compute", name, getattr(profile.compute, name))
    for dtype, gemm in profile.compute.gemm.items():
        facts += _gemm(f"gemm {dtype}", gemm)
    facts += _numbers("host", "", profile.host)
    facts += _numbers("fabric", "", profile.fabric)
    for name, transport in profile.transports.items():
        facts += _transport(f"transport {name}", transport)
    if not profile.validation:
        facts.append(Fact("validation", "makespan", "not validated"))
    for one in profile.validation:
        error = one.makespan_error_pct
        value = f"median {error.median:g}, max {error.max:g}"
        facts.append(Fact("validation", one.what, value, "%", "measured", one.protocol))
    facts.append(Fact("provenance", "date", profile.provenance.date))
    versions = profile.provenance.versions
    facts += [Fact("provenance", name, version) for name, version in versions.items()]
    if profile.provenance.note:
        facts.append(Fact("provenance", "note", profile.provenance.note))
    return facts


def _gemm(section: str, gemm: GemmProfile) -> Iterator[Fact]:
    for table in gemm.tables:
        yield Fact(section, "table", _table(table), "", table.origin, table.source)
    if gemm.model is not None:
        yield from _model(section, gemm.model)


def _table(table: GemmTable) -> str:
    m = sorted({value for site in table.sites for value in site.m})
    points = sum(len(site.m) for site in table.sites)
    return f"{points} times at {len(table.sites)} (n, k), m {m[0]} to {m[-1]}"


def _model(section: str, model: GemmModel) -> Iterator[Fact]:
    for name in GemmModel.model_fields:
        value = getattr(model, name)
        if isinstance(value, float):
            yield Fact(
                section, f"model.{name}", f"{value:g}", _unit(name), model.origin, model.source
            )
    tiles = ", ".join(f"{tile.m}x{tile.n} at {tile.efficiency:.0%}" for tile in model.tiles)
    yield Fact(section, "model.tiles", tiles, "of peak", model.origin, model.source)
    for report in model.fit:
        value = f"median {report.median_error_pct:g}, 90 % under {report.p90_error_pct:g}"
        name = f"error, {report.what} ({report.points} times, {report.sites} sites)"
        yield Fact(section, name, value, "%", model.origin, report.protocol)


def _transport(section: str, transport: TransportProfile) -> Iterator[Fact]:
    capabilities = transport.capabilities
    yield Fact(section, "verbs", ", ".join(capabilities.verbs) or "none")
    if capabilities.collectives:
        yield Fact(section, "collectives", ", ".join(capabilities.collectives))
    if transport.put is not None:
        yield _curve(section, "put", transport.put)
    for name in ("copy_queues", "signal_us", "wait_us"):
        yield from _numbers(section, name, getattr(transport, name))
    for kind, by_size in transport.collectives.items():
        for world_size, curve in by_size.items():
            yield _curve(section, f"{kind}, {world_size} ranks", curve)
    yield from _numbers(section, "", transport.interference)


def _curve(section: str, name: str, curve: Curve) -> Fact:
    (first, fastest_us), (last, slowest_us) = curve.points[0], curve.points[-1]
    value = f"{fastest_us:g} us at {_size(first)} to {slowest_us:g} us at {_size(last)}"
    return Fact(section, name, value, f"{len(curve.points)} points", curve.origin, curve.source)


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"


def _numbers(section: str, name: str, value: object, *, unit: str | None = None) -> Iterator[Fact]:
    """Yield every number inside `value` under its dotted name."""
    if isinstance(value, (Quantity, Count)):
        shown = unit if unit is not None else _unit(name)
        yield Fact(section, name, f"{value.value:g}", shown, value.origin, value.source)
    elif isinstance(value, pydantic.BaseModel):
        for field in type(value).model_fields:
            inner = f"{name}.{field}" if name else field
            yield from _numbers(section, inner, getattr(value, field), unit=unit)
    elif value is not None:
        yield Fact(section, name, str(value))


def _unit(name: str) -> str:
    """Return the unit that a dotted name's parts end in."""
    for part in reversed(name.split(".")):
        for suffix, unit in _UNITS:
            if part.endswith(suffix):
                return unit
    return ""
