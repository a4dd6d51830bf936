"""Activities that share resources, in simulated time: max-min fair rates, re-solved locally.

An *activity* has an amount of work, given as the time it takes alone.  While it runs it goes on at
a rate between 0 and 1 (1: alone).  It *uses* resources with a weight (what it consumes at rate 1,
say 360 of a link's 450 GB/s, or 1 of 2 cores).  When activities ask for more of a resource than
there is, rates are max-min fair: they are raised together until a resource is used up, then those
that use it are frozen and the rest goes on (progressive filling; Bertsekas and Gallager, Data
Networks, 6.5.2).  A start or an end re-solves the rates of the activities it is connected with
through shared resources, and of no others.

Interference is a factor on top: a GEMM beside a push runs at ``1 / (1 + slowdown)``, not because of
one resource but of many (power, HBM, L2), so it is measured and not derived.
"""

from __future__ import annotations

from collections.abc import Iterable

import simpy

__all__ = ["Activity", "Fluid", "Resource"]


class Resource:
    """Something that activities share: a capacity, and who uses it now."""

    __slots__ = ("active", "capacity", "load")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.load = 0.0
        self.active: dict[Activity, float] = {}


class Activity:
    """One running operation; `done` fires at its end."""

    __slots__ = ("done", "factor", "rate", "remaining", "since", "uses", "version")

    def __init__(
        self, alone_us: float, uses: tuple[tuple[Resource, float], ...], done: simpy.Event
    ) -> None:
        self.remaining = alone_us
        self.uses = uses
        self.done = done
        self.rate = 0.0  # of the shared resources
        self.factor = 1.0  # of interference
        self.since = 0.0
        self.version = 0


class Fluid:
    """The activities of one simulation."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env

    def start(self, activity: Activity) -> None:
        """Begin an activity now."""
        activity.since = self.env.now
        crowded = False
        for resource, weight in activity.uses:
            resource.active[activity] = weight
            resource.load += weight
            crowded = crowded or resource.load > resource.capacity * (1 + 1e-9)
        if crowded:
            self._solve(activity)
        else:
            activity.rate = 1.0
            self._schedule(activity)

    def set_factor(self, activity: Activity, factor: float) -> None:
        """Change the interference on a running activity."""
        if factor != activity.factor:
            self._advance(activity)
            activity.factor = factor
            self._schedule(activity)

    def _finish(self, activity: Activity) -> None:
        crowded = None
        for resource, weight in activity.uses:
            if crowded is None and resource.load > resource.capacity * (1 + 1e-9):
                crowded = resource
            del resource.active[activity]
            resource.load -= weight
        if crowded is not None:
            for neighbour in list(crowded.active)[:1]:
                self._solve(neighbour)
            for resource, _ in activity.uses:
                if resource is not crowded and resource.active:
                    self._solve(next(iter(resource.active)))
        activity.done.succeed(self.env.now)

    def _advance(self, activity: Activity) -> None:
        now = self.env.now
        activity.remaining -= (now - activity.since) * activity.rate * activity.factor
        activity.since = now

    def _schedule(self, activity: Activity) -> None:
        """Fire at the end that the present rate leads to, unless the rate changes before."""
        activity.version += 1
        version = activity.version
        speed = activity.rate * activity.factor
        timeout = self.env.timeout(max(activity.remaining, 0.0) / speed)

        def ended(_: simpy.Event) -> None:
            if activity.version == version:
                self._finish(activity)

        timeout.callbacks.append(ended)

    def _solve(self, member: Activity) -> None:
        """Re-solve the rates of all activities connected with `member`."""
        activities = _component(member)
        rates = max_min_rates(activities)
        for activity, rate in rates.items():
            if rate != activity.rate:
                self._advance(activity)
                activity.rate = rate
                self._schedule(activity)


def _component(member: Activity) -> list[Activity]:
    """Return the activities connected with `member` through crowded resources."""
    seen = {member: None}
    pending = [member]
    while pending:
        for resource, _ in pending.pop().uses:
            for other in resource.active:
                if other not in seen:
                    seen[other] = None
                    pending.append(other)
    return list(seen)


def max_min_rates(activities: Iterable[Activity]) -> dict[Activity, float]:
    """Return max-min fair rates (at most 1) of activities that share resources."""
    rates = dict.fromkeys(activities, 0.0)
    rising = dict.fromkeys(rates)
    left = {resource: resource.capacity for activity in rates for resource, _ in activity.uses}
    level = 0.0
    while rising:
        demand: dict[Resource, float] = {}
        for activity in rising:
            for resource, weight in activity.uses:
                demand[resource] = demand.get(resource, 0.0) + weight
        step = min(
            (left[resource] / weight for resource, weight in demand.items() if weight > 0),
            default=1.0,
        )
        step = min(step, 1.0 - level)
        level += step
        for resource, weight in demand.items():
            left[resource] -= step * weight
        full = {
            resource
            for resource, weight in demand.items()
            if weight > 0 and left[resource] <= 1e-9 * resource.capacity
        }
        for activity in list(rising):
            rates[activity] = level
            if level >= 1.0 - 1e-12 or any(resource in full for resource, _ in activity.uses):
                del rising[activity]
    return rates
