"""Whether a recorded run is one that its Program allows.

A Timeline says when every operation began and ended, what it signalled, and what it waited for.
Held against the Program: the same operations, each once, on its stream; and every edge that the
Program has is kept in time::

    next on the same stream      begins when the one before has ended
    after, entries, exits        begins when those have ended
    wait                         ends when enough signals have begun
    collective                   ends when every rank has begun

Times of different ranks may be off by the Timeline's clock error, and so may be told apart only
beyond that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.schedules.language import (
    Collective,
    FlagEvent,
    InvalidInput,
    OperationBase,
    Program,
    Span,
    SpanKey,
    Sync,
    Timeline,
    cyclic_reached,
)
from stretto.schedules.verifier.verdict import Finding, Place

__all__ = ["check_timeline"]


def check_timeline(timeline: Timeline, program: Program) -> tuple[Finding, ...]:
    """Return where a recorded run contradicts its Program; nothing if it does not.

    Parameters
    ----------
    timeline
        Measured or simulated; of one execution or several, calls counted from 0.
    program
        What was run.

    Raises
    ------
    InvalidInput
        If the Timeline is that of another Program.
    """
    for what in ("name", "variant", "world_size", "shape", "dtype"):
        one, other = getattr(timeline, what), getattr(program, what)
        if one != other:
            raise InvalidInput(f"The Timeline's {what} is {one}, the Program's is {other}.")
    return tuple(_Record(timeline, program).findings())


class _Record:
    def __init__(self, timeline: Timeline, program: Program) -> None:
        self.timeline, self.program = timeline, program
        self.spans = timeline.by_key
        calls = 1 + max((span.call for span in timeline.spans), default=-1)
        executions = max(1, -(-calls // program.calls))
        self.calls = [
            call
            for execution in range(executions)
            for call in program.call_sequence(execution * program.calls)
        ]
        self.phases = {call.number: call.phase for call in self.calls}
        self.first_call = 0

    def findings(self) -> Iterator[Finding]:
        """Yield all contradictions."""
        absent = list(self._operations())
        yield from absent
        if absent:
            return
        self.first_call = self._first_call()
        yield from self._streams_and_edges()
        yield from self._signals()
        yield from self._waits()
        yield from self._collectives()

    # ---- what is there -----------------------------------------------------------------------

    def _operations(self) -> Iterator[Finding]:
        seen: set[SpanKey] = set()
        for key, operation in self._expected():
            seen.add(key)
            span = self.spans.get(key)
            if span is None:
                yield _finding(
                    f"{_named(key)} is not in the record.", self._place(key, operation.stream)
                )
            elif (span.kind, span.stream) != (operation.kind, operation.stream):
                yield _finding(
                    f"{_named(key)} was recorded as a {span.kind} on stream {span.stream}; it is "
                    f"a {operation.kind} on stream {operation.stream}.",
                    self._place(span.key, span.stream),
                )
            elif span.end_us < span.start_us:
                yield _finding(
                    f"{_named(key)} ended before it began.", self._place(span.key, span.stream)
                )
        for key, span in self.spans.items():
            if key not in seen:
                yield _finding(
                    f"{_named(key)} is not in the Program.", self._place(span.key, span.stream)
                )
        if len(self.spans) != len(self.timeline.spans):
            yield _finding(
                f"{len(self.timeline.spans) - len(self.spans)} operations were recorded twice."
            )

    def _expected(self) -> Iterator[tuple[SpanKey, OperationBase]]:
        for call in self.calls:
            for rank in range(self.program.world_size):
                for operation in call.phase.body(rank).operations:
                    yield SpanKey(call.number, rank, operation.id), operation

    # ---- order -------------------------------------------------------------------------------

    def _streams_and_edges(self) -> Iterator[Finding]:
        """Yield operations of one rank that began before what they had to come after had ended."""
        for rank in range(self.program.world_size):
            streams: dict[str, Span] = {}
            left: list[Span] = []  # what the caller's stream waits for
            for call in self.calls:
                body = call.phase.body(rank)
                entries = set(self.program.entries(body))
                exits = set(self.program.exits(body))
                # Before the caller goes on it has come to the end of its own stream.
                before = [*left, *_some(streams.get(self.program.caller_stream))]
                own: list[Span] = []
                opened = False
                for operation in body.operations:
                    span = self.spans[SpanKey(call.number, rank, operation.id)]
                    needs = [
                        (self.spans[SpanKey(call.number, rank, earlier)], "after")
                        for earlier in operation.after
                    ]
                    needs += [(one, "stream") for one in _some(streams.get(operation.stream))]
                    callers = operation.stream == self.program.caller_stream
                    if operation.id in entries or (callers and not opened):
                        needs += [(one, "caller") for one in before]
                    opened = opened or callers
                    for earlier_span, why in needs:
                        if self._later(earlier_span.end_us, span.start_us):
                            yield self._too_early(span, earlier_span, why)
                    streams[operation.stream] = span
                    if operation.id in exits:
                        own.append(span)
                left = own

    def _signals(self) -> Iterator[Finding]:
        """Yield operations whose recorded words are not those that the Program names."""
        for key, operation in self._expected():
            span = self.spans[key]
            for recorded, syncs, what in (
                (span.signalled, operation.signals(), "signalled"),
                (span.awaited, operation.waits(), "awaited"),
            ):
                named = [self._event(sync, key) for sync in syncs]
                if [(*one.word, one.value) for one in recorded] != named:
                    yield _finding(
                        f"{_named(key)} {what} other words or values than the Program says.",
                        self._place(span.key, span.stream),
                    )

    def _waits(self) -> Iterator[Finding]:
        """Yield waits that passed before the signals that release them had begun."""
        written: dict[tuple[str, int, int, int], list[tuple[float, int]]] = {}
        for span in self.timeline.spans:
            for event in span.signalled:
                written.setdefault(event.word, []).append((span.start_us, event.value))
        taken: dict[tuple[str, int, int, int], int] = {}
        before = self._left_before()
        for span in sorted(self.timeline.spans, key=lambda span: span.end_us):
            for event in span.awaited:
                begun = [
                    value
                    for start_us, value in written.get(event.word, ())
                    if not self._later(start_us, span.end_us)
                ]
                taken[event.word] = taken.get(event.word, 0) + 1
                if not self._may_pass(event, begun, before, taken[event.word]):
                    yield _finding(
                        f"{_named(span.key)} ended at {span.end_us:.3f} us, before any signal that "
                        "releases it had begun.",
                        self._place(span.key, span.stream),
                    )
                mailbox = self.program.flag[event.flag].kind == "mailbox"
                seen = event.value if event.seen is None or mailbox else event.seen
                if not cyclic_reached(seen, event.value):
                    yield _finding(
                        f"{_named(span.key)} passed at {event.seen}, but waits for {event.value}.",
                        self._place(span.key, span.stream),
                    )

    def _may_pass(
        self,
        event: FlagEvent,
        begun: Sequence[int],
        before: dict[tuple[str, int, int, int], int],
        taken: int,
    ) -> bool:
        """Whether the signals that had begun are enough for a wait (the `taken`-th of its word)."""
        flag = self.program.flag[event.flag]
        if flag.kind == "mailbox":
            return len(begun) + flag.initial >= taken
        if flag.kind == "counter":
            # Adds of calls before the record are not known one by one.
            return self.first_call > 0 or cyclic_reached(flag.initial + sum(begun), event.value)
        held = before.get(event.word, flag.initial)
        return any(cyclic_reached(value, event.value) for value in (held, *begun))

    def _left_before(self) -> dict[tuple[str, int, int, int], int]:
        """Return what the calls before the record have left in epoch words."""
        left: dict[tuple[str, int, int, int], int] = {}
        period = self.program.slot_period * self.program.calls
        phases = [call.phase for call in self.program.call_sequence()]
        for back in range(min(period, self.first_call), 0, -1):
            for rank in range(self.program.world_size):
                for operation in phases[-back % len(phases)].body(rank).operations:
                    for sync in operation.signals():
                        key = SpanKey(-back, rank, operation.id)
                        *word, value = self._event(sync, key)
                        left[word[0], word[1], word[2], word[3]] = value  # type: ignore[index]
        return left

    def _collectives(self) -> Iterator[Finding]:
        """Yield collectives that a rank left before all had come."""
        size = self.program.world_size
        for call in self.calls:
            issued = [
                [
                    self.spans[SpanKey(call.number, rank, operation.id)]
                    for operation in call.phase.body(rank).operations
                    if isinstance(operation, Collective)
                ]
                for rank in range(size)
            ]
            for together in zip(*issued, strict=False):
                last = max(together, key=lambda span: span.start_us)
                for span in together:
                    if self._later(last.start_us, span.end_us):
                        yield self._too_early(span, last, "collective")

    # ---- small things ------------------------------------------------------------------------

    def _place(self, key: SpanKey, stream: str) -> Place:
        phase = self.phases.get(key.call)
        index = {} if phase is None else phase.body(key.rank).index
        return Place(key.rank, key.call, stream, key.operation, index.get(key.operation, -1))

    def _later(self, one_us: float, other_us: float) -> bool:
        """Whether `one_us` is later than `other_us` by more than the clocks may be off."""
        return one_us > other_us + self.timeline.clock_error_us + 1e-9

    def _first_call(self) -> int:
        """Return the use count of the workspace at the Timeline's call 0, from its values."""
        for key, operation in self._expected():
            span = self.spans[key]
            for recorded, syncs in (
                (span.signalled, operation.signals()),
                (span.awaited, operation.waits()),
            ):
                for event, sync in zip(recorded, syncs, strict=False):
                    if sync.value.stride == 1:
                        seen = (event.value - sync.value.offset - key.call) & 0xFFFFFFFF
                        return seen if seen < 0x80000000 else 0
        return 0

    def _event(self, sync: Sync, key: SpanKey) -> tuple[str, int, int, int, int]:
        call = key.call + self.first_call
        word = sync.word.resolve(
            self.program.flag[sync.word.flag],
            rank=key.rank,
            world_size=self.program.world_size,
            call=call,
        )
        return (*word, sync.value.at(call) & 0xFFFFFFFF)

    def _too_early(self, span: Span, earlier: Span, why: str) -> Finding:
        what = {
            "after": "which it comes after",
            "stream": "which is before it on its stream",
            "caller": "which ends the caller's earlier work",
            "collective": "with which it meets",
        }[why]
        verb = "began" if why != "collective" else "ended"
        moment = span.start_us if why != "collective" else span.end_us
        other = earlier.end_us if why != "collective" else earlier.start_us
        done = "had ended" if why != "collective" else "had come"
        return _finding(
            f"{_named(span.key)} {verb} at {moment:.3f} us, before {_named(earlier.key)}, {what}, "
            f"{done} at {other:.3f} us.",
            self._place(span.key, span.stream),
            self._place(earlier.key, earlier.stream),
        )


def _some(span: Span | None) -> list[Span]:
    return [] if span is None else [span]


def _named(key: SpanKey) -> str:
    return f"{key.operation} of rank {key.rank} in call {key.call}"


def _finding(message: str, *places: Place) -> Finding:
    return Finding("record", "error", message, places=places)
