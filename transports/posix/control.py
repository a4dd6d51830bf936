"""How ranks know of each other: the control segment, who lives, who gave up, barrier and exchange.

One small segment a transport, made by rank 0, mapped by all.  Every rank has a record in it that it
alone writes; only the abort word has several writers (each with a text of its own, so that the last
one wins whole).

Liveness.  For life every rank holds a lock of one byte of the control file (fcntl record lock,
owned by the process).  The kernel drops it when the process ends, whether by exit or SIGKILL, and
whether its parent has reaped it or not.  Others ask with F_GETLK, which takes nothing.  A rank that
ends properly sets `closed` first, so it is told apart from one that died.  Because such locks fall
when *any* descriptor of the file is closed by the process, there is exactly one, closed last.

A rank that dies before it has joined holds no lock yet; it is missed when `join_timeout_s` is over.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto.schedules.language import InvalidInput, PeerLost, RunFailed, StrettoError, WaitTimeout
from stretto.transports.interface import Store
from stretto.transports.posix import segment
from stretto.transports.posix.futex import HALF_RANGE, MASK, NEEDS_FENCE, SharedWord, fence
from stretto.transports.posix.gate import Gate

__all__ = ["FIRST_STEP", "SLICE_S", "Control"]

SLICE_S = 0.05
"""Longest sleep of a wait before it looks for an abort, for the dead, and at the clock."""

FIRST_STEP = 2**32 - 8
"""Where counts of barriers begin: just before the wrap, so that every run crosses it."""

_REASON_BYTES = 1024
_MESSAGE_BYTES = 2048
_LOCK_FORMAT = "hhqqi0q"  # struct flock of 64-bit Linux


class _Header(ctypes.Structure):
    _fields_ = (
        ("token", ctypes.c_char * 33),
        ("world_size", ctypes.c_uint32),
        ("abort", ctypes.c_uint32),  # 0, or 1 + the rank that gave up
    )


class _Record(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint32),
        ("closed", ctypes.c_uint32),
        ("step", ctypes.c_uint32),
        ("reason", ctypes.c_char * _REASON_BYTES),
        ("message", ctypes.c_char * _MESSAGE_BYTES),
    )


_HEADER_BYTES = 4096
_RECORD_BYTES = 4096


class Control:
    """One rank's view of the control segment.

    Parameters
    ----------
    rank, world_size
        Of this process.
    store
        Where rank 0 says how to find the segment.
    key
        Under which name; no other transport on the store may use it.
    timeout_s
        How long a barrier waits.
    join_timeout_s
        How long the ranks wait for each other at the start, and in `exchange`.
    directory
        Where the segment lies if ``memfd_create`` is missing.

    Raises
    ------
    InvalidInput
        If the ranks cannot share memory, or contradict each other.
    PeerLost, WaitTimeout
        If a rank ended, or did not come.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        *,
        key: str,
        timeout_s: float,
        join_timeout_s: float,
        directory: Path,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.gate = Gate("transport")
        self._timeout_s, self._join_timeout_s = timeout_s, join_timeout_s
        self._lock = threading.Lock()
        self._step = FIRST_STEP
        size_bytes = _HEADER_BYTES + world_size * _RECORD_BYTES
        if rank == 0:
            self._descriptor = segment.create("Control memory", size_bytes, directory=directory)
            token = secrets.token_hex(16)
        else:
            offer = _offer(store, key)
            token = offer["token"]
            if offer["world_size"] != world_size:
                raise InvalidInput(
                    f"rank {rank} was started for {world_size} ranks, "
                    f"rank 0 for {offer['world_size']}."
                )
            self._descriptor = segment.open_peer(0, offer["pid"], offer["descriptor"])
        self._keep_open = False
        try:
            self._join(store, key, token, size_bytes)
        except BaseException:
            if not self._keep_open:
                os.close(self._descriptor)
            raise

    def _join(self, store: Store, key: str, token: str, size_bytes: int) -> None:
        # A number that now belongs to another file may be shorter than what would be mapped.
        if self.rank and os.fstat(self._descriptor).st_size != size_bytes:
            raise _stale(key)
        if self.rank == 0:
            segment.reserve(self._descriptor, 0, size_bytes)
        self._mapping = segment.Mapping(self._descriptor, size_bytes)
        base = self._mapping.address
        self._header = _Header.from_address(base)
        self._records = [
            _Record.from_address(base + _HEADER_BYTES + peer * _RECORD_BYTES)
            for peer in range(self.world_size)
        ]
        self._steps = [self._word(peer, _Record.step.offset) for peer in range(self.world_size)]
        try:
            self._take_place(store, key, token)
        except BaseException:
            self._mapping.close()
            raise

    def _take_place(self, store: Store, key: str, token: str) -> None:
        own = self._records[self.rank]
        if self.rank == 0:
            self._header.token = token.encode()
            self._header.world_size = self.world_size
        elif self._header.token != token.encode():
            raise _stale(key)
        if own.pid == os.getpid():
            # An earlier transport of this process: closing the file would drop that one's lock.
            self._keep_open = True
            raise _stale(key)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)
        except OSError as error:
            raise InvalidInput(f"rank {self.rank} was started twice.") from error
        if own.pid:
            raise _stale(key)
        own.step = FIRST_STEP
        own.pid = os.getpid()
        self._word(self.rank, _Record.pid.offset).wake()
        if self.rank == 0:
            offer = {
                "pid": os.getpid(),
                "descriptor": self._descriptor,
                "token": token,
                "world_size": self.world_size,
                "place": _place(),
            }
            store.set(key, json.dumps(offer))
        for peer in range(self.world_size):
            self._await_joined(peer)
        pids = [record.pid for record in self._records]
        if len(set(pids)) != self.world_size:
            raise InvalidInput("Every rank needs a process of its own.")

    def _await_joined(self, peer: int) -> None:
        def late(seen: int, waited_s: float) -> str:
            return f"rank {self.rank}: rank {peer} did not come within {waited_s:g} s"

        self.hold(
            self._word(peer, _Record.pid.offset),
            1,
            late,
            needs=peer,
            limit_s=self._join_timeout_s,
            reached=_is_set,
        )

    # ---- waiting -----------------------------------------------------------------------------

    def hold(
        self,
        word: SharedWord,
        expected: int,
        late: Callable[[int, float], str],
        *,
        gate: Gate | None = None,
        needs: int | None = None,
        limit_s: float | None = None,
        reached: Callable[[int, int], bool] | None = None,
    ) -> int:
        """Block until a word has reached a value; return what it holds then.

        Parameters
        ----------
        word
            In memory that other processes write.
        expected
            Below 2^32.
        late
            Makes the message of a timeout from what was seen and the seconds waited.
        gate
            Of the memory that the word is in, if it is not the control segment's.
        needs
            The rank that must act, if it is known: when that one has closed, waiting is vain.
        limit_s
            Instead of the timeout that the transport was made with.
        reached
            Instead of the cyclic comparison.

        Raises
        ------
        WaitTimeout
            After the limit; all other ranks are told to give up.
        PeerLost
            If a rank died or gave up.
        RunFailed
            If this rank closes the memory meanwhile.
        """
        reached = reached or _cyclic_reached
        gate = gate or self.gate
        limit_s = self._timeout_s if limit_s is None else limit_s
        cell = word.cell
        # One look and no spinning: with as many ranks as cores a spinning rank holds up the one it
        # waits for (20 looks changed nothing, 2000 made a ring of two 40 times slower).
        seen: int = cell.value
        if reached(seen, expected):
            return self._passed(seen)
        start = time.monotonic()
        check = start + SLICE_S
        while True:
            word.block(seen, min(SLICE_S, max(start + limit_s - time.monotonic(), 0.0)))
            seen = cell.value
            self.raise_if_aborted()
            gate.check()
            if reached(seen, expected):
                return self._passed(seen)
            now = time.monotonic()
            if now >= check:
                check = now + SLICE_S
                problem = self._problem(needs)
                # Whoever is gone may have signalled just before.
                seen = cell.value
                if problem is not None and not reached(seen, expected):
                    self.abort(problem)
                    raise PeerLost(f"rank {self.rank}: {problem}.")
            if now >= start + limit_s and not reached(seen, expected):
                message = late(seen, limit_s) + self._who_closed()
                self.abort(message)
                raise WaitTimeout(f"{message}.")

    def _passed(self, seen: int) -> int:
        if NEEDS_FENCE:
            fence()
        return seen

    def raise_if_aborted(self) -> None:
        """Raise `PeerLost`, quoting the reason, if any rank has given up."""
        who = self._header.abort
        if who:
            reason = self._records[who - 1].reason.decode(errors="replace")
            by = "this rank" if who - 1 == self.rank else f"rank {who - 1}"
            raise PeerLost(f"rank {self.rank}: {by} gave up: {reason}")

    def abort(self, reason: str) -> None:
        """Tell all ranks to give up; the first reason stays."""
        with self.gate.inside():
            if not self._header.abort:
                self._records[self.rank].reason = _shortened(reason, _REASON_BYTES)
                if NEEDS_FENCE:
                    fence()
                self._header.abort = self.rank + 1

    def problem(self) -> str | None:
        """Say which rank has died, if one has; for who waits elsewhere than in this segment."""
        return self._problem(None)

    def _problem(self, needs: int | None) -> str | None:
        """Say which rank cannot act any more, if one cannot."""
        for peer, record in enumerate(self._records):
            if peer == self.rank or not record.pid:
                continue
            # Whether it lives first: it says that it closes before it lets go.
            lives = self._lives(peer)
            if record.closed:
                if peer == needs:
                    return f"rank {peer} has closed its transport and will not come"
            elif not lives:
                return f"rank {peer} died (process {record.pid})"
        return None

    def _lives(self, peer: int) -> bool:
        if self._records[peer].pid == os.getpid():
            return True  # a process sees no lock of its own
        question = struct.pack(_LOCK_FORMAT, fcntl.F_WRLCK, os.SEEK_SET, peer, 1, 0)
        answer = fcntl.fcntl(self._descriptor, fcntl.F_GETLK, question)
        kind: int = struct.unpack(_LOCK_FORMAT, answer)[0]
        return kind != fcntl.F_UNLCK

    def _who_closed(self) -> str:
        closed = [str(peer) for peer, record in enumerate(self._records) if record.closed]
        return f"; closed meanwhile: rank {', '.join(closed)}" if closed else ""

    # ---- acting together ---------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every rank is here."""
        with self._lock, self.gate.inside():
            self._together(lambda: self._meet(self._timeout_s))

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Give every rank a message of this one; return all ranks' messages."""
        text = json.dumps(message)
        if len(text) >= _MESSAGE_BYTES:
            raise RunFailed(f"a message of {len(text)} bytes is too long to exchange")

        def both_ways() -> list[dict[str, Any]]:
            self._records[self.rank].message = text.encode()
            self._meet(self._join_timeout_s)
            found = [json.loads(record.message) for record in self._records]
            self._meet(self._join_timeout_s)  # before anyone writes the next one
            return found

        with self._lock, self.gate.inside():
            return self._together(both_ways)

    def agree(self, what: str, differs: str, problem: InvalidInput | None = None) -> None:
        """Go on only if all ranks mean the same and none has a problem.

        Parameters
        ----------
        what
            Text that must be the same on all ranks.
        differs
            What a rank does whose text differs: ``asks for ...``.
        problem
            Why this rank cannot go on, if it cannot.

        Raises
        ------
        InvalidInput
            On every rank: its own problem, another's, or the difference.
        """
        digest = hashlib.sha256(what.encode()).hexdigest()
        said = None if problem is None else str(problem)[:300]
        answers = self.exchange({"digest": digest, "problem": said})
        if problem is not None:
            raise problem
        for peer, answer in enumerate(answers):
            if answer["problem"] is not None:
                raise InvalidInput(f"rank {peer} refuses: {answer['problem']}")
            if answer["digest"] != digest:
                raise InvalidInput(f"Rank {peer} {differs}; all ranks must do the same.")

    def _together(self, steps: Callable[[], Any]) -> Any:
        self.raise_if_aborted()
        try:
            return steps()
        except StrettoError:
            raise
        except BaseException as error:
            # Ctrl-C in the middle: this rank's count no longer agrees with the others'.
            self.abort(f"rank {self.rank} was interrupted in a barrier ({type(error).__name__})")
            raise

    def _meet(self, limit_s: float) -> None:
        self._step = (self._step + 1) & MASK
        own = self._steps[self.rank]
        if NEEDS_FENCE:
            fence()
        own.cell.value = self._step
        own.wake()
        for peer, word in enumerate(self._steps):

            def late(seen: int, waited_s: float, peer: int = peer) -> str:
                return (
                    f"rank {self.rank}: rank {peer} did not come to the barrier "
                    f"within {waited_s:g} s"
                )

            self.hold(word, self._step, late, needs=peer, limit_s=limit_s)

    def say_closed(self) -> None:
        """Tell the others that this rank ends properly."""
        with self.gate.inside():
            self._records[self.rank].closed = 1
            self._steps[self.rank].wake()

    def release(self) -> None:
        """Give the segment and the lock back; nobody may be inside the gate."""
        self._mapping.close()
        os.close(self._descriptor)

    def _word(self, peer: int, offset: int) -> SharedWord:
        return SharedWord(self._mapping.address + _HEADER_BYTES + peer * _RECORD_BYTES + offset)


def _cyclic_reached(seen: int, expected: int) -> bool:
    return (seen - expected) & MASK < HALF_RANGE


def _is_set(seen: int, _expected: int) -> bool:
    return seen != 0


def _offer(store: Store, key: str) -> dict[str, Any]:
    try:
        offer: dict[str, Any] = json.loads(store.get(key))
    except (OSError, RuntimeError, LookupError, ValueError) as error:
        raise PeerLost(f"rank 0 did not come: store.get({key!r}) failed: {error}") from error
    if offer["place"] != _place():
        raise InvalidInput(
            "shared_memory joins processes of one machine and one process namespace; rank 0 is "
            "elsewhere. Choose another --transport."
        )
    return offer


def _stale(key: str) -> InvalidInput:
    return InvalidInput(
        f"The store's key {key!r} is of an earlier transport; give every transport on a store a "
        "key_prefix of its own."
    )


def _place() -> str:
    """Return what processes have in common if they can see each other under /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # a sandbox that hides them
        return os.uname().nodename


def _shortened(text: str, size: int) -> bytes:
    return text.encode()[: size - 1].decode(errors="ignore").encode()
