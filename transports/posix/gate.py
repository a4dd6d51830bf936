"""A gate before memory that may be unmapped: nobody is inside when it goes, nobody comes in after.

Unmapping under a running copy, or under a wait of another stream, would end the process by SIGSEGV.
It can happen honestly: Ctrl-C in the main thread runs its ``finally: transport.close()`` while the
threads of the streams still wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stretto.schedules.language import RunFailed
from stretto.transports.interface import Launch

__all__ = ["Gate"]

_POLL_S = 0.002


class Gate:
    """Counts who is inside, by a list: append and pop are atomic in every CPython.

    An interrupt between coming in and the protection of ``finally`` leaves the count too high; then
    the memory is never unmapped before the process ends, which is safe.
    """

    __slots__ = ("_inside", "_name", "_shut")

    def __init__(self, name: str) -> None:
        self._name = name
        self._inside: list[None] = []
        self._shut = False

    @property
    def closed(self) -> bool:
        """Whether the gate has been shut."""
        return self._shut

    @property
    def busy(self) -> bool:
        """Whether anyone is inside."""
        return bool(self._inside)

    def check(self) -> None:
        """Raise `RunFailed` if the gate has been shut."""
        if self._shut:
            raise RunFailed(f"This rank has closed the {self._name}; it can no longer be used.")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Keep the memory mapped for the body."""
        self._inside.append(None)
        try:
            self.check()
            yield
        finally:
            self._inside.pop()

    def guarded(self, body: Launch) -> Launch:
        """Return the launch that keeps the memory mapped while `body` runs."""
        inside = self._inside

        def launch(call: int) -> Sequence[int]:
            inside.append(None)
            try:
                if self._shut:
                    self.check()
                return body(call)
            finally:
                inside.pop()

        return launch

    def shut(self, limit_s: float) -> bool:
        """Let nobody in any more and wait for those inside; whether all of them have left."""
        self._shut = True
        deadline = time.monotonic() + limit_s
        while self._inside:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True
