"""What the explorer goes through: steps of lanes, and what they touch; see `explorer`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stretto.schedules.language import (
    Collective,
    FusedGemm,
    OperationBase,
    Program,
    Put,
    Signal,
    Sync,
    View,
    Wait,
    Word,
)

__all__ = ["Cell", "Model", "Step", "Touch", "model_of"]

Cell = tuple[object, str, int, int, int, int]
"""Memory, buffer, owner, slot, row, column."""

_LaneKey = tuple[int, str, tuple[object, ...]]
"""Rank, stream, and what else tells a lane from others."""


class Touch(NamedTuple):
    """One access: by which step of which lane, how, to which cells."""

    owner: tuple[int, int]
    lane: int
    mode: str
    cells: frozenset[Cell]
    meeting: object
    is_put: bool
    kernel: int | None


@dataclass(slots=True)
class Step:
    """What a lane does next.

    Attributes
    ----------
    kind
        ``work``, ``wait``, ``set``, ``come``, ``leave`` (a collective) or ``join`` (nothing).
    needs
        (lane, number of steps) that must have been taken.
    touches
        Accesses in progress while this step is due.
    words
        Of a wait: words and values; of ``set``: one word and its value.
    meeting
        Of a collective.
    kernel
        Number of the fused kernel that it is a part of.
    """

    kind: str
    needs: tuple[tuple[int, int], ...] = ()
    touches: tuple[int, ...] = ()
    words: tuple[tuple[Word, int], ...] = ()
    meeting: object = None
    kernel: int | None = None


@dataclass
class Model:
    """All lanes of all ranks, the words, and where in its lane every fused kernel ends."""

    lanes: list[list[Step]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    touches: list[Touch] = field(default_factory=list)
    kinds: dict[Word, str] = field(default_factory=dict)
    initial: dict[Word, int] = field(default_factory=dict)
    zeroed: set[tuple[object, str]] = field(default_factory=set)
    kernels: list[tuple[int, int]] = field(default_factory=list)


def model_of(order: Sequence[Program]) -> Model:
    """Return the steps of executions, one after another on one workspace."""
    return _Builder(order).model


class _Builder:
    def __init__(self, order: Sequence[Program]) -> None:
        self.model = Model()
        self._lanes: dict[_LaneKey, int] = {}
        self._numbers: dict[int, int] = {}
        self._begun: set[tuple[int, int, str]] = set()
        self._kernel: int | None = None
        call = 0
        for program in order:
            self._numbers.setdefault(id(program), len(self._numbers))
            self._declare(program)
            last = call + program.calls - 1
            for one in program.call_sequence(call):
                for rank in range(program.world_size):
                    opens, closes = one.number == call, one.number == last
                    self._call(
                        program, one.phase.body(rank).operations, rank, one.number, opens, closes
                    )
            call = last + 1

    def _declare(self, program: Program) -> None:
        for flag in program.flags:
            for home in range(program.world_size):
                for slot in range(flag.slots):
                    for place in range(flag.count):
                        word = Word(flag.name, home, slot, place)
                        self.model.kinds[word] = flag.kind
                        self.model.initial[word] = flag.initial
        for buffer in program.buffers:
            if buffer.initial == "zero":
                self.model.zeroed.add(self._memory(program, buffer.name))

    def _call(
        self,
        program: Program,
        operations: Sequence[OperationBase],
        rank: int,
        call: int,
        opens: bool,
        closes: bool,
    ) -> None:
        callers = self._lane((rank, program.caller_stream, ()))
        begin = self._before(program, rank, callers, opens)
        ends: dict[str, tuple[int, int]] = {}
        last_touch: dict[str, tuple[int, int]] = {}
        meetings = 0
        for operation in operations:
            lane = callers
            needs = [ends[earlier] for earlier in operation.after]
            if operation.stream != program.caller_stream:
                lane = self._lane((rank, operation.stream, (self._numbers[id(program)],)))
                views = (*operation.reads(), *operation.writes())
                if any(program.buffer[view.buffer].role != "workspace" for view in views):
                    if operation.stream not in last_touch:
                        needs.append(begin)
                    last_touch[operation.stream] = (-1, -1)
            meeting = None
            if isinstance(operation, Collective):
                meeting = (call, meetings)
                meetings += 1
            if isinstance(operation, FusedGemm):
                self._fused(program, operation, rank, call, lane, needs)
            else:
                self._operation(program, operation, rank, call, lane, needs, meeting)
            ends[operation.id] = (lane, len(self.model.lanes[lane]))
            if operation.stream in last_touch and any(
                program.buffer[view.buffer].role != "workspace"
                for view in (*operation.reads(), *operation.writes())
            ):
                last_touch[operation.stream] = ends[operation.id]
        self._after(program, rank, callers, closes, tuple(last_touch.values()))

    def _before(self, program: Program, rank: int, lane: int, opens: bool) -> tuple[int, int]:
        """The caller writes its inputs, and may use its outputs for something else."""
        touches = []
        for buffer in program.buffers if opens else ():
            key = (self._numbers[id(program)], rank, buffer.name)
            fresh = key not in self._begun
            self._begun.add(key)
            gives = buffer.initial == "caller" and (fresh or buffer.reuse == "caller_stream")
            if buffer.role != "workspace" and (gives or buffer.reuse == "caller_stream"):
                spoils = not gives and buffer.initial == "undefined"
                mode = "write" if gives else "spoil" if spoils else "claim"
                touches.append(self._touch(lane, mode, self._cells(program, buffer.name, rank)))
        self._step(lane, Step("work", touches=tuple(touches)))
        return lane, len(self.model.lanes[lane])

    def _after(
        self,
        program: Program,
        rank: int,
        lane: int,
        closes: bool,
        needs: tuple[tuple[int, int], ...],
    ) -> None:
        """The caller reads its outputs, and may use all its buffers for something else."""
        touches = []
        for buffer in program.buffers if closes else ():
            if buffer.role == "workspace":
                continue
            cells = self._cells(program, buffer.name, rank)
            if buffer.role == "output":
                touches.append(self._touch(lane, "read", cells))
            if buffer.reuse == "caller_stream":
                touches.append(self._touch(lane, "spoil", cells))
        self._step(lane, Step("work", needs, tuple(touches)))

    def _fused(
        self,
        program: Program,
        operation: FusedGemm,
        rank: int,
        call: int,
        lane: int,
        needs: Sequence[tuple[int, int]],
    ) -> None:
        """Groups of tiles run side by side."""
        self._step(lane, Step("join", tuple(needs)))
        begin = (lane, len(self.model.lanes[lane]))
        groups: dict[str, list[OperationBase]] = {}
        for part in operation.parts():
            groups.setdefault(part.id.rsplit(".", 1)[0], []).append(part)
        lasts = []
        self._kernel = len(self.model.kernels)
        self.model.kernels.append((lane, len(self.model.lanes[lane])))  # its end is the next step
        for name, parts in groups.items():
            own = self._lane((rank, operation.stream, (self._numbers[id(program)], name)))
            for place, part in enumerate(parts):
                self._operation(program, part, rank, call, own, [begin] if place == 0 else [], None)
            lasts.append((own, len(self.model.lanes[own])))
        self._kernel = None
        self._step(lane, Step("join", tuple(lasts)))

    def _operation(
        self,
        program: Program,
        operation: OperationBase,
        rank: int,
        call: int,
        lane: int,
        needs: Sequence[tuple[int, int]],
        meeting: object,
    ) -> None:
        def values(syncs: Iterable[Sync]) -> Iterator[tuple[Word, int]]:
            for sync in syncs:
                flag = program.flag[sync.word.flag]
                word = sync.word.resolve(flag, rank=rank, world_size=program.world_size, call=call)
                yield word, sync.value.at(call)

        before = tuple(needs)
        if isinstance(operation, Wait):
            self._step(lane, Step("wait", before, words=tuple(values(operation.waits()))))
            return
        if not isinstance(operation, Signal):
            if meeting is not None:
                self._step(lane, Step("come", before, meeting=meeting))
            is_put = isinstance(operation, Put)
            mode = "add" if isinstance(operation, Put) and operation.mode == "add" else "write"
            touches = [
                self._touch(lane, "read", self._seen(program, view, rank, call), meeting)
                for view in operation.reads()
            ] + [
                self._touch(lane, mode, self._seen(program, view, rank, call), meeting, is_put)
                for view in operation.writes()
            ]
            kind = "work" if meeting is None else "leave"
            self._step(
                lane,
                Step(kind, before if meeting is None else (), tuple(touches), meeting=meeting),
            )
            before = ()
        for one in values(operation.signals()):
            self._step(lane, Step("set", before, words=(one,)))
            before = ()

    def _lane(self, key: _LaneKey) -> int:
        number = self._lanes.get(key)
        if number is None:
            number = self._lanes[key] = len(self.model.lanes)
            self.model.lanes.append([])
            self.model.ranks.append(key[0])
        return number

    def _step(self, lane: int, step: Step) -> None:
        step.kernel = self._kernel
        self.model.lanes[lane].append(step)

    def _touch(
        self,
        lane: int,
        mode: str,
        cells: frozenset[Cell],
        meeting: object = None,
        is_put: bool = False,
    ) -> int:
        owner = (lane, len(self.model.lanes[lane]))
        self.model.touches.append(Touch(owner, lane, mode, cells, meeting, is_put, self._kernel))
        return len(self.model.touches) - 1

    def _memory(self, program: Program, name: str) -> tuple[object, str]:
        buffer = program.buffer[name]
        shared = buffer.role == "workspace" and buffer.kind == "symmetric"
        return ("shared" if shared else self._numbers[id(program)]), name

    def _cells(self, program: Program, name: str, rank: int) -> frozenset[Cell]:
        return self._seen(program, View(name), rank, 0)

    def _seen(self, program: Program, view: View, rank: int, call: int) -> frozenset[Cell]:
        buffer = program.buffer[view.buffer]
        place = view.resolve(buffer, rank=rank, world_size=program.world_size, call=call)
        memory = self._memory(program, view.buffer)
        return frozenset(
            (*memory, place.owner, place.slot, row, column)
            for row in range(place.row, place.row + place.rows)
            for column in range(place.column, place.column + place.columns)
        )
