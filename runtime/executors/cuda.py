"""The CUDA executor: every stream of the Program is a CUDA stream; a call is one loop of launches.

The caller's stream is whatever stream is current when `run` is called.  A call begins there (the
workspace counts a use), forks to the side streams behind an event, and joins them again (`end`).
The same launches go into a graph when the caller's stream is being captured.  Nothing waits for the
device on the host but `synchronize`.

Timing, when asked for, records an event before and after every operation (external events in a
graph).  Their resolution is about half a microsecond; each costs the stream some, so a timed call
is never the one whose makespan is reported elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.runtime.lowering import Executable, LoweredOperation
from stretto.schedules.language import Epoch, Operation, RunFailed, Span, Wait, Word
from stretto.transports.cuda.driver import bindings, called
from stretto.transports.cuda.workspace import CudaWorkspace

__all__ = ["ClockBase", "CudaExecutor", "clock_base"]

VERBS = frozenset({"put", "signal", "wait", "collective"})
Action = Callable[[int], Any]


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


class CudaExecutor:
    """Runs one `Executable` on this process's GPU.

    Parameters
    ----------
    executable
        What to run.
    transport
        Asked for failures that the device has met.
    workspace
        Whose uses are counted; None where the Program has no symmetric memory.
    streams
        Where the Program's streams go, by name: holders of CUDA handles, the same that the
        verbs were prepared with.
    """

    def __init__(
        self,
        executable: Executable,
        *,
        transport: Any,
        workspace: CudaWorkspace | None,
        streams: Mapping[str, Any],
    ) -> None:
        import torch

        self.executable, self.transport, self.workspace = executable, transport, workspace
        self.streams = streams
        self._torch = torch
        self._driver = bindings()
        self._caller = streams[executable.program.caller_stream]
        self._period = 1 if workspace is None else workspace.period
        self._begins = [self._begin(phase) for phase in executable.phases]
        self._plain = [self._actions(phase, None) for phase in range(len(executable.phases))]
        self._marks: list[_Mark] = []
        self._tails: dict[int, tuple[int, list[Any]]] = {}
        self._uses = 0

    def run(self, *, timed: bool = False) -> None:
        """Enqueue one execution of the Program on the current stream, or into its graph."""
        self._caller.handle = self._torch.cuda.current_stream().cuda_stream
        program = self.executable.program
        first = self._uses if self.workspace is None else self.workspace.use_count
        for call in program.call_sequence(first):
            actions = self._plain[call.phase_index]
            if timed:
                actions = self._actions(call.phase_index, self._marks, call.number)
            for action in actions:
                action(call.number)
            self._uses = call.number + 1
            if self.workspace is not None:
                self.workspace.use_count = self._uses

    def synchronize(self, limit_s: float = 120.0) -> None:
        """Wait until the device has done everything, and see whether it went well.

        Raises
        ------
        WaitTimeout, PeerLost
            If a wait gave up; the device has gone on with wrong rows.
        RunFailed
            If the device reports an error, or is not done in time.
        """
        event = self._torch.cuda.Event()
        event.record()
        end = time.monotonic() + limit_s
        while not event.query():
            self.transport.raise_if_failed()
            if time.monotonic() > end:
                raise RunFailed(
                    f"rank {self.executable.rank}: the GPU was not done in {limit_s} s."
                )
            time.sleep(2e-5)
        self._torch.cuda.synchronize()
        self.transport.raise_if_failed()

    def take_spans(self, base: ClockBase) -> list[Span]:
        """Return the spans of the timed calls since the last time, on the host's clock.

        After a graph has been replayed again, the same marks give the new times.
        """
        return [self._span(mark, base) for mark in self._marks]

    def forget_spans(self) -> None:
        """Drop the marks of earlier timed calls."""
        self._marks = []

    # ---- one call ----------------------------------------------------------------------------

    def _actions(self, phase: int, marks: list[_Mark] | None, number: int = 0) -> list[Action]:
        """Return what a call of a phase does, in the order of the host."""
        lowered = self.executable.phases[phase]
        side = [
            name
            for name in dict.fromkeys(one.operation.stream for one in lowered)
            if name != self.executable.program.caller_stream
        ]
        actions: list[Action] = []
        workspace = self.workspace
        early = {
            place for place, one in enumerate(lowered) if workspace and _is_credit(one.operation)
        }
        if workspace is not None:
            actions.append(self._join_last_use)
            actions.append(self._begins[phase])
        if side:
            fork = self._event()
            actions.append(self._recorder(fork, self._caller))
            actions += [self._waiter(fork, self.streams[name]) for name in side]
        caller_stream = self.executable.program.caller_stream
        exits = {
            place
            for place in self.executable.exits[phase]
            if lowered[place].operation.stream != caller_stream
        }
        awaited = {place for one in lowered for place in one.after} | exits
        events = {place: self._event() for place in awaited}
        leaves = [events[place] for place in sorted(exits)]
        for place, one in enumerate(lowered):
            stream = self.streams[one.operation.stream]
            actions += [self._waiter(events[earlier], stream) for earlier in one.after]
            launch = _nothing if place in early else self._launch(one, stream)
            if marks is not None:
                launch = self._timed(launch, one, stream, marks, number)
            actions.append(launch)
            if place in awaited:
                actions.append(self._recorder(events[place], stream))
        actions += [self._waiter(leave, self._caller) for leave in leaves]
        actions.append(_End(self, tuple(side)))
        return actions

    def _begin(self, lowered: Sequence[LoweredOperation]) -> Action:
        """Return the launch that begins a call."""
        if self.workspace is None:
            return _nothing
        launch: Action = self.transport.begin(
            self.workspace, self._credits(lowered), stream=self._caller
        )
        return launch

    def _credits(self, lowered: Sequence[LoweredOperation]) -> list[list[tuple[Word, Epoch]]]:
        """Return, by slot residue, the words and epochs that a call begins by waiting for.

        A wait for an epoch of an earlier call depends on nothing that this call does, on any rank.
        So it may come first, in the kernel that begins the call on the caller's stream, instead of
        in a kernel of its own that competes with a GEMM for a multiprocessor.
        """
        program = self.executable.program
        return [
            [
                (
                    sync.word.resolve(
                        program.flag[sync.word.flag],
                        rank=self.executable.rank,
                        world_size=program.world_size,
                        call=residue,
                    ),
                    sync.value,
                )
                for one in lowered
                if _is_credit(one.operation)
                for sync in one.operation.waits()
            ]
            for residue in range(self._period)
        ]

    def _launch(self, one: LoweredOperation, stream: Any) -> Action:
        launches, period = one.launches, len(one.launches)
        if one.operation.kind in VERBS:
            if period == 1:
                return launches[0]
            return lambda call: launches[call % period](call)
        if stream is self._caller:
            return lambda call: launches[call % period](call)
        torch = self._torch

        def on_side_stream(call: int) -> None:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)):
                launches[call % period](call)

        return on_side_stream

    def _timed(
        self,
        launch: Action,
        one: LoweredOperation,
        stream: Any,
        marks: list[_Mark],
        number: int,
    ) -> Action:
        mark = _Mark(one, number, self._event(timing=True), self._event(timing=True))
        marks.append(mark)

        def run(call: int) -> None:
            self._record(mark.start, stream)
            launch(call)
            self._record(mark.end, stream)

        return run

    # ---- the end of a call -------------------------------------------------------------------

    def _join_last_use(self, call: int) -> None:
        """Let the caller's stream follow all of the call that used the same slot last.

        Needed where that call left its releases behind, in the graph that is being captured.
        """
        tails = self._tails.pop(call % self._period, None)
        if tails is not None and tails[0] == self._capture():
            for tail in tails[1]:
                self._wait(tail, self._caller)

    def end(self, call: int, side: Sequence[str]) -> None:
        """Join the side streams to the caller's.

        Eager: the caller's stream follows everything.  In a graph only what touches the caller's
        buffers is waited for; what remains, the releases, is joined for the capture's sake and
        taken out of the caller's dependencies again.  It ends with the graph at the latest, and
        before the slot's next use in the same graph.
        """
        tails = []
        for name in side:
            tail = self._event()
            called("cuEventRecord", self._driver.cuEventRecord(tail, self.streams[name].handle))
            tails.append(tail)
        capture = self._capture()
        if capture is None:
            for tail in tails:
                self._wait(tail, self._caller)
            return
        dependencies = self._dependencies()
        for tail in tails:
            self._wait(tail, self._caller)
        called(
            "cuStreamUpdateCaptureDependencies",
            self._driver.cuStreamUpdateCaptureDependencies(
                self._caller.handle, dependencies, None, len(dependencies), 1
            ),
        )
        self._tails[call % self._period] = (capture, tails)

    def _wait(self, event: Any, stream: Any) -> None:
        called("cuStreamWaitEvent", self._driver.cuStreamWaitEvent(stream.handle, event, 0))

    def _capture(self) -> int | None:
        """Return the id of the capture that the caller's stream is in, if it is in one."""
        status, number, *_ = called(
            "cuStreamGetCaptureInfo", self._driver.cuStreamGetCaptureInfo(self._caller.handle)
        )
        return int(number) if int(status) else None

    def _dependencies(self) -> Any:
        answer = called(
            "cuStreamGetCaptureInfo", self._driver.cuStreamGetCaptureInfo(self._caller.handle)
        )
        return answer[3]

    # ---- events ------------------------------------------------------------------------------

    def _event(self, *, timing: bool = False) -> Any:
        return called("cuEventCreate", self._driver.cuEventCreate(0 if timing else 2))

    def _recorder(self, event: Any, stream: Any) -> Action:
        record, driver_called = self._driver.cuEventRecord, called

        def action(call: int) -> None:
            (code,) = record(event, stream.handle)
            if int(code):
                driver_called("cuEventRecord", (code,))

        return action

    def _waiter(self, event: Any, stream: Any) -> Action:
        wait, driver_called = self._driver.cuStreamWaitEvent, called

        def action(call: int) -> None:
            (code,) = wait(stream.handle, event, 0)
            if int(code):
                driver_called("cuStreamWaitEvent", (code,))

        return action

    def _record(self, event: Any, stream: Any) -> None:
        """Record a timing event, as a node of its own while a graph is captured."""
        capturing = self._torch.cuda.is_current_stream_capturing()
        called(
            "cuEventRecordWithFlags",
            self._driver.cuEventRecordWithFlags(event, stream.handle, 1 if capturing else 0),
        )

    def _span(self, mark: _Mark, base: ClockBase) -> Span:
        operation, program = mark.lowered.operation, self.executable.program
        signalled, awaited = self.executable.sync_events(operation, mark.call)
        shard = operation.tags.shard
        return Span(
            operation=operation.id,
            kind=operation.kind,
            rank=self.executable.rank,
            stream=operation.stream,
            call=mark.call,
            start_us=base.host_us + self._since(base.event, mark.start),
            end_us=base.host_us + self._since(base.event, mark.end),
            step=operation.tags.step,
            shard=None if shard is None else shard.of(self.executable.rank, program.world_size),
            peer=mark.lowered.peer,
            note=operation.tags.note,
            bytes=mark.lowered.moved_bytes,
            flops=mark.lowered.flops,
            after=operation.after,
            signalled=signalled,
            awaited=awaited,
        )

    def _since(self, start: Any, end: Any) -> float:
        elapsed: float = called("cuEventElapsedTime", self._driver.cuEventElapsedTime(start, end))
        return elapsed * 1e3


def _is_credit(operation: Operation) -> bool:
    """Whether an operation waits for epochs of earlier calls only, and for nothing before it."""
    return (
        isinstance(operation, Wait)
        and not operation.after
        and operation.value.stride >= 1
        and operation.value.offset <= 0
    )


def _nothing(call: int) -> None:
    """Do what has been done when the call began."""


@dataclass(frozen=True, slots=True)
class _End:
    """The last action of a call."""

    executor: CudaExecutor
    side: tuple[str, ...]

    def __call__(self, call: int) -> None:
        self.executor.end(call, self.side)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Two events around one operation of one call."""

    lowered: LoweredOperation
    call: int
    start: Any
    end: Any


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
        if best is None or error_us < best.error_us:
            best = ClockBase(event, (before + after) / 2e3, error_us)
    called("cuStreamDestroy", driver.cuStreamDestroy(stream))
    if best is None:
        raise RunFailed("The device's clock was not read.")
    return best
