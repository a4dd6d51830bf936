"""From the figures of all ranks to a machine profile; pure arithmetic, no GPU needed.

How the simulator's numbers come about:

``signal_us``
    A four-byte copy in a chain of them: from what precedes it to its being visible.
``wait_us``
    One way of the ping-pong, less ``signal_us``.  Both of an idle device: where a wait is followed
    by a GEMM, nothing else runs there.  What they cost beside a GEMM is in their source.
``enqueue_us.graph``
    Nothing: every operation was measured as a node of a graph, so its time holds the node's.
``handover_us``
    A level of the ladder less a node of the chain: what an edge from another stream costs.
``call_us.graph``
    From an event on an idle device, through a graph of what begins a call and one small kernel, to
    the next event, less a node.
``enqueue_us.eager``, ``call_us.eager``
    The host's time for a call of a Program of one round and of four: the slope over operations, and
    what remains.
``gemm_slowdown_beside_put`` (and ``_collective``)
    Median over shapes of the time beside it over the time alone, less 1, corrected where the
    communication ended before the GEMMs.
``egress_gb_per_s``
    The best rate of a push after the time of the smallest one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from stretto.runtime.calibration.figures import Figures
from stretto.schedules.language import (
    ALL_COLLECTIVES,
    Capabilities,
    CollectiveKind,
    DType,
    InvalidInput,
    RunFailed,
)
from stretto.sim.machine.fitting import GemmPoints, fit_gemm_profile
from stretto.sim.machine.schema import (
    Compute,
    Count,
    Curve,
    Fabric,
    GemmProfile,
    GemmTable,
    Host,
    Interference,
    ModeCosts,
    Profile,
    Provenance,
    Quantity,
    TransportProfile,
)
from stretto.transports import load_transport

__all__ = ["gpu_profile", "slowdown"]

PROTOCOL = (
    "CUDA graphs in bursts after a barrier, cases interleaved in random order, slowest rank, "
    "median over rounds"
)
MIB = 1 << 20
FEWEST_TO_FIT = 70
"""GEMMs below which no model is fitted (a fifth of the sites is held out of a first fit)."""

RATE_BYTES = 8 * MIB
"""Smallest push that a link's rate is taken from."""

LEVEL = 0.98
"""Both directions at once are as fast as one if they reach this share of it."""


def gpu_profile(ranks: Sequence[Mapping[str, Any]], *, name: str | None = None) -> Profile:
    """Return the profile that the figures of all ranks make.

    Parameters
    ----------
    ranks
        By rank, as from `stretto.runtime.calibration.gpu_probes.measure_gpu`, or as read from the
        files that it leaves.
    name
        Of the profile; by default made of the device's name and number.

    Raises
    ------
    RunFailed
        If pushes or all GEMMs are missing; everything else that is missing is assumed, and says
        so.
    """
    return _Maker(Figures(ranks)).profile(name)


def slowdown(alone_us: float, beside_us: float, cover: float) -> float:
    """Return the fraction by which something takes longer beside something else.

    Parameters
    ----------
    alone_us, beside_us
        Time alone and beside.
    cover
        Share of `beside_us` in which the other thing ran; the rest went on as alone.
    """
    covered = min(cover, 1.0) * beside_us
    left = alone_us - (beside_us - covered)
    return max(covered / left - 1.0, 0.0) if left > 0 and covered > 0 else 0.0


