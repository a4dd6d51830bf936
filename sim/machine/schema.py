"""What a machine profile holds: frozen pydantic models, the JSON form of which is the file format.

Every number carries its origin and a source (text or URL): a single number as a `Quantity` or a
`Count`, a table or a fitted model once for all its numbers.  Unknown fields are refused.

Version 1 of the format; a change that older files do not fit raises `SCHEMA_VERSION`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, pairwise
from typing import Annotated, Literal, Self, TypeVar

import pydantic

from stretto.schedules.language import Capabilities, CollectiveKind, DType

__all__ = [
    "SCHEMA_VERSION",
    "Compute",
    "Count",
    "Curve",
    "Fabric",
    "FitReport",
    "GemmModel",
    "GemmProfile",
    "GemmTable",
    "GemmTile",
    "Host",
    "HostFingerprint",
    "Interference",
    "MedianMax",
    "ModeCosts",
    "Origin",
    "Profile",
    "Provenance",
    "Quantity",
    "Site",
    "TransportProfile",
    "Validation",
]

SCHEMA_VERSION = 1

Origin = Literal["measured", "fitted", "published", "assumed", "derived"]
"""Where a number comes from: measured on such a machine by whoever made the profile; fitted to
named data; published by others; assumed for want of anything better; derived from other numbers."""

Text = Annotated[str, pydantic.StringConstraints(min_length=1)]
Positive = Annotated[float, pydantic.Field(gt=0)]
PositiveInt = Annotated[int, pydantic.Field(gt=0)]
NotNegative = Annotated[float, pydantic.Field(ge=0)]


class Frozen(pydantic.BaseModel):
    """Base of all: immutable, no unknown fields, no infinities, no numbers written as text."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True, use_attribute_docstrings=True
    )


class Sourced(Frozen):
    """Something that came from somewhere."""

    origin: Origin
    source: Text


class Quantity(Sourced):
    """One number; its unit is in the name of the field that holds it."""

    value: NotNegative


class Count(Sourced):
    """One whole number."""

    value: Annotated[int, pydantic.Field(ge=0)]


Number = TypeVar("Number", Quantity, Count)


def _above_zero(number: Number) -> Number:
    if number.value <= 0:
        raise ValueError("must be above zero")
    return number


PositiveQuantity = Annotated[Quantity, pydantic.AfterValidator(_above_zero)]
PositiveCount = Annotated[Count, pydantic.AfterValidator(_above_zero)]


