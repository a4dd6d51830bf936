"""What kernels that wait leave when they give up, and who looks: one pinned page and a thread.

The page holds the abort word, which waiting kernels look at now and then, and a record, which the
first of them that gives up fills in.  A thread looks at the record and at the other ranks; so does
whoever asks (`raise_if_failed`).  The first failure is kept.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from typing import Any

from stretto.schedules.language import PeerLost, RunFailed, StrettoError, WaitTimeout, Word
from stretto.transports.interface import Label
from stretto.transports.posix.control import Control

__all__ = ["Watch"]

PERIOD_S = 0.05
RECORD_AT, RECORD_WORDS = 16, 8
"""The record begins 64 bytes after the abort word, on a line of its own."""

TIMED_OUT = 1
"""State of a record; 2 is a wait that was told to give up, 3 one that is being written."""


class Watch:
    """One rank's page and the thread that looks at it.

    Parameters
    ----------
    control
        Of the transport: who lives, who gave up.
    timeout_s
        How long a wait may take; for kernels and for messages.
    """

    def __init__(self, control: Control, timeout_s: float) -> None:
        import torch

        self._control, self._timeout_s = control, timeout_s
        self._page = torch.zeros(64, dtype=torch.int32, pin_memory=True)
        self._labels: dict[tuple[Label, tuple[Word, ...]], int] = {}
        self._error: StrettoError | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stretto-watch", daemon=True)
        self._thread.start()

    @property
    def abort_address(self) -> int:
        """Where the abort word is, for kernels."""
        address: int = self._page.data_ptr()
        return address

    def labelled(self, label: Label, words: Sequence[Word]) -> int:
        """Return the number by which a kernel's record names its operation and words."""
        return self._labels.setdefault((label, tuple(words)), len(self._labels))

    def giving_up(self, label: int) -> tuple[Any, Any, Any, Any]:
        """Return a waiting kernel's last arguments: abort word, record, label, limit in ns."""
        return (
            ctypes.c_uint64(self.abort_address),
            ctypes.c_uint64(self.abort_address + 4 * RECORD_AT),
            ctypes.c_uint32(label),
            ctypes.c_uint64(int(self._timeout_s * 1e9)),
        )

    def let_go(self) -> None:
        """Make every wait of this device give up."""
        self._page[0] = 1

    def raise_if_failed(self) -> None:
        """Look now, and raise the first failure if there has been one."""
        if not self._closed.is_set():
            self._note()
        elif self._error is None and int(self._page[RECORD_AT]):
            raise RunFailed(
                f"rank {self._control.rank}: a wait was running when the transport was closed."
            )
        self.raise_if_noted()

    def raise_if_noted(self) -> None:
        """Raise the first failure that the thread, or anybody, has found already."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread, and whatever still waits on this device."""
        self._closed.set()
        self.let_go()
        self._thread.join(5)

    def _work(self) -> None:
        while not self._closed.is_set():
            self._note()
            time.sleep(PERIOD_S)

    def _note(self) -> None:
        """Keep the first failure, and let all waits of this device give up."""
        with self._lock:
            if self._error is None:
                try:
                    self._look()
                except StrettoError as error:
                    self._error = error
                    self.let_go()

    def _look(self) -> None:
        record = [int(one) for one in self._page[RECORD_AT : RECORD_AT + RECORD_WORDS]]
        if record[0] == TIMED_OUT:
            message = self._late(record)
            self._control.abort(message)
            raise WaitTimeout(f"{message}.")
        self._control.raise_if_aborted()
        problem = self._control.problem()
        if problem is not None:
            self._control.abort(problem)
            raise PeerLost(f"rank {self._control.rank}: {problem}.")

    def _late(self, record: list[int]) -> str:
        label, words = list(self._labels)[record[1]]
        word = words[record[2]]
        expected, seen, call = (one & 0xFFFFFFFF for one in record[3:6])
        return (
            f"rank {self._control.rank}, stream {label.stream!r}, operation {label.operation!r}, "
            f"call {call}: waited {self._timeout_s:g} s for a signal: flag "
            f"{word.flag!r}[{word.position}], slot {word.slot}, home rank {word.home}: "
            f"expected epoch {expected}, seen {seen}"
        )
