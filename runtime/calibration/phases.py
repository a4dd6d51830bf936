"""Measurements on several ranks in phases, each guarded: what fails is said, the rest goes on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.schedules.language import StrettoError

__all__ = ["PROBE_ERRORS", "Phase", "Phases", "reason_of"]

PROBE_ERRORS = (
    StrettoError,
    RuntimeError,
    ImportError,
    AttributeError,
    TypeError,
    ValueError,
    AssertionError,
    MemoryError,
)
"""What torch, NCCL, the driver's bindings and our own layers raise when something cannot be."""


def reason_of(error: BaseException) -> str:
    """Return an error as one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:240]}"


@dataclass(slots=True)
class Phase:
    """What one rank found in one phase; plain values, for JSON.

    Attributes
    ----------
    us
        By case, a time for every round.
    sentinel_us
        Of the sentinel GEMM, throughout the phase.
    conditions
        The GPU's clock, temperature, power and throttle reasons, round by round.
    failed
        Cases that could not be timed, and why; "" is the phase itself.
    seconds
        How long it took.
    """

    us: dict[str, list[float]] = field(default_factory=dict)
    sentinel_us: list[float] = field(default_factory=list)
    conditions: list[dict[str, object]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        """Return it for JSON, times to a nanosecond."""
        return {
            "us": {key: [round(one, 3) for one in times] for key, times in self.us.items()},
            "sentinel_us": [round(one, 3) for one in self.sentinel_us],
            "conditions": self.conditions,
            "failed": self.failed,
            "seconds": round(self.seconds, 1),
        }


class Phases:
    """Runs phases on one rank, together with all others.

    Parameters
    ----------
    transport
        For small messages between the ranks.
    figures
        Filled in: what each phase found goes into ``figures["phases"]``.
    partial
        Beginning of the path where this rank writes `figures` after each phase
        (``PARTIAL.rank0.json``); None writes nothing.
    progress
        Whether rank 0 says on stderr what is going on.
    """

    def __init__(
        self,
        transport: Any,
        figures: dict[str, Any],
        *,
        partial: str | None = None,
        progress: bool = True,
    ) -> None:
        self.transport, self.figures = transport, figures
        self._path = None if partial is None else Path(f"{partial}.rank{transport.rank}.json")
        self._speaks = progress and transport.rank == 0
        self._begun = time.monotonic()

    def run(self, phases: Sequence[tuple[str, Callable[[Phase], None]]]) -> None:
        """Run all phases; none of the rest once the ranks are out of step."""
        for name, measure in phases:
            self.say(name)
            phase, start = Phase(), time.monotonic()
            try:
                measure(phase)
            except PROBE_ERRORS as error:
                phase.failed[""] = reason_of(error)
            phase.seconds = time.monotonic() - start
            self.figures["phases"][name] = phase.plain()
            if self._path is not None:
                self._path.write_text(json.dumps(self.figures))
            if not self._in_step(phase):
                self.say("the ranks are out of step: the rest is left out")
                return
        self.say("done")

    def say(self, text: str) -> None:
        """Say on stderr what is going on, once for all ranks."""
        if self._speaks:
            sys.stderr.write(f"{time.monotonic() - self._begun:6.1f} s  {text}\n")
            sys.stderr.flush()

    def _in_step(self, phase: Phase) -> bool:
        """Say what failed; return whether all ranks can go on."""
        import torch

        for key, reason in list(phase.failed.items())[:5]:
            self.say(f"  not measured: {key or 'the phase'}: {reason}")
        try:
            self.transport.raise_if_failed()
            self.transport.exchange({"phase": "over"})
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:  # the device's, or ours (RunFailed)
            return False
        return True
