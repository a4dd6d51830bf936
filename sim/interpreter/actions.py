"""What every operation does, in steps between which anything else may happen.

An operation is a generator.  It yields None where others may go on before it does, and `Blocked`
where it cannot go on before something else has happened.  What it may do when is the contract:

* it reads its sources and writes its destinations at any moments between its begin and its end;
* the data of a put to another rank may be under way for longer, but land before a later signal of
  the same stream (or its own) is seen: nothing else orders them;
* the words of one signal are set one after another, in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from stretto.schedules.language import (
    Collective,
    Copy,
    Epoch,
    Fill,
    FlagRef,
    FusedGemm,
    Gemm,
    Opaque,
    OperationBase,
    Program,
    Put,
    Reduce,
    RowOp,
    Signal,
    SpanKey,
    View,
    Wait,
    Word,
)
from stretto.sim.interpreter.functions import Function, results
from stretto.sim.interpreter.meetings import Meetings
from stretto.sim.interpreter.memory import MASK, Memory, Part, Words
from stretto.sim.interpreter.rounding import Array
from stretto.sim.interpreter.schedulers import Manner
from stretto.sim.interpreter.tasks import Task

__all__ = ["Actions", "Blocked", "Landing", "Work"]


class Blocked(NamedTuple):
    """Why an operation cannot go on.

    Attributes
    ----------
    key
        What must change: a word, an operation that must end, a meeting.
    passes
        Whether it could go on now.
    reason
        For the report of a deadlock.
    """

    key: Hashable
    passes: Callable[[], bool]
    reason: Callable[[], str]


Work = Iterator[Blocked | None]


@dataclass(frozen=True, slots=True)
class Landing:
    """Data of a put that are under way to another rank."""

    put: SpanKey
    destination: Part
    values: Array
    adds: bool


@dataclass
class Actions:
    """Makes the steps of an operation.

    Attributes
    ----------
    programs, memory, words, meetings
        The state that all ranks work on.
    functions
        What named functions compute.
    poison_released
        Whether a slot holds NaN once its rank has signalled that it has no use for it.
    notify
        Called with the key of whatever has changed.
    """

    programs: Sequence[Program]
    memory: Memory
    words: Words
    meetings: Meetings
    functions: Mapping[str, Function]
    poison_released: bool
    notify: Callable[[Hashable], None] = field(default=lambda key: None)

    def perform(self, task: Task, manner: Manner, landing: deque[Landing]) -> Work:
        """Yield between the steps of `task`; `landing` is what its stream has under way."""
        return self._perform(task, task.operation, manner, landing)

    def land(self, landing: deque[Landing]) -> None:
        """Let the oldest data under way arrive."""
        item = landing.popleft()
        self._store(item.destination, item.values, adds=item.adds)

    def _perform(
        self, task: Task, operation: OperationBase, manner: Manner, landing: deque[Landing]
    ) -> Work:
        match operation:
            case Wait():
                yield from self._wait(task, operation)
            case Signal():
                yield from self._signal(task, operation.words, operation.value, landing)
            case Put():
                yield from self._put(task, operation, manner, landing)
            case Copy():
                source = self._part(task, operation.source)
                destination = self._part(task, operation.destination)
                yield from self._move(source, destination, manner)
            case Collective():
                yield from self._collective(task, manner)
            case FusedGemm():
                for part in operation.parts():
                    yield from self._perform(task, part, manner, landing)
                    yield None
            case _:
                yield from self._compute(task, operation, manner)

    # ---- flags -------------------------------------------------------------------------------

    def _wait(self, task: Task, operation: Wait) -> Work:
        for sync in operation.waits():
            word, expected = self._word(task, sync.word), self._value(task, sync.value)
            while not self.words.passes(word, expected):
                yield Blocked(
                    word,
                    partial(self.words.passes, word, expected),
                    partial(self._awaited, word, expected),
                )
            if self.words.kind(word) == "mailbox":
                self.words.values[word] = 0
                self.notify(word)

    def _signal(
        self, task: Task, refs: Sequence[FlagRef], value: Epoch, landing: deque[Landing]
    ) -> Work:
        while landing:
            self.land(landing)
        if self.poison_released:
            self._poison(task, {ref.flag for ref in refs})
        for number, ref in enumerate(refs):
            if number:
                yield None
            word = self._word(task, ref)
            while not self.words.accepts(word):
                yield Blocked(
                    word, partial(self.words.accepts, word), partial(self._awaited, word, 0)
                )
            self.words.receive(word, self._value(task, value))
            self.notify(word)

    def _poison(self, task: Task, flags: set[str]) -> None:
        """Fill what the rank gives back with NaN: nobody may read it before it is written again."""
        turn = task.turn
        program = self.programs[turn.program]
        if program.release is not None and program.release.name in flags:
            self.memory.poison(task.rank, turn.call.number % program.slots)

    # ---- data --------------------------------------------------------------------------------

    def _put(self, task: Task, operation: Put, manner: Manner, landing: deque[Landing]) -> Work:
        source = self._part(task, operation.source)
        destination = self._part(task, operation.destination)
        world_size = self.programs[task.turn.program].world_size
        remote = operation.destination.on.of(task.rank, world_size) != task.rank
        adds = operation.mode == "add"
        if manner.lands_late and remote:
            if manner.scribbles and not adds:
                destination.values.fill(np.nan)
            if manner.reads == "end":
                yield None
            landing.append(Landing(task.key, destination, source.values.copy(), adds))
        else:
            while landing:  # puts of one stream arrive in their order
                self.land(landing)
            yield from self._move(source, destination, manner, adds=adds)
        if operation.signal is not None:
            yield None
            yield from self._signal(task, (operation.signal,), operation.value, landing)

    def _move(self, source: Part, destination: Part, manner: Manner, *, adds: bool = False) -> Work:
        if manner.by_rows:
            for row in range(len(source.values)):
                values = source.values[row].copy()
                yield None
                part = Part(destination.values[row], destination.dtype)
                self._store(part, values, adds=adds)
            return
        held = source.values.copy() if manner.reads == "begin" else None
        if manner.scribbles and not adds and (held is not None or not source.overlaps(destination)):
            destination.values.fill(np.nan)
        yield None
        self._store(destination, source.values.copy() if held is None else held, adds=adds)

    def _store(self, destination: Part, values: Array, *, adds: bool) -> None:
        if adds:
            self.memory.add(destination, values)
        else:
            self.memory.write(destination, values)

    def _compute(self, task: Task, operation: OperationBase, manner: Manner) -> Work:
        sources = [self._part(task, view) for view in operation.reads()]
        destinations = [self._part(task, view) for view in operation.writes()]
        number = self.memory.arithmetic((*sources, *destinations))
        held = [part.values.astype(number) for part in sources] if manner.reads == "begin" else None
        apart = not any(one.overlaps(other) for one in sources for other in destinations)
        if manner.scribbles and (held is not None or apart):
            for part in destinations:
                part.values.fill(np.nan)
        yield None
        if held is None:
            held = [part.values.astype(number) for part in sources]
        found = self._computed(operation, held)
        for part, values in zip(destinations, found, strict=True):
            self.memory.write(part, values)

    def _computed(self, operation: OperationBase, values: Sequence[Array]) -> Sequence[Array]:
        match operation:
            case Gemm():
                product = values[0] @ values[1].T
                return [product if operation.accumulate is None else product + values[2]]
            case Reduce():
                total = values[0]
                for addend in values[1:]:
                    total = total + addend
                return [total]
            case Fill():
                return [np.asarray(operation.number, self.memory.number)]
            case RowOp() | Opaque():
                return results(operation, self.functions[operation.function], values)
        raise AssertionError(f"no action for {operation.kind}")

    def _collective(self, task: Task, manner: Manner) -> Work:
        key = task.meeting
        assert key is not None
        meeting = self.meetings.join(task, early=manner.reads == "begin")
        if not meeting.complete:
            if manner.scribbles:
                meeting.scribble(task.rank)
            yield Blocked(
                key, lambda: meeting.complete, partial(meeting.missing, task.operation.id)
            )
        else:
            self.notify(key)
        yield None
        destination, values = meeting.result(task.rank)
        self.memory.write(destination, values)

    # ---- names to numbers --------------------------------------------------------------------

    def _part(self, task: Task, view: View) -> Part:
        return self.memory.part(task.turn.program, view, rank=task.rank, call=task.turn.call.number)

    def _word(self, task: Task, ref: FlagRef) -> Word:
        world_size = self.programs[task.turn.program].world_size
        return self.words.word(
            ref, rank=task.rank, world_size=world_size, call=task.turn.call.number
        )

    def _value(self, task: Task, value: Epoch) -> int:
        return value.at(task.turn.call.number) & MASK

    def _awaited(self, word: Word, expected: int) -> str:
        return (
            f"{self.words.kind(word)} {word.flag}[{word.position}] of rank {word.home} "
            f"(slot {word.slot}): expected {expected}, seen {self.words.values[word]}"
        )
