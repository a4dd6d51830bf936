"""Processes that run one function together, rank by rank, and answer or are killed in time.

A crew is kept from case to case, since starting Python costs more than most cases.  A rank that
died, or that had to be killed, is started anew at the next run.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from stretto.schedules.language import CheckFailed, InvalidInput

__all__ = ["Crew", "DirectoryStore", "Member"]

_POLL_S = 0.002
_LAST_WORDS_S = 5.0


class DirectoryStore:
    """A store of files in a directory, for processes of one machine; it needs no library.

    Parameters
    ----------
    directory
        Exists, and is empty at first.
    prefix
        Put before every key.
    timeout_s
        How long `get` waits.
    """

    def __init__(self, directory: Path, *, prefix: str = "", timeout_s: float = 60.0) -> None:
        self._directory, self._prefix, self._timeout_s = directory, prefix, timeout_s

    def set(self, key: str, value: Any, /) -> None:
        """Publish text or bytes, whole at once."""
        path = self._path(key)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_bytes(value.encode() if isinstance(value, str) else value)
        draft.replace(path)

    def get(self, key: str, /) -> bytes:
        """Wait for a value and return it; raise `TimeoutError` if it does not come."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no value for {key!r}") from None
                time.sleep(_POLL_S)

    def has(self, key: str) -> bool:
        """Whether the value is there already."""
        return self._path(key).exists()

    def within(self, prefix: str) -> DirectoryStore:
        """Return the part of the store whose keys begin with `prefix`."""
        return DirectoryStore(
            self._directory, prefix=f"{self._prefix}{prefix}/", timeout_s=self._timeout_s
        )

    def _path(self, key: str) -> Path:
        # Hexadecimal, since a key may be any text.
        return self._directory / (self._prefix + key).encode().hex()


@dataclass(frozen=True, slots=True)
class Member:
    """What a crew's function gets first: which rank it is, and a fresh store to meet the others."""

    rank: int
    world_size: int
    store: DirectoryStore


@dataclass(slots=True)
class _Worker:
    process: Any
    connection: Connection


class Crew:
    """A process for every rank.

    Parameters
    ----------
    world_size
        Number of ranks.
    limit_s
        How long one run may take before everyone is killed.
    """

    def __init__(self, world_size: int, *, limit_s: float = 60.0) -> None:
        if world_size < 1:
            raise InvalidInput("A crew has at least one rank.")
        self.world_size, self.limit_s = world_size, limit_s
        self._workers: dict[int, _Worker] = {}

    def run(
        self, function: Callable[..., Any], *arguments: Any, dies: Collection[int] = ()
    ) -> list[Any]:
        """Call ``function(member, *arguments)`` on every rank and return what each returned.

        Parameters
        ----------
        function, arguments
            Picklable.
        dies
            Ranks that must not answer but die; None stands for their results.

        Raises
        ------
        CheckFailed
            If a rank failed, died, or did not answer in time.
        """
        self._start_missing()
        with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
            for rank, worker in self._workers.items():
                member = Member(rank, self.world_size, DirectoryStore(Path(folder)))
                worker.connection.send((function, member, arguments, self.limit_s))
            answers = self._collect()
        problems = []
        for rank in range(self.world_size):
            fine, answer = answers.get(rank, (rank in dies, None))
            if not fine:
                why = answer or "it died without a word"
                problems.append(f"rank {rank}: {why}")
            elif rank in dies and rank in answers:
                problems.append(f"rank {rank} should have died, but answered")
        if problems:
            raise CheckFailed("\n".join(problems))
        return [answers[rank][1] if rank in answers else None for rank in range(self.world_size)]

    def close(self) -> None:
        """End all processes; a second call does nothing."""
        for worker in self._workers.values():
            try:
                worker.connection.send(None)
            except OSError:
                continue  # it is dead already
        for rank in list(self._workers):
            self._end(rank, _LAST_WORDS_S)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start_missing(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            if rank in self._workers:
                continue
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers[rank] = _Worker(process, here)

    def _collect(self) -> dict[int, tuple[bool, Any]]:
        deadline = time.monotonic() + self.limit_s + _LAST_WORDS_S
        answers: dict[int, tuple[bool, Any]] = {}
        waiting: dict[Connection, int] = {
            worker.connection: rank for rank, worker in self._workers.items()
        }
        while waiting:
            ready = wait(list(waiting), deadline - time.monotonic())
            if not ready:
                for rank in waiting.values():
                    answers[rank] = (False, f"it did not end within {self.limit_s:g} s")
                    self._end(rank, 0.0)
                break
            for connection in [one for one in waiting if one in ready]:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._end(rank, _LAST_WORDS_S)
        return answers

    def _end(self, rank: int, grace_s: float) -> None:
        worker = self._workers.pop(rank)
        worker.process.join(grace_s)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.connection.close()
        worker.process.close()


def _serve(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            task = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if task is None:
            return
        function, member, arguments, limit_s = task
        faulthandler.dump_traceback_later(limit_s)
        try:
            answer = (True, function(member, *arguments))
        except BaseException:  # noqa: BLE001 - whatever it is, the parent reports it
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)
