"""One moment on the device's clock and on the host's, which aligns the ranks of a host."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from stretto.schedules.language import RunFailed
from stretto.transports.cuda.driver import bindings, called

__all__ = ["ClockBase", "clock_base"]


@dataclass(frozen=True, slots=True)
class ClockBase:
    """A moment on the device and on the host's clock, which all ranks of a host share.

    Attributes
    ----------
    event
        Recorded at that moment.
    host_us
        When, on the host's monotonic clock.
    error_us
        How far off that may be.
    """

    event: Any
    host_us: float
    error_us: float


def clock_base(tries: int = 200) -> ClockBase:
    """Return a moment known on the device's clock and on the host's.

    An event is recorded on an idle stream and polled; it completed between the host's reading
    before the record and the one after the poll that saw it.  The narrowest of many tries is kept,
    and half its width is the error.
    """
    import torch

    driver = bindings()
    torch.cuda.synchronize()
    stream = called("cuStreamCreate", driver.cuStreamCreate(1))
    best: ClockBase | None = None
    clock = time.perf_counter_ns
    for _ in range(tries):
        event = called("cuEventCreate", driver.cuEventCreate(0))
        before = clock()
        driver.cuEventRecord(event, stream)
        while int(driver.cuEventQuery(event)[0]):
            pass
        after = clock()
        error_us = (after - before) / 2e3
        spare = event
        if best is None or error_us < best.error_us:
            spare = None if best is None else best.event
            best = ClockBase(event, (before + after) / 2e3, error_us)
        if spare is not None:
            driver.cuEventDestroy(spare)
    called("cuStreamDestroy", driver.cuStreamDestroy(stream))
    if best is None:
        raise RunFailed("The device's clock was not read.")
    return best