class _Maker:
    def __init__(self, figures: Figures) -> None:
        self.figures = figures
        device = figures.device
        self.where = f"stretto calibrate on {figures.world_size} x {device['name']}, {figures.date}"
        self.one_way = _slowest(
            [figures.curve("push", f"one_way/{rank}/") for rank in range(figures.world_size)]
        )
        self.both_ways = figures.curve("push", "both_ways/")

    def profile(self, name: str | None) -> Profile:
        figures, device = self.figures, self.figures.device
        if len(self._push_curve()) < 2:
            raise RunFailed(f"Pushes were not measured: {figures.reason('push')}.")
        gemms = self._gemms()
        hbm = self._hbm()
        return Profile(
            schema_version=1,
            name=name or _slug(str(device["name"]), figures.world_size),
            description=f"{figures.world_size} x {device['name']} of one host, measured",
            kind="gpu",
            domain_size=Count(
                value=int(device["count"]),
                origin="measured",
                source=f"{self.where}: GPUs with peer access to each other",
            ),
            compute=Compute(
                peak_tflops={dtype: self._peak(dtype) for dtype in gemms},
                sm_count=Count(
                    value=int(device["sm_count"]),
                    origin="measured",
                    source=f"{self.where}: what the driver says",
                ),
                hbm_gb_per_s=hbm,
                moved_floor_us=self._node(),
                gemm=gemms,
            ),
            host=self._host(),
            fabric=self._fabric(hbm),
            transports={"copy_engine": self._copy_engine(), "nccl": self._nccl()},
            provenance=Provenance(date=figures.date, versions=figures.versions, note=self._note()),
        )

    # ---- numbers -----------------------------------------------------------------------------

    def _number(self, value: float | None, what: str, *, phase: str, otherwise: float) -> Quantity:
        """Return a measured number, or the common one where it could not be measured."""
        if value is not None:
            return Quantity(
                value=_short(value), origin="measured", source=f"{self.where}: {what}; {PROTOCOL}"
            )
        reason = self.figures.reason(phase)
        return Quantity(
            value=otherwise,
            origin="assumed",
            source=f"common on NVIDIA GPUs; {what} was not measured ({reason})",
        )

    # ---- compute -----------------------------------------------------------------------------

    def _gemms(self) -> dict[DType, GemmProfile]:
        found: dict[DType, GemmProfile] = {}
        for phase in self.figures.ranks[0]["phases"]:
            kind, _, dtype = phase.partition(" ")
            if kind == "gemm" and self._rows(dtype):
                found[dtype] = self._gemm(dtype)
        if not found:
            phases = [one for one in self.figures.ranks[0]["phases"] if one.startswith("gemm")]
            reasons = [self.figures.reason(phase) for phase in phases]
            raise RunFailed(f"No GEMM was measured: {'; '.join(reasons) or 'none was asked for'}.")
        return found

    def _rows(self, dtype: str) -> list[tuple[int, int, int, float]]:
        rows = []
        for key in self.figures.keys(f"gemm {dtype}"):
            us = self.figures.us(f"gemm {dtype}", key)
            m, n, k = (int(size) for size in key.split("/"))
            if us is not None:
                rows.append((m, n, k, _short(us)))
        return rows

    def _gemm(self, dtype: DType) -> GemmProfile:
        rows = self._rows(dtype)
        torch = self.figures.versions.get("torch", "of unknown version")
        source = f"{self.where}: GEMM of torch {torch}, {dtype}, random normal operands; {PROTOCOL}"
        table = GemmTable.from_rows(rows, origin="measured", source=source)
        if len(rows) < FEWEST_TO_FIT:
            return GemmProfile(tables=(table,))
        m, n, k = (np.array([row[axis] for row in rows], dtype=np.int64) for axis in range(3))
        us = np.array([row[3] for row in rows], dtype=np.float64)
        try:
            fitted = fit_gemm_profile(
                GemmPoints(m, n, k, us),
                dtype=dtype,
                peak_tflops=self._best(dtype)[0],
                sm_count=int(self.figures.device["sm_count"]),
                hbm_gb_per_s=self._hbm().value,
                source=source,
            )
        except InvalidInput:  # too few sites are left beside those held out
            return GemmProfile(tables=(table,))
        return fitted.model_copy(update={"tables": (table,)})

    def _best(self, dtype: str) -> tuple[float, tuple[int, int, int]]:
        """Return the best rate and its shape."""
        return max((2.0 * m * n * k / us / 1e6, (m, n, k)) for m, n, k, us in self._rows(dtype))

    def _peak(self, dtype: str) -> Quantity:
        rate, (m, n, k) = self._best(dtype)
        return Quantity(
            value=_short(rate),
            origin="measured",
            source=f"{self.where}: the best GEMM of the table, {m} x {n} x {k}",
        )

    def _hbm(self) -> Quantity:
        us = self.figures.us("host", "copy")
        rate = None if us is None else 2 * 2**30 / us / 1e3
        what = "copy of a GiB within the device, reads and writes"
        return self._number(rate, what, phase="host", otherwise=3000.0)

    def _node(self) -> Quantity:
        us = self.figures.us("host", "node")
        return self._number(us, "a small kernel in a chain", phase="host", otherwise=1.2)

    # ---- host --------------------------------------------------------------------------------

    def _host(self) -> Host:
        node, level = self.figures.us("host", "node"), self.figures.us("host", "ladder")
        begun = self.figures.us("host", "call")
        call, enqueue = self._eager()
        per_run = "host time of an eager call of Programs of one and of four rounds"
        return Host(
            enqueue_us=ModeCosts(
                eager=self._number(
                    enqueue, f"{per_run}, per operation", phase="host", otherwise=5.0
                ),
                graph=Quantity(
                    value=0.0,
                    origin="derived",
                    source="in the times of the operations, which were measured as graph nodes",
                ),
            ),
            call_us=ModeCosts(
                eager=self._number(
                    call,
                    f"{per_run}, what its operations do not take",
                    phase="host",
                    otherwise=20.0,
                ),
                graph=self._number(
                    None if begun is None or node is None else max(begun - node, 0.0),
                    "launch of a graph on an idle device, with what begins a call",
                    phase="host",
                    otherwise=8.0,
                ),
            ),
            handover_us=self._number(
                None if node is None or level is None else max(level - node, 0.0),
                "edge from another stream: level of a ladder of two chains, less a node",
                phase="host",
                otherwise=0.0,
            ),
        )

    def _eager(self) -> tuple[float | None, float | None]:
        """Return the host's time of an eager call without its operations, and of one operation."""
        one, four = (self.figures.us("host", f"run/{rounds}") for rounds in (1, 4))
        few, many = (self.figures.us("host", f"run/{rounds}/operations") for rounds in (1, 4))
        if one is None or four is None or few is None or many is None or many <= few:
            return None, None
        enqueue = max((four - one) / (many - few), 0.0)
        return max(one - few * enqueue, 0.0), enqueue

    # ---- fabric ------------------------------------------------------------------------------

    def _push_curve(self) -> list[tuple[int, float]]:
        """Return the curve of one push, without the four bytes of a signal."""
        return [(size, _short(us)) for size, us in self.one_way or self.both_ways if size >= 1024]

    def _fabric(self, hbm: Quantity) -> Fabric:
        egress = max(_rate(self._push_curve()), self._rate_to_all())
        both = _rate([point for point in self.both_ways if point[0] >= 1024])
        ingress = egress if both >= LEVEL * egress or not both else both
        return Fabric(
            topology="switch",
            egress_gb_per_s=self._number(
                egress, "best rate of pushes, less the smallest one's time", phase="push",
                otherwise=egress,
            ),
            ingress_gb_per_s=self._number(
                ingress,
                f"as egress; all ranks at once reach {both:.4g} GB/s each",
                phase="push",
                otherwise=ingress,
            ),
            hbm_gb_per_s=hbm,
        )  # fmt: skip

    def _rate_to_all(self) -> float:
        """Return a rank's rate when it pushes to all others at once; 0 if there is one other."""
        peers = self.figures.world_size - 1
        points = [(size * peers, us) for size, us in self.figures.curve("push", "to_all/")]
        return _rate([point for point in points if point[0] >= 1024 * peers])

    # ---- transports --------------------------------------------------------------------------

    def _copy_engine(self) -> TransportProfile:
        signal, wait = self._signal_and_wait()
        engines = int(self.figures.device["copy_engines"])
        none = Quantity(value=0.0, origin="derived", source="it has no collectives")
        return TransportProfile(
            capabilities=load_transport("copy_engine").offered(),
            put=Curve(
                points=tuple(self._push_curve()),
                origin="measured",
                source=f"{self.where}: cuMemcpyDtoDAsync to the peer, back to back, one rank "
                f"alone; {self._both_note()}; {PROTOCOL}",
            ),
            copy_queues=Count(
                value=max(engines, 1),
                origin="measured" if engines else "assumed",
                source=f"{self.where}: asynchronous engines, as the driver says",
            ),
            signal_us=signal,
            wait_us=wait,
            interference=Interference(
                gemm_slowdown_beside_put=self._slowdown("push", otherwise=0.18),
                gemm_slowdown_beside_collective=none,
                sms_held=Count(value=0, origin="derived", source="copies hold no SM"),
            ),
        )

    def _both_note(self) -> str:
        both, alone = dict(self.both_ways), dict(self._push_curve())
        sizes = sorted(size for size in set(both) & set(alone) if size >= MIB)
        if not sizes:
            return "both ways at once was not measured"
        ratio = median(both[size] / alone[size] for size in sizes)
        return f"all ranks at once take {ratio:.3f} times as long (from 1 MiB)"

    def _signal_and_wait(self) -> tuple[Quantity, Quantity]:
        figures = self.figures
        chain, chain_beside = (figures.us("signal", f"chain/{one}") for one in _IDLE_BESIDE)
        trip, trip_beside = (figures.us("signal", f"ping_pong/{one}") for one in _IDLE_BESIDE)
        wait = None if trip is None or chain is None else max(trip - chain, 0.0)
        return (
            self._number(
                chain,
                f"four-byte copies in a chain{_beside(chain_beside)}",
                phase="signal",
                otherwise=2.7,
            ),
            self._number(
                wait,
                f"one way of a ping-pong of signals and waits, {_us(trip)}{_beside(trip_beside)}, "
                "less the signal",
                phase="signal",
                otherwise=4.2,
            ),
        )

    def _slowdown(self, what: str, *, otherwise: float) -> Quantity:
        phase, found = f"beside {what}", {}
        for shape in self.figures.keys(phase, "alone/"):
            shape = shape.removesuffix("/main")
            alone = self.figures.times(phase, f"alone/{shape}/main")
            beside = self.figures.times(phase, f"{what}/{shape}/main")
            cover = self.figures.least(phase, f"{what}/{shape}/cover")
            pairs = list(zip(alone, beside, strict=False))
            if pairs and cover is not None:
                found[shape] = median(slowdown(one, two, cover) for one, two in pairs)
        each = ", ".join(f"{shape.replace('/', ' x ')}: {one:.3f}" for shape, one in found.items())
        return self._number(
            median(found.values()) if found else None,
            f"GEMM beside a {what} of 128 MiB on every rank, over alone, less 1 ({each})",
            phase=phase,
            otherwise=otherwise,
        )

    def _nccl(self) -> TransportProfile:
        curves: dict[CollectiveKind, dict[int, Curve]] = {}
        nccl = self.figures.versions.get("nccl", "of unknown version")
        for kind in ALL_COLLECTIVES:
            points = [
                (size, _short(us)) for size, us in self.figures.curve("collective", f"{kind}/")
            ]
            if len(points) >= 2:
                curves[kind] = {
                    self.figures.world_size: Curve(
                        points=tuple(points),
                        origin="measured",
                        source=f"{self.where}: NCCL {nccl} without NVLS, bf16, bytes of the full "
                        f"tensor; {PROTOCOL}",
                    )
                }
        return TransportProfile(
            capabilities=Capabilities(
                transport="nccl",
                verbs=("collective",),
                collectives=ALL_COLLECTIVES,
                signal_orders_puts=False,
                verbs_on_sm=("collective",),
                verbs_that_block=("collective",),
            ),
            collectives=curves,
            interference=Interference(
                gemm_slowdown_beside_put=Quantity(
                    value=0.0, origin="derived", source="it has no put"
                ),
                gemm_slowdown_beside_collective=self._slowdown("collective", otherwise=0.35),
                sms_held=Count(
                    value=16, origin="assumed", source="one block a channel, 16 channels"
                ),
            ),
        )

    # ---- the note ----------------------------------------------------------------------------

    def _note(self) -> str:
        figures = self.figures
        parts = [f"Protocol: {PROTOCOL}."]
        if figures.noise is not None:
            medians = figures.sentinel_medians()
            each = ", ".join(f"{phase} {_us(us)}" for phase, us in medians.items())
            parts.append(
                f"Noise floor: the sentinel GEMM's 10th to 90th percentile is up to "
                f"{figures.noise:.1%} of its median within a phase; medians: {each}."
            )
        for what, unit in (("sm_mhz", "MHz"), ("celsius", "degrees Celsius"), ("watts", "W")):
            found = figures.range_of(what)
            if found is not None:
                parts.append(f"{found[0]:.0f} to {found[1]:.0f} {unit}.")
        parts.append(f"Throttled by: {', '.join(figures.throttled_by()) or 'nothing seen'}.")
        barrier = figures.us("signal", "exchange/idle")
        if barrier is not None:
            parts.append(f"A barrier by signals takes {_us(barrier)}.")
        verbs = figures.keys("host", "verb/")
        if verbs:
            each = ", ".join(f"{verb} {_us(figures.us('host', f'verb/{verb}'))}" for verb in verbs)
            parts.append(f"Host time of an eager launch: {each}.")
        failures = figures.failures()
        if failures:
            parts.append(f"Not measured: {'; '.join(failures[:8])}.")
        return " ".join(parts)


_IDLE_BESIDE = ("idle", "beside/side")


def _slowest(curves: Sequence[list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Return the slowest of several curves at every size that they all have."""
    known = [dict(curve) for curve in curves if curve]
    if not known:
        return []
    sizes = set.intersection(*(set(one) for one in known))
    return [(size, max(one[size] for one in known)) for size in sorted(sizes)]


def _rate(points: Sequence[tuple[int, float]]) -> float:
    """Return the best rate of a curve after the time of its smallest point, in GB/s."""
    if len(points) < 2:
        return 0.0
    latency = points[0][1]
    large = [point for point in points[1:] if point[0] >= RATE_BYTES and point[1] > latency]
    rates = [size / (us - latency) / 1e3 for size, us in large]
    return max(rates, default=points[-1][0] / points[-1][1] / 1e3)


def _short(value: float) -> float:
    """Return four digits of a number."""
    return float(f"{value:.4g}")


def _us(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g} us"


def _beside(value: float | None) -> str:
    return "" if value is None else f" ({_us(value)} beside a GEMM)"


def _slug(device: str, count: int) -> str:
    words = "".join(one if one.isalnum() else " " for one in device.lower()).split()
    return "-".join([*(word for word in words if word != "nvidia"), f"x{count}"])
