"""A machine: a profile bound to the cost models that the simulator asks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from stretto.schedules.language import (
    DTYPE_BYTES,
    ProfileError,
    UnknownName,
    Unsupported,
    ceil_div,
)
from stretto.sim.machine.estimates import Estimate, worst
from stretto.sim.machine.gemm import GemmCost
from stretto.sim.machine.loading import load_profile, profile_json
from stretto.sim.machine.schema import (
    Fabric,
    GemmProfile,
    Host,
    HostFingerprint,
    ModeCosts,
    Profile,
)
from stretto.sim.machine.transport import TransportModel

__all__ = ["FabricModel", "HostModel", "Machine", "Mode"]

Mode = Literal["eager", "graph"]

_SAME_RATE: dict[str, tuple[str, ...]] = {"bf16": ("fp16",), "fp16": ("bf16",)}
"""Dtypes that run at one rate, so that a table of one serves the other."""

_SAME_LIBRARY = {"nccl": "rccl", "rccl": "nccl"}
"""The transport ``rccl`` is torch.distributed: it finds NCCL on a machine that has it."""


@dataclass(frozen=True, slots=True)
class HostModel:
    """What the host costs; see `stretto.sim.machine.schema.Host`."""

    profile: Host

    def enqueue_us(self, mode: str) -> float:
        """Return the cost of one operation: the host's (eager) or the device's (graph)."""
        return _of_mode(self.profile.enqueue_us, mode)

    @property
    def handover_us(self) -> float:
        """The time from the end of what a stream waited for to its going on."""
        handover = self.profile.handover_us
        return 0.0 if handover is None else handover.value

    @property
    def contention(self) -> float:
        """On a cpu: factor by which computation takes longer where threads outnumber cores."""
        contention = self.profile.contention
        return 1.0 if contention is None else contention.value

    @property
    def gemm_threads(self) -> int | None:
        """On a cpu: threads that one GEMM had when it was measured."""
        return self.profile.gemm_threads

    def call_us(self, mode: str) -> float:
        """Return the cost of one call (eager) or of one graph launch (graph)."""
        return _of_mode(self.profile.call_us, mode)


@dataclass(frozen=True, slots=True)
class FabricModel:
    """The fast fabric, as plain numbers."""

    topology: Literal["switch", "point_to_point"]
    egress_gb_per_s: float
    ingress_gb_per_s: float
    link_gb_per_s: float | None
    hbm_gb_per_s: float

    @classmethod
    def of(cls, fabric: Fabric) -> FabricModel:
        """Return the numbers of a profile's fabric."""
        link = fabric.link_gb_per_s
        return cls(
            fabric.topology,
            fabric.egress_gb_per_s.value,
            fabric.ingress_gb_per_s.value,
            None if link is None else link.value,
            fabric.hbm_gb_per_s.value,
        )


