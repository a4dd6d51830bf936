"""What a transport's verbs cost on one machine."""

from __future__ import annotations

import math
from functools import lru_cache

from stretto.schedules.language import Capabilities, CollectiveKind, InvalidInput, Unsupported
from stretto.sim.machine.estimates import (
    Estimate,
    capped,
    log_log,
    piecewise_linear,
    worst,
)
from stretto.sim.machine.schema import Curve, Fabric, TransportProfile

__all__ = ["TransportModel"]

_COLLECTIVE_LATENCY_US = 10.0
"""Of two ranks, where no curve tells: what small NCCL and RCCL collectives take in order of
magnitude (8 to 22 us published)."""


class TransportModel:
    """One transport of one machine.

    Attributes
    ----------
    name
        As in the profile.
    capabilities
        What schedules are built against.
    put_latency_us
        Fixed part of a put: the time of the smallest one.
    copy_queues
        Puts that one rank can have in progress; 0 without put.
    signal_us, wait_us
        From the end of what precedes a signal to its being visible on the peer; from then to the
        waiting stream going on. 0 where the verb does not exist.
    gemm_slowdown_beside_put, gemm_slowdown_beside_collective
        Fraction by which a GEMM takes longer meanwhile; the second one includes `sms_held`.
    sms_held
        Streaming multiprocessors that a collective holds.
    gemm_waves_beside_wait
        Waves that a GEMM takes more if it starts beside a wait that polls; 0 where waits hold no
        multiprocessor.
    """

    def __init__(
        self, name: str, profile: TransportProfile, fabric: Fabric, *, machine: str
    ) -> None:
        self.name, self.profile, self._fabric, self._machine = name, profile, fabric, machine
        self.capabilities: Capabilities = profile.capabilities
        self.put_latency_us = profile.put.points[0][1] if profile.put else 0.0
        self.copy_queues = profile.copy_queues.value if profile.copy_queues else 0
        self.signal_us = profile.signal_us.value if profile.signal_us else 0.0
        self.wait_us = profile.wait_us.value if profile.wait_us else 0.0
        interference = profile.interference
        self.gemm_slowdown_beside_put = interference.gemm_slowdown_beside_put.value
        self.gemm_slowdown_beside_collective = interference.gemm_slowdown_beside_collective.value
        self.sms_held = interference.sms_held.value
        lost = interference.gemm_waves_beside_wait
        polls = "wait" in profile.capabilities.verbs_on_sm
        self.gemm_waves_beside_wait = lost.value if lost is not None and polls else 0.0
        self.collective = lru_cache(maxsize=1 << 14)(self._collective)

    @property
    def link_gb_per_s(self) -> float:
        """The most that one rank can push to one other."""
        egress = self._fabric.egress_gb_per_s.value
        link = self._fabric.link_gb_per_s
        return egress if link is None else min(egress, link.value)

    def put_us(self, size_bytes: float) -> float:
        """Return the time of one put alone on an idle machine; nothing takes no time.

        Raises
        ------
        Unsupported
            If the transport has no put.
        """
        return piecewise_linear(self._put, size_bytes) if size_bytes > 0 else 0.0

    def put(self, size_bytes: float) -> Estimate:
        """Return `put_us` with its validity."""
        points = self._put.points
        if points[0][0] <= size_bytes <= points[-1][0]:
            exact = any(point[0] == size_bytes for point in points)
            validity = capped("measured" if exact else "interpolated", self._put.origin)
        else:
            validity = capped("extrapolated", self._put.origin)
        return Estimate(self.put_us(size_bytes), validity)

    def put_rate_gb_per_s(self, size_bytes: float) -> float:
        """Return the rate of a lone put's transfer phase, the time after `put_latency_us`.

        Never above the link: the smallest put is all latency.
        """
        transfer_us = self.put_us(size_bytes) - self.put_latency_us
        limit = self.link_gb_per_s
        if transfer_us <= size_bytes / limit / 1e3:
            return limit
        return size_bytes / transfer_us / 1e3

    @property
    def _put(self) -> Curve:
        if self.profile.put is None:
            raise Unsupported(
                f"Transport {self.name!r} of machine {self._machine!r} has no put; "
                "choose one that has, such as copy_engine."
            )
        return self.profile.put

    def _collective(self, kind: CollectiveKind, total_bytes: int, world_size: int) -> Estimate:
        """Return the time of a collective alone on an idle machine.

        Parameters
        ----------
        kind
            ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        total_bytes
            Of the full tensor.
        world_size
            Number of ranks; unmeasured ones are scaled from the nearest measured one, by
            ``(p - 1) / p`` in bandwidth and the square root of p in latency (which is how the
            measured ones grow).

        Raises
        ------
        Unsupported
            If the transport lacks the kind.
        InvalidInput
            If a number makes no sense.
        """
        lacking = self.capabilities.lacks("collective", kind)
        if lacking is not None:
            raise Unsupported(f"On machine {self._machine!r}, {lacking}.")
        if world_size < 1 or total_bytes < 0:
            raise InvalidInput(
                f"A collective of {total_bytes} bytes over {world_size} ranks makes no sense."
            )
        if world_size == 1 or total_bytes == 0:
            return Estimate(0.0, "measured")
        curves = self.profile.collectives.get(kind, {})
        if not curves:
            return Estimate(self._from_fabric(kind, total_bytes, world_size), "not validated")
        if world_size not in curves:
            return self._scaled(curves, kind, total_bytes, world_size)
        own = curves[world_size]
        estimate = self._read(own, kind, total_bytes, world_size)
        smallest_bytes, smallest_us = own.points[0]
        others = {p: curve for p, curve in curves.items() if curve.points[0][0] < smallest_bytes}
        if total_bytes < smallest_bytes and others:  # another world size knows the small end
            scaled = self._scaled(others, kind, total_bytes, world_size)
            return Estimate(
                min(scaled.us, smallest_us), worst((scaled.validity, estimate.validity))
            )
        return estimate

    def _scaled(
        self, curves: dict[int, Curve], kind: CollectiveKind, total_bytes: int, world_size: int
    ) -> Estimate:
        """Carry the nearest measured world size's time over to another one.

        Nearest among those measured down to `total_bytes`, if any; the latency is that of a curve
        which begins at the smallest size there is.
        """
        least = min(curve.points[0][0] for curve in curves.values())
        small = {p: curve for p, curve in curves.items() if curve.points[0][0] == least}
        covering = {p: c for p, c in curves.items() if c.points[0][0] <= total_bytes} or small
        nearest, source = _nearest(small, world_size), _nearest(covering, world_size)
        per_root_us = small[nearest].points[0][1] / math.sqrt(nearest)
        measured = self._read(covering[source], kind, total_bytes, source)
        transfer_us = max(measured.us - per_root_us * math.sqrt(source), 0.0)
        more = self._wire_us(kind, 1.0, world_size) / self._wire_us(kind, 1.0, source)
        us = per_root_us * math.sqrt(world_size) + transfer_us * more
        return Estimate(us, worst((measured.validity, "extrapolated")))

    def _read(
        self, curve: Curve, kind: CollectiveKind, total_bytes: int, world_size: int
    ) -> Estimate:
        wire_us_per_byte = self._wire_us(kind, 1.0, world_size)
        return log_log(curve, total_bytes, least_us_per_byte=wire_us_per_byte)

    def _wire_us(self, kind: CollectiveKind, total_bytes: float, world_size: int) -> float:
        """Return the time of a rank's bytes on the fabric; on pairs, over all its links at once."""
        moved = total_bytes * (world_size - 1) / world_size
        if kind == "all_reduce":
            moved *= 2
        rate = self._fabric.egress_gb_per_s.value
        if self._fabric.topology == "point_to_point":
            rate = min(rate, self.link_gb_per_s * (world_size - 1))
        return moved / rate / 1e3

    def _from_fabric(self, kind: CollectiveKind, total_bytes: int, world_size: int) -> float:
        latency_us = _COLLECTIVE_LATENCY_US
        if self.profile.put is not None:  # built from puts
            latency_us = self.put_latency_us + self.signal_us + self.wait_us
        return latency_us * math.sqrt(world_size / 2) + self._wire_us(kind, total_bytes, world_size)


def _nearest(curves: dict[int, Curve], world_size: int) -> int:
    return min(curves, key=lambda p: (abs(math.log(p / world_size)), p))
