"""How long a collective that was launched eagerly has been running on a GPU."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["Enqueued"]


class Enqueued:
    """The last eager launch of one collective on a GPU: when it began to run, as far as seen.

    Parameters
    ----------
    start, stop
        Events of its own.
    where
        Rank, stream and operation, for errors.
    """

    __slots__ = ("_seen_s", "_start", "_stop", "call", "where")

    def __init__(self, start: Any, stop: Any, where: str) -> None:
        self._start, self._stop, self.where = start, stop, where
        self.call, self._seen_s = 0, 0.0

    def begin(self, call: int) -> None:
        """Mark the beginning on the current stream."""
        self.call, self._seen_s = call, 0.0
        self._start.record()

    def end(self) -> None:
        """Mark the end on the current stream."""
        self._stop.record()

    def running_s(self) -> float | None:
        """Return for how long it has been seen running; None when it has ended."""
        if self._stop.query():
            return None
        if not self._seen_s:
            if not self._start.query():
                return 0.0
            self._seen_s = time.monotonic()
        return time.monotonic() - self._seen_s