class Machine:
    """A machine that programs are simulated on.

    Made by `load` or `from_profile`; it does not change, and it can be pickled.

    Attributes
    ----------
    profile
        The numbers, each with its origin.
    name, kind, domain_size
        From the profile.
    host, fabric
        Costs of the host; rates of the fabric.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.name = profile.name
        self.kind = profile.kind
        self.domain_size = profile.domain_size.value
        self.host = HostModel(profile.host)
        self.fabric = FabricModel.of(profile.fabric)
        self._moved_floor_us = profile.compute.moved_floor_us.value
        self._moved_gb_per_s = profile.compute.hbm_gb_per_s.value
        self._gemm_costs: dict[str, tuple[GemmCost, bool]] = {}
        self._transports: dict[str, TransportModel] = {}

    def __repr__(self) -> str:
        return f"Machine({self.name!r})"

    def __reduce__(self) -> tuple[type[Machine], tuple[Profile]]:
        return type(self), (self.profile,)

    @classmethod
    def load(cls, name: str | Path) -> Machine:
        """Return a shipped machine by its name, or the one in a ``.json`` file.

        Raises
        ------
        UnknownName
            If there is no such machine.
        ProfileError
            If the file cannot be read or does not hold a profile.
        """
        return cls(load_profile(name))

    @classmethod
    def from_profile(cls, profile: Profile) -> Machine:
        """Return the machine that a profile describes."""
        return cls(profile)

    def to_json(self) -> str:
        """Return the profile as text that `load` reads back."""
        return profile_json(self.profile)

    @property
    def cores(self) -> int | None:
        """Cores of the host that a cpu profile was measured on; None for GPUs."""
        fingerprint = self.profile.host.fingerprint
        return fingerprint.cores if self.kind == "cpu" and fingerprint is not None else None

    @cached_property
    def validation_note(self) -> str:
        """What validation says of this machine's predictions, or "not validated"."""
        return (
            "; ".join(
                f"{one.what}: makespan off by {one.makespan_error_pct.median:g} % in the median, "
                f"{one.makespan_error_pct.max:g} % at most"
                for one in self.profile.validation
            )
            or "not validated"
        )

    def check_host(self, fingerprint: HostFingerprint) -> None:
        """Refuse a cpu profile that was measured on another host than this one.

        Raises
        ------
        ProfileError
            If it was; the message says how to make a profile of this host.
        """
        made_on = self.profile.host.fingerprint
        if self.kind == "cpu" and made_on is not None and made_on != fingerprint:
            raise ProfileError(
                f"Profile {self.name!r} was measured on {made_on.cpu_model} with "
                f"{made_on.cores} cores, this host is {fingerprint.cpu_model} with "
                f"{fingerprint.cores}; run `stretto calibrate` here."
            )

    def gemm_waves(self, m: int, n: int) -> int:
        """Return in how many waves the tiles of a GEMM's output run, one a multiprocessor each.

        The tile is 128 x 256, the one that GEMM libraries take for large matrices on today's GPUs.
        """
        tiles = ceil_div(m, 128) * ceil_div(n, 256)
        return ceil_div(tiles, self.profile.compute.sm_count.value)

    def gemm_us(self, m: int, n: int, k: int, dtype: str) -> float:
        """Return the time of ``out[m, n] = a[m, k] @ b[n, k].T`` on one rank, in microseconds."""
        return self.gemm(m, n, k, dtype).us

    def gemm(self, m: int, n: int, k: int, dtype: str) -> Estimate:
        """Return `gemm_us` with its validity; see `stretto.sim.machine.gemm` for the method.

        Raises
        ------
        Unsupported
            If the profile knows nothing of that dtype.
        """
        cost, own = self._gemm_cost(dtype)
        estimate = cost.estimate(m, n, k)
        if own:
            return estimate
        return Estimate(estimate.us, worst((estimate.validity, "extrapolated")))

    def flops_us(self, flops: float, dtype: str) -> float:
        """Return the time of that many matrix operations at the rate of a large GEMM."""
        return flops / self._gemm_cost(dtype)[0].best_tflops / 1e6

    def moved_us(self, moved_bytes: float) -> float:
        """Return the time of memory-bound work (copies, per-row operations), reads and writes."""
        if moved_bytes <= 0:
            return 0.0
        return self._moved_floor_us + moved_bytes / self._moved_gb_per_s / 1e3

    def default_transport(self, variant: str | None) -> str:
        """Return the transport that a variant runs on unless another one is named.

        The first of the profile that can push, or, for ``unfused``, the first whose collectives
        are a library's own (it has no put), else the first with collectives.
        """
        profiles = self.profile.transports
        wanted = "collective" if variant == "unfused" else "put"
        fitting = [name for name, one in profiles.items() if wanted in one.capabilities.verbs]
        if wanted == "collective":
            fitting.sort(key=lambda name: "put" in profiles[name].capabilities.verbs)
        return (fitting or list(profiles))[0]

    def transport(self, name: str) -> TransportModel:
        """Return one transport's costs; ``rccl`` and ``nccl`` stand for each other.

        Raises
        ------
        UnknownName
            If the machine has none of that name.
        """
        known = self.profile.transports
        if name not in known and _SAME_LIBRARY.get(name) in known:
            name = _SAME_LIBRARY[name]
        if name not in known:
            raise UnknownName(f"transport of machine {self.name}", name, list(known))
        if name not in self._transports:
            self._transports[name] = TransportModel(
                name, known[name], self.profile.fabric, machine=self.name
            )
        return self._transports[name]

    def _gemm_cost(self, dtype: str) -> tuple[GemmCost, bool]:
        """Return the costs for a dtype, and whether they are its own."""
        found = self._gemm_costs.get(dtype)
        if found is None:
            found = self._gemm_costs[dtype] = self._make_gemm_cost(dtype)
        return found

    def _make_gemm_cost(self, dtype: str) -> tuple[GemmCost, bool]:
        compute = self.profile.compute
        candidates = [dtype, *_SAME_RATE.get(dtype, ())]
        timed = [one for one in candidates if one in compute.gemm]
        rated = [one for one in candidates if one in compute.peak_tflops]
        if not rated:
            raise Unsupported(
                f"Machine {self.name!r} gives no matrix rate for {dtype}; "
                f"it has {', '.join(compute.peak_tflops)}."
            )
        source = (timed or rated)[0]
        peak = compute.peak_tflops[source if source in rated else rated[0]]
        cost = GemmCost(
            compute.gemm.get(source, GemmProfile()),
            peak_tflops=peak.value,
            sm_count=compute.sm_count.value,
            element_bytes=DTYPE_BYTES[dtype],
            hbm_gb_per_s=compute.hbm_gb_per_s.value,
        )
        return cost, source == dtype


def _of_mode(costs: ModeCosts, mode: str) -> float:
    if mode == "eager":
        return costs.eager.value
    if mode == "graph":
        return costs.graph.value
    raise UnknownName("mode", mode, ["eager", "graph"])