class Curve(Sourced):
    """Time against size: rows of (bytes, microseconds), bytes growing."""

    points: Annotated[tuple[tuple[PositiveInt, Positive], ...], pydantic.Field(min_length=2)]

    @pydantic.field_validator("points")
    @classmethod
    def _sizes_grow(cls, points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        if any(one[0] >= two[0] for one, two in pairwise(points)):
            raise ValueError("the bytes of a curve must grow from point to point")
        return points


class Site(Frozen):
    """GEMM times of one (n, k), by m: ``out[m, n] = a[m, k] @ b[n, k].T``."""

    n: PositiveInt
    k: PositiveInt
    m: Annotated[tuple[PositiveInt, ...], pydantic.Field(min_length=1)]
    us: tuple[Positive, ...]

    @pydantic.model_validator(mode="after")
    def _rows_agree(self) -> Self:
        if len(self.m) != len(self.us):
            raise ValueError("m and us of a site must have equal length")
        if any(one >= two for one, two in pairwise(self.m)):
            raise ValueError("the m of a site must grow")
        return self


class GemmTable(Sourced):
    """GEMM times from one source, by (n, k)."""

    sites: Annotated[tuple[Site, ...], pydantic.Field(min_length=1)]

    @pydantic.field_validator("sites")
    @classmethod
    def _sites_differ(cls, sites: tuple[Site, ...]) -> tuple[Site, ...]:
        if len({(site.n, site.k) for site in sites}) != len(sites):
            raise ValueError("a table must name every (n, k) once")
        return sites

    @classmethod
    def from_rows(
        cls, rows: Iterable[tuple[int, int, int, float]], *, origin: Origin, source: str
    ) -> GemmTable:
        """Return the table of rows (m, n, k, microseconds)."""
        ordered = sorted((int(n), int(k), int(m), float(us)) for m, n, k, us in rows)
        sites = []
        for (n, k), group in groupby(ordered, key=lambda row: row[:2]):
            measured = list(group)
            sites.append(
                Site(
                    n=n,
                    k=k,
                    m=tuple(row[2] for row in measured),
                    us=tuple(row[3] for row in measured),
                )
            )
        return cls(origin=origin, source=source, sites=tuple(sites))

    def rows(self) -> list[tuple[int, int, int, float]]:
        """Return its rows (m, n, k, microseconds)."""
        return [
            (m, site.n, site.k, us)
            for site in self.sites
            for m, us in zip(site.m, site.us, strict=True)
        ]


class GemmTile(Frozen):
    """One output tile that the GEMM library may choose, and the share of peak it reaches."""

    m: PositiveInt
    n: PositiveInt
    efficiency: Positive


class FitReport(Frozen):
    """How well a fit did on data that it had not seen."""

    what: Text
    sites: PositiveInt
    points: PositiveInt
    median_error_pct: NotNegative
    p90_error_pct: NotNegative
    protocol: Text


class GemmModel(Sourced):
    """A GEMM's time from tiles and waves; `stretto.sim.machine.gemm.model_us` is the formula."""

    launch_us: NotNegative
    """Fixed part of every GEMM."""
    read_gb_per_s: Positive | None = None
    """Rate at which operands come from memory (caches included); none: the compute's."""
    write_gb_per_s: Positive | None = None
    """Rate at which the result goes to memory; none: the compute's."""
    tile_us: NotNegative
    """Prologue and epilogue of one tile."""
    wave_rounding: Annotated[float, pydantic.Field(ge=0, le=1)]
    """0: a part-filled last wave costs its part; 1: it costs a whole wave."""
    overlap_exponent: Annotated[float, pydantic.Field(ge=1)]
    """p of ``(compute^p + memory^p)^(1/p)``: 1 adds them, infinity takes the larger."""
    split_k_us: NotNegative
    """Cost of splitting k among several workers and adding their parts up."""
    sustained_slowdown: NotNegative
    """Share by which long GEMMs run slower (clocks under power limits)."""
    quantise_row_ns: NotNegative = 0.0
    """Per row of a: fixed part of quantising it, where the measured operation includes that."""
    quantise_pass_ns: NotNegative = 0.0
    """Per row and 2048 elements of k, likewise."""
    tiles: Annotated[tuple[GemmTile, ...], pydantic.Field(min_length=1)]
    fit: tuple[FitReport, ...] = ()


class GemmProfile(Frozen):
    """What is known of GEMMs of one dtype.

    A site of an earlier table goes before the same site of a later one, inside its range of m.
    The table with most sites also corrects the model between sites.
    """

    tables: tuple[GemmTable, ...] = ()
    model: GemmModel | None = None


class Compute(Frozen):
    """One rank's processor."""

    peak_tflops: Annotated[dict[DType, PositiveQuantity], pydantic.Field(min_length=1)]
    sm_count: PositiveCount
    hbm_gb_per_s: PositiveQuantity
    """Achieved by copies and per-row work, reads and writes counted together."""
    moved_floor_us: Quantity
    """Time of the smallest memory-bound kernel."""
    gemm: dict[DType, GemmProfile] = {}


class ModeCosts(Frozen):
    """A cost that differs between eager calls and replays of a captured graph."""

    eager: Quantity
    graph: Quantity


class HostFingerprint(Frozen):
    """Which host a profile was measured on; only there a cpu profile means anything."""

    cpu_model: Text
    cores: PositiveInt


class Host(Frozen):
    """What the host costs."""

    enqueue_us: ModeCosts
    """Per operation: eager, the host's time to enqueue it; graph, the device's per node."""
    call_us: ModeCosts
    """Per call: eager, entering the library; graph, launching the graph."""
    handover_us: Quantity | None = None
    """From the end of what a stream waited for to its going on; None is nothing."""
    contention: PositiveQuantity | None = None
    """On a cpu: time of GEMMs that share cores over that of fair shares without loss (caches,
    switching); None is no loss."""
    gemm_threads: PositiveInt | None = None
    """On a cpu: threads that one GEMM had when it was measured."""
    fingerprint: HostFingerprint | None = None


class Fabric(Frozen):
    """The fast fabric between the ranks of a domain, one direction, payload as achieved."""

    topology: Literal["switch", "point_to_point"]
    egress_gb_per_s: PositiveQuantity
    ingress_gb_per_s: PositiveQuantity
    link_gb_per_s: PositiveQuantity | None = None
    """Between one pair of ranks; needed for point_to_point."""
    hbm_gb_per_s: PositiveQuantity
    """What copies, collectives and kernels of one rank share."""

    @pydantic.model_validator(mode="after")
    def _pairs_have_links(self) -> Self:
        if self.topology == "point_to_point" and self.link_gb_per_s is None:
            raise ValueError("a point_to_point fabric needs link_gb_per_s")
        return self


class Interference(Frozen):
    """What communication does to compute beside it."""

    gemm_slowdown_beside_put: Quantity
    """Fraction by which a GEMM takes longer while this rank pushes (0.18: 18 % longer)."""
    gemm_slowdown_beside_collective: Quantity
    """The same while a collective runs, the SMs that it holds included."""
    sms_held: Count
    """Streaming multiprocessors that a collective holds."""
    gemm_waves_beside_wait: Quantity | None = None
    """Waves of tiles that a GEMM takes more if it starts while a wait of the same rank polls on a
    multiprocessor; None: not known, and not modelled."""


class TransportProfile(Frozen):
    """What one transport can do on this machine, and what each verb costs."""

    capabilities: Capabilities
    put: Curve | None = None
    """One put alone on an idle machine."""
    copy_queues: PositiveCount | None = None
    """Puts that one rank can have in progress at a time."""
    signal_us: Quantity | None = None
    """From the end of what precedes a signal to its being visible on the peer."""
    wait_us: Quantity | None = None
    """From a visible signal to the waiting stream going on."""
    collectives: dict[
        CollectiveKind, Annotated[dict[int, Curve], pydantic.Field(min_length=1)]
    ] = {}
    """By kind and world size; bytes are those of the full tensor."""
    interference: Interference

    @pydantic.model_validator(mode="after")
    def _verbs_have_costs(self) -> Self:
        verbs = self.capabilities.verbs
        needed: dict[str, dict[str, object]] = {
            "put": {"put": self.put, "copy_queues": self.copy_queues},
            "signal": {"signal_us": self.signal_us},
            "wait": {"wait_us": self.wait_us},
        }
        for verb, fields in needed.items():
            for field, value in fields.items():
                if verb in verbs and value is None:
                    raise ValueError(f"a transport that can {verb} needs {field}")
        if self.put and any(one[1] > two[1] for one, two in pairwise(self.put.points)):
            raise ValueError("in put, more bytes must not take less time")
        for kind, by_size in self.collectives.items():
            if kind not in self.capabilities.collectives:
                raise ValueError(f"it has times of {kind}, which its capabilities lack")
            if min(by_size) < 2:
                raise ValueError(f"{kind} is timed for {min(by_size)} ranks; it needs two or more")
        return self


class MedianMax(Frozen):
    """Two numbers that sum up a distribution."""

    median: NotNegative
    max: NotNegative


class Validation(Frozen):
    """One comparison of predictions with real runs."""

    what: Text
    makespan_error_pct: MedianMax
    protocol: Text


class Provenance(Frozen):
    """When the profile was made, and with which software the numbers were found."""

    date: Annotated[str, pydantic.StringConstraints(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    versions: dict[str, str] = {}
    note: str = ""


class Profile(Frozen):
    """A machine, as numbers."""

    schema_version: Literal[1]
    name: Text
    description: Text
    kind: Literal["gpu", "cpu"]
    domain_size: PositiveCount
    """Most ranks that share the fast fabric."""
    compute: Compute
    host: Host
    fabric: Fabric
    transports: dict[str, TransportProfile]
    validation: tuple[Validation, ...] = ()
    """Empty: not validated."""
    provenance: Provenance

    @pydantic.model_validator(mode="after")
    def _names_agree(self) -> Self:
        for name, transport in self.transports.items():
            if transport.capabilities.transport != name:
                raise ValueError(
                    f"transports.{name}.capabilities.transport is "
                    f"{transport.capabilities.transport!r}, not {name!r}"
                )
        if self.kind == "cpu" and self.host.fingerprint is None:
            raise ValueError("a cpu profile needs host.fingerprint, of the host it was measured on")
        return self
