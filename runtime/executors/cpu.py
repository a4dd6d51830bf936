"""The CPU executor: every stream is a thread with a FIFO queue.

The host thread enqueues a call's operations in the Program's order and goes on; each stream's
thread takes its own in turn.  An ``after`` edge is an event that the earlier operation's thread
sets.  The caller's stream is one of the threads: `run` returns when the host has enqueued, and
`synchronize` when everything has ended.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.runtime.executable import Executable, LoweredOperation
from stretto.schedules.language import PeerLost, RunFailed, Span, StrettoError
from stretto.transports.interface import Transport, Workspace

__all__ = ["CpuExecutor", "host_cores"]

POLL_S = 0.05
"""How often a stream that waits for another stream looks whether the run has failed."""


def host_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(slots=True)
class _Record:
    """One launched operation: when it ran and what it saw."""

    lowered: LoweredOperation
    call: int
    done: threading.Event = field(default_factory=threading.Event)
    start_ns: int = 0
    end_ns: int = 0
    seen: Sequence[int] = ()


class CpuExecutor:
    """Runs one `Executable` on threads of this process.

    Parameters
    ----------
    executable
        What to run.
    transport
        For telling the other ranks when this one fails.
    workspace
        Its use count goes up with every call.
    threads
        Threads of one GEMM.
    """

    def __init__(
        self,
        executable: Executable,
        *,
        transport: Transport,
        workspace: Workspace | None,
        threads: int,
    ) -> None:
        self.executable, self.transport, self.workspace = executable, transport, workspace
        self.records: list[_Record] = []
        self._threads_per_gemm = threads
        self.uses = 0
        self._failed = threading.Event()
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._exits: list[_Record] = []
        names = dict.fromkeys(
            lowered.operation.stream for phase in executable.phases for lowered in phase
        )
        self._queues: dict[str, queue.SimpleQueue[Any]] = {
            name: queue.SimpleQueue() for name in names
        }
        self._workers = [
            threading.Thread(target=self._work, args=(one,), name=f"stretto-{name}", daemon=True)
            for name, one in self._queues.items()
        ]
        for worker in self._workers:
            worker.start()

    def run(self) -> None:
        """Enqueue one execution of the Program; returns before it has ended."""
        program = self.executable.program
        first = self.uses if self.workspace is None else self.workspace.use_count
        for call in program.call_sequence(first):
            self._enqueue_call(call.phase_index, call.number)
            self.uses = call.number + 1
            if self.workspace is not None:
                self.workspace.use_count = self.uses

    def _enqueue_call(self, phase: int, call: int) -> None:
        slot = call % self.executable.program.slot_period
        records = [_Record(lowered, call) for lowered in self.executable.phases[phase]]
        entered = self._exits
        for record in records:
            lowered = record.lowered
            before = [records[place] for place in lowered.after]
            if lowered.entry:
                before += entered
            self._queues[lowered.operation.stream].put((record, slot, before))
        self._exits = [records[place] for place in self.executable.exits[phase]]
        self.records += records

    def synchronize(self) -> None:
        """Wait until everything that was enqueued has ended.

        Raises
        ------
        RunFailed
            If an operation failed on this rank, or another rank gave up.
        """
        for record in self.records:
            while not record.done.wait(POLL_S):
                if self._failed.is_set():
                    break
        if self._failed.is_set():
            for worker_queue in self._queues.values():
                worker_queue.put(None)
            for worker in self._workers:
                worker.join(10)
            raise self._cause()

    def take_spans(self) -> list[Span]:
        """Return the spans of all calls since the last time, and forget them."""
        spans = [self._span(record) for record in self.records]
        self.records = []
        return spans

    def forget_spans(self) -> None:
        """Drop the record of the calls so far."""
        self.records = []

    def close(self) -> None:
        """End the threads; a second call does nothing."""
        for worker_queue in self._queues.values():
            worker_queue.put(None)
        for worker in self._workers:
            worker.join()

    # ---- a stream ----------------------------------------------------------------------------

    def _work(self, tasks: queue.SimpleQueue[Any]) -> None:
        import torch

        torch.set_num_threads(self._threads_per_gemm)
        # The mode is a thread's own, and what was made in it may be written nowhere else.
        with torch.inference_mode():
            self._work_through(tasks)

    def _work_through(self, tasks: queue.SimpleQueue[Any]) -> None:
        clock = time.perf_counter_ns
        while (task := tasks.get()) is not None:
            record, slot, before = task
            if self._failed.is_set():
                continue
            try:
                for earlier in before:
                    self._await(earlier)
                record.start_ns = clock()
                record.seen = record.lowered.launches[slot](record.call)
                record.end_ns = clock()
                record.done.set()
            except BaseException as error:  # noqa: BLE001 (goes to the caller)
                self._fail(record, error)

    def _await(self, earlier: _Record) -> None:
        while not earlier.done.wait(POLL_S):
            if self._failed.is_set():
                raise _Dropped

    def _fail(self, record: _Record, error: BaseException) -> None:
        if isinstance(error, _Dropped):
            return
        with self._lock:
            self._errors.append(self._named(record, error))
            first = not self._failed.is_set()
            self._failed.set()
        if first:
            self.transport.abort(str(self._errors[0]))

    def _named(self, record: _Record, error: BaseException) -> BaseException:
        if isinstance(error, StrettoError):
            return error
        operation = record.lowered.operation
        named = RunFailed(
            f"rank {self.executable.rank}, stream {operation.stream}, operation {operation.id}, "
            f"call {record.call}: {type(error).__name__}: {error}"
        )
        named.__cause__ = error
        return named

    def _cause(self) -> BaseException:
        """Return the error that says most: one of this rank's own before one heard of."""
        return min(self._errors, key=lambda error: isinstance(error, PeerLost))

    def _span(self, record: _Record) -> Span:
        lowered = record.lowered
        operation, program = lowered.operation, self.executable.program
        signalled, awaited = self.executable.sync_events(operation, record.call, record.seen)
        shard = operation.tags.shard
        return Span(
            operation=operation.id,
            kind=operation.kind,
            rank=self.executable.rank,
            stream=operation.stream,
            call=record.call,
            start_us=record.start_ns / 1e3,
            end_us=record.end_ns / 1e3,
            step=operation.tags.step,
            shard=None if shard is None else shard.of(self.executable.rank, program.world_size),
            peer=lowered.peer,
            note=operation.tags.note,
            bytes=lowered.moved_bytes,
            flops=lowered.flops,
            after=operation.after,
            signalled=signalled,
            awaited=awaited,
        )


class _Dropped(Exception):
    """The run failed elsewhere while this stream waited."""
