"""The CUDA executor: every stream of the Program is a CUDA stream; a call is one loop of launches.

The caller's stream is whatever stream is current when `run` is called.  A call begins there (the
workspace counts a use), forks to the side streams behind an event, and joins them again (`end`).
The same launches go into a graph when the caller's stream is being captured.  In a call nothing
waits for the device on the host.

Timing, when asked for, records an event before and after every operation (external events in a
graph).  Their resolution is about half a microsecond; each costs the stream some, so a timed call
is never the one whose makespan is reported elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from stretto.runtime.executable import Executable, LoweredOperation
from stretto.runtime.executors.clock import ClockBase
from stretto.schedules.language import (
    Epoch,
    Operation,
    Program,
    RunFailed,
    Span,
    StrettoError,
    Wait,
    Word,
)
from stretto.transports.cuda.driver import bindings, called
from stretto.transports.interface import Transport, Workspace

__all__ = ["CudaExecutor"]

VERBS = frozenset({"put", "signal", "wait", "collective"})
Action = Callable[[int], Any]

_TAILS: WeakKeyDictionary[Workspace, dict[int, tuple[int | None, list[Action]]]] = (
    WeakKeyDictionary()
)
"""By workspace and slot residue: the capture in which the slot was used last, and what joins the
side streams of that use.  It belongs to the workspace, since any executor may have the next use."""


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
        transport: Transport,
        workspace: Workspace | None,
        streams: Mapping[str, Any],
    ) -> None:
        import torch

        self.executable, self.transport, self.workspace = executable, transport, workspace
        self.streams = streams
        self._torch = torch
        self._caller = streams[executable.program.caller_stream]
        self.period = 1 if workspace is None else workspace.period
        shared = {} if workspace is None else _TAILS.setdefault(workspace, {})
        self._tails: dict[int, tuple[int | None, list[Action]]] = shared
        self._capture: int | None = None
        self.uses = 0
        self._marks: list[_Mark] = []
        self._events: list[Any] = []
        self._plain = [self._plan(phase, None) for phase in range(len(executable.phases))]
        self._forks = any(plan.forks for plan in self._plain)

    @cached_property
    def _driver(self) -> Any:
        """The CUDA driver: what one stream alone does not need, where there is none (ROCm)."""
        return bindings()

    def run(self, *, timed: bool = False) -> None:
        """Enqueue one execution of the Program on the current stream, or into its graph."""
        self._caller.handle = self._torch.cuda.current_stream().cuda_stream
        self._capture = self._capture_id() if self._forks else None
        program = self.executable.program
        first = self.uses if self.workspace is None else self.workspace.use_count
        for call in program.call_sequence(first):
            plan = self._plain[call.phase_index]
            if timed:
                plan = self._plan(call.phase_index, self._marks, call.number)
            number, done = call.number, 0
            try:
                for done, action in enumerate(plan.actions):  # noqa: B007 (names the one that fails)
                    action(number)
            except Exception as error:
                named = self.named(error, plan.names[done], number)
                self.give_up(named)
                raise named from error
            self.count(number)

    def run_timed_on_host(self) -> list[tuple[str, float]]:
        """Enqueue one call of the first phase; return what each action cost the host.

        Returns
        -------
        list of (str, float)
            Operation (or ``begin``, ``end``) and microseconds, the clock's own included.
        """
        self._caller.handle = self._torch.cuda.current_stream().cuda_stream
        self._capture = self._capture_id() if self._forks else None
        call = self.uses if self.workspace is None else self.workspace.use_count
        plan, clock = self._plain[0], time.perf_counter_ns
        spent = []
        for name, action in zip(plan.names, plan.actions, strict=True):
            start = clock()
            action(call)
            spent.append((name, (clock() - start) / 1e3))
        self.count(call)
        return spent

    def count(self, call: int) -> None:
        """Note that a call has been made: by `run`, or by a replay of what it was captured to."""
        self.uses = call + 1
        if self.workspace is not None:
            self.workspace.use_count = self.uses

    def give_up(self, error: Exception) -> None:
        """Tell the other ranks that this one has failed in the middle of a call.

        What it has begun cannot be taken back: its epochs and theirs would differ from here on.  In
        a capture nothing has begun.
        """
        if not self.capturing():
            self.transport.abort(str(error))

    def named(self, error: Exception, name: str, call: int) -> Exception:
        """Return an error of the device (out of memory, ECC, a bad address) with its operation."""
        if isinstance(error, StrettoError):
            return error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return RunFailed(
            f"rank {self.executable.rank}, operation {name!r}, call {call}: {reason} (a device may "
            "report late what an earlier operation did; CUDA_LAUNCH_BLOCKING=1 names the very one)."
        )

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
        try:
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
        except RuntimeError as error:
            if isinstance(error, StrettoError):
                raise
            raise self.named(error, self._some(), max(self.uses - 1, 0)) from error
        self.transport.raise_if_failed()

    def _some(self) -> str:
        """Return the names of the operations of a call, one of which the device has failed in."""
        return ", ".join(dict.fromkeys(self._plain[-1].names))

    def take_spans(self, base: ClockBase) -> list[Span]:
        """Return the spans of the timed calls since `forget_spans`, on the host's clock.

        After a graph has been replayed again, the same marks give the new times.
        """
        return [self._span(mark, base) for mark in self._marks]

    def forget_spans(self) -> None:
        """Drop the marks of earlier timed calls, and their events."""
        marks, self._marks = self._marks, []
        for mark in marks:
            self._driver.cuEventDestroy(mark.start)
            self._driver.cuEventDestroy(mark.end)

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return bool(self._torch.cuda.is_current_stream_capturing())

    def close(self) -> None:
        """Destroy the events, which no captured graph needs; a second call does nothing."""
        self.forget_spans()
        events, self._events = self._events, []
        for event in events:
            self._driver.cuEventDestroy(event)

    # ---- one call ----------------------------------------------------------------------------

    def _plan(self, phase: int, marks: list[_Mark] | None, number: int = 0) -> _CallPlan:
        """Return what a call of a phase does, in the order of the host."""
        lowered, caller = self.executable.phases[phase], self.executable.program.caller_stream
        side = [
            name
            for name in dict.fromkeys(one.operation.stream for one in lowered)
            if name != caller
        ]
        begin = self._begin(lowered)
        plan = _CallPlan()
        if self.workspace is not None:
            plan.add("begin", self._join_last_use)
        if begin is not None:
            plan.add("begin", begin)
        plan.forks = bool(side)
        if side:
            fork = self._event()
            plan.add("begin", self._recorder(fork, self._caller))
            plan.add("begin", *(self._waiter(fork, self.streams[name]) for name in side))
        exits = {
            place
            for place in self.executable.exits[phase]
            if lowered[place].operation.stream != caller
        }
        awaited = {place for one in lowered for place in one.after} | exits
        events = {place: self._event() for place in awaited}
        for place, one in enumerate(lowered):
            name, stream = one.operation.id, self.streams[one.operation.stream]
            plan.add(name, *(self._waiter(events[earlier], stream) for earlier in one.after))
            waited = begin is not None and _is_credit(self.executable.program, one.operation)
            if marks is not None:
                launch = _nothing if waited else self._launch(one, stream)
                plan.add(name, self._timed(launch, one, stream, marks, number))
            elif not waited:
                plan.add(name, self._launch(one, stream))
            if place in awaited:
                plan.add(name, self._recorder(events[place], stream))
        plan.add("end", *(self._waiter(events[place], self._caller) for place in sorted(exits)))
        if side:
            plan.add("end", self._end(side))
        return plan

    def _begin(self, lowered: Sequence[LoweredOperation]) -> Action | None:
        """Return the launch that begins a call, if there is one."""
        if self.workspace is None:
            return None
        return self.transport.begin(self.workspace, self._credits(lowered), stream=self._caller)

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
                if _is_credit(program, one.operation)
                for sync in one.operation.waits()
            ]
            for residue in range(self.period)
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
        tails = self._tails.pop(call % self.period, None)
        if tails is not None and tails[0] == self._capture:
            for tail in tails[1]:
                tail(call)

    def _end(self, side: Sequence[str]) -> Action:
        """Return what joins the side streams to the caller's at the end of a call.

        Eager: the caller's stream follows everything.  In a graph only what touches the caller's
        buffers is waited for; what remains, the releases, is joined for the capture's sake and
        taken out of the caller's dependencies again.  It ends with the graph at the latest, and
        before the slot's next use in the same graph.
        """
        tails = [[self._event() for _ in side] for _ in range(self.period)]
        ends = [
            [self._recorder(tail, self.streams[name]) for tail, name in zip(row, side, strict=True)]
            for row in tails
        ]
        joins = [[self._waiter(tail, self._caller) for tail in row] for row in tails]

        def end(call: int) -> None:
            residue = call % self.period
            dependencies = None if self._capture is None else self._dependencies()
            for action in (*ends[residue], *joins[residue]):
                action(call)
            if dependencies is not None:
                self._set_dependencies(dependencies)
                self._tails[residue] = (self._capture, joins[residue])

        return end

    def _capture_id(self) -> int | None:
        """Return the id of the capture that the caller's stream is in, if it is in one."""
        status, number, *_ = called(
            "cuStreamGetCaptureInfo", self._driver.cuStreamGetCaptureInfo(self._caller.handle)
        )
        return int(number) if int(status) else None

    def _set_dependencies(self, dependencies: Any) -> None:
        called(
            "cuStreamUpdateCaptureDependencies",
            self._driver.cuStreamUpdateCaptureDependencies(
                self._caller.handle, dependencies, None, len(dependencies), 1
            ),
        )

    def _dependencies(self) -> Any:
        answer = called(
            "cuStreamGetCaptureInfo", self._driver.cuStreamGetCaptureInfo(self._caller.handle)
        )
        return answer[3]

    # ---- events ------------------------------------------------------------------------------

    def _event(self, *, timing: bool = False) -> Any:
        event = called("cuEventCreate", self._driver.cuEventCreate(0 if timing else 2))
        if not timing:
            self._events.append(event)
        return event

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


def _is_credit(program: Program, operation: Operation) -> bool:
    """Whether an operation is awaited by the kernel that begins the call: a credit, in epochs."""
    return (
        isinstance(operation, Wait)
        and operation.is_credit
        and all(program.flag[word.flag].kind == "epoch" for word in operation.words)
    )


def _nothing(call: int) -> None:
    """Do what has been done when the call began."""


@dataclass(slots=True)
class _CallPlan:
    """What the host does in one call, and for which operation it does it."""

    actions: list[Action] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    forks: bool = False

    def add(self, name: str, *actions: Action) -> None:
        """Do these next, for an operation."""
        self.actions += actions
        self.names += [name] * len(actions)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Two events around one operation of one call."""

    lowered: LoweredOperation
    call: int
    start: Any
    end: Any
