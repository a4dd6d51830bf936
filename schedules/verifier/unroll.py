"""From Programs to events: everything that a few calls of them do, on every rank.

An operation becomes one or more *events*, points in time between which others may happen::

    compute, copy, ...   one event
    put                  one event for the data, one for its signal
    signal               one event a word, in their order
    wait                 one event: all words have been reached
    collective           one event where a rank comes, one where it leaves
    fused kernel         begin and end, and between them a lane of its own for each group of tiles
    the caller           one event before a call, one after it

Events lie in *lanes*, first in first out: a stream of a rank, for all calls.  A side stream of one
Program is not that of another, whatever its name: nothing promises that they are the same queue.
An *access* is what an operation does to a rectangle from one event (its start) to another (its
finish).  The data of a put to another rank may be under way after the put has ended; they have
arrived, for certain, when the next signal of its stream is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stretto.schedules.language import (
    DTYPE_BYTES,
    Buffer,
    Collective,
    FlagRef,
    FusedGemm,
    InvalidInput,
    OperationBase,
    Phase,
    Program,
    Put,
    Signal,
    Sync,
    View,
    Wait,
    Word,
    ceil_div,
)

__all__ = ["NEVER", "Access", "Crew", "Flags", "Lane", "Site", "Turn", "World", "unroll"]

NEVER = -1
"""In place of an event: it does not come."""

BEGIN, END = "(before)", "(after)"
"""Names of the caller's work before and after a call."""


class Turn(NamedTuple):
    """One call of one Program.

    Attributes
    ----------
    call
        Use count of the workspace.
    program
        Its number among the distinct Programs.
    phase, execution
        Which phase; which execution of the sequence of Programs, from 0.
    first, last
        Whether the caller has worked just before, and will just after.
    """

    call: int
    program: int
    phase: Phase
    execution: int
    first: bool
    last: bool


class Lane(NamedTuple):
    """One first-in-first-out queue; `owner` tells apart those that share rank and stream."""

    rank: int
    stream: str
    owner: tuple[object, ...]


class Site(NamedTuple):
    """One operation of one rank in one call (or the caller's work, which has no operation).

    Attributes
    ----------
    turn, rank
        Of which call, of whom.
    position
        In the enqueue order of the call.
    operation
        None for the caller.
    name
        Id of the operation.
    """

    turn: int
    rank: int
    position: int
    operation: OperationBase | None
    name: str


@dataclass(slots=True)
class Access:
    """A rectangle that is read, written, or added to, from `start` to `finish`.

    Attributes
    ----------
    mode
        ``read``, ``write`` or ``add`` (which commutes with other adds).
    storage, shape
        Which slot of whose buffer, and which Program's idea of its rows and columns.
    row, row_stop, column, column_stop
        In elements.
    start, finish
        Events; `finish` is NEVER where nothing says when it is over.
    site
        Whose it is.
    meeting
        Of a collective: accesses of one meeting do not disturb each other.
    flies
        Whether it is the landing of a put on another rank.
    """

    mode: str
    storage: int
    shape: int
    row: int
    row_stop: int
    column: int
    column_stop: int
    start: int
    finish: int
    site: int
    meeting: int = NEVER
    flies: bool = False


@dataclass(slots=True)
class Crew:
    """A fused kernel's workers: groups in the order in which their tiles are taken.

    Attributes
    ----------
    site
        The kernel.
    workers
        How many tiles can be in hand at once.
    begin, end
        Events of the kernel.
    groups
        For each group: number of tiles, first and last event.
    """

    site: int
    workers: int
    begin: int
    end: int
    groups: list[tuple[int, int, int]]


class Flags:
    """Numbers for flag words, and what each holds before the first call."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.world_size = programs[0].world_size
        self.flag = {flag.name: flag for program in programs for flag in program.flags}
        for program in programs:
            for flag in program.flags:
                if self.flag[flag.name] != flag:
                    raise InvalidInput(
                        f"Programs on one workspace declare flag {flag.name!r} differently."
                    )
        self._base: dict[str, int] = {}
        self.kind: list[str] = []
        self.initial: list[int] = []
        for flag in self.flag.values():
            self._base[flag.name] = len(self.kind)
            words = flag.count * flag.slots * self.world_size
            self.kind += [flag.kind] * words
            self.initial += [signed(flag.initial)] * words

    def number(self, ref: FlagRef, rank: int) -> tuple[int, int, int, int]:
        """Return base, slots, step and slot offset: the word is base + step * slot."""
        flag = self.flag[ref.flag]
        size = self.world_size
        index = ref.index if isinstance(ref.index, int) else ref.index.of(rank, size)
        home = ref.on.of(rank, size)
        base = self._base[ref.flag] + home * flag.slots * flag.count + index
        return base, flag.slots, flag.count, ref.slot

    def word(self, number: int) -> Word:
        """Return which word has a number."""
        name = max(
            (name for name in self._base if self._base[name] <= number), key=self._base.__getitem__
        )
        flag = self.flag[name]
        rest, position = divmod(number - self._base[name], flag.count)
        home, slot = divmod(rest, flag.slots)
        return Word(name, home, slot, position)


def signed(value: int) -> int:
    """Return the 32-bit value as a number from -2^31, so that nearby epochs compare plainly."""
    return (value + 0x80000000) % 0x100000000 - 0x80000000


@dataclass
class World:
    """Events of all ranks and calls.

    Attributes
    ----------
    programs, turns
        What was unrolled.
    lanes, events_of
        All lanes; the events of each, in order.
    lane, place, site
        Of every event: its lane, its place there counted from 1, its operation.
    before
        Events of other lanes that every event needs.
    awaited
        For waits: words and the values expected.
    fired
        For signals: the word and the value.
    meeting_of, meetings
        For the event where a rank leaves a collective: which one; who has to come first.
    sites
        All operations, rank by rank and call by call in the order of enqueuing.
    first, last
        First and last event of every site.
    accesses
        In the order of their sites.
    storages, shapes
        (memory, owner, slot) of every storage; bytes of a row and of an element of every shape.
    crews
        Fused kernels.
    unequal
        Collectives at which ranks do not agree: turn, rank, and what is wrong.
    """

    programs: tuple[Program, ...]
    turns: tuple[Turn, ...]
    flags: Flags
    lanes: list[Lane] = field(default_factory=list)
    events_of: list[list[int]] = field(default_factory=list)
    lane: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    site: list[int] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    awaited: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    fired: dict[int, tuple[int, int]] = field(default_factory=dict)
    meeting_of: dict[int, int] = field(default_factory=dict)
    meetings: list[list[int]] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    storages: list[tuple[tuple[object, str], int, int]] = field(default_factory=list)
    shapes: list[tuple[int, int]] = field(default_factory=list)
    crews: list[Crew] = field(default_factory=list)
    unequal: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.programs[0].world_size

    def program_of(self, site: int) -> Program:
        """Return the Program that a site belongs to."""
        return self.programs[self.turns[self.sites[site].turn].program]

    def call_of(self, site: int) -> int:
        """Return the use count of the call that a site belongs to."""
        return self.turns[self.sites[site].turn].call

    def stream_of(self, event: int) -> str:
        """Return the name of the stream of an event."""
        return self.lanes[self.lane[event]].stream


class _Touch(NamedTuple):
    """A View of one rank with everything resolved but the call."""

    mode: str
    memory: tuple[object, str]
    shape: int
    owner: int
    slots: int
    slot: int
    row: int
    row_stop: int
    column: int
    column_stop: int


_Wire = tuple[int, int, int, int, int, int]
"""A Sync of one rank with everything resolved but the call: the word's four numbers, the value."""


class _Part(NamedTuple):
    """One step of an operation as one rank does it."""

    kind: str
    touches: tuple[_Touch, ...] = ()
    signals: tuple[_Wire, ...] = ()
    waits: tuple[_Wire, ...] = ()
    flies: bool = False


class _Line(NamedTuple):
    """One operation as one rank enqueues it in every call."""

    operation: OperationBase
    after: tuple[int, ...]
    entry: bool
    exit: bool
    part: _Part
    groups: tuple[tuple[int, tuple[_Part, ...]], ...] = ()


def unroll(
    programs: Sequence[Program],
    turns: Sequence[Turn],
    *,
    fresh_streams: bool = False,
    pushed_collectives: bool = False,
    signal_orders_puts: bool = True,
) -> World:
    """Return the events of `turns`, whose numbers of Programs are places in `programs`.

    Parameters
    ----------
    programs, turns
        What is called.
    fresh_streams
        Whether streams of one call know nothing of those of the last, the caller's excepted.
    pushed_collectives
        Whether an all-gather into a symmetric buffer may write to all ranks as soon as one rank
        comes to it.
    signal_orders_puts
        Whether a signal is seen only after the puts that its stream enqueued before.
    """
    unrolling = _Unrolling(programs, turns, fresh_streams, pushed_collectives, signal_orders_puts)
    for number in range(len(turns)):
        unrolling.turn(number)
    return unrolling.world


class _Unrolling:
    def __init__(
        self,
        programs: Sequence[Program],
        turns: Sequence[Turn],
        fresh: bool,
        pushed: bool,
        ordered: bool,
    ) -> None:
        self.world = World(tuple(programs), tuple(turns), Flags(programs))
        self._fresh, self._pushed, self._ordered = fresh, pushed, ordered
        self._lane_numbers: dict[Lane, int] = {}
        self._storage_numbers: dict[tuple[tuple[object, str], int, int], int] = {}
        self._shape_numbers: dict[tuple[int, int], int] = {}
        self._lines: dict[tuple[int, int, int], list[_Line]] = {}
        self._spans: dict[tuple[int, View, int], tuple[int, ...]] = {}
        self._flying: dict[int, list[Access]] = {}
        self._begun: set[tuple[int, int, str]] = set()

    def turn(self, number: int) -> None:
        world, turn = self.world, self.world.turns[number]
        meetings: dict[int, int] = {}
        issued: list[list[tuple[object, ...]]] = []
        for rank in range(world.world_size):
            issued.append(self._rank(number, turn, rank, meetings))
        for rank in range(1, world.world_size):
            if issued[rank] != issued[0]:
                world.unequal.append((number, rank, _difference(issued[0], issued[rank])))
                return
        for place in range(len(issued[0])):
            wrong = self._misfit(turn, place)
            if wrong is not None:
                world.unequal.append((number, *wrong))

    def _misfit(self, turn: Turn, place: int) -> tuple[int, str] | None:
        """Return at which rank the rows of a collective do not fit, and why."""
        parts = []
        for rank in range(self.world.world_size):
            lines = [
                line
                for line in self._lines_of(turn, rank)
                if isinstance(line.operation, Collective)
            ]
            source, destination = lines[place].part.touches
            parts.append((source.row_stop - source.row, destination.row_stop - destination.row))
        operation = lines[place].operation
        assert isinstance(operation, Collective)
        kind = operation.collective
        gathered = sum(source for source, _ in parts)
        scattered = sum(destination for _, destination in parts)
        for rank, (source, destination) in enumerate(parts):
            wanted = {
                "all_gather": (source, gathered),
                "reduce_scatter": (scattered, destination),
                "all_reduce": (parts[0][0], parts[0][0]),
            }[kind]
            if (source, destination) != wanted:
                return rank, (
                    f"its {kind} is of {source} rows to {destination} rows; with what the other "
                    f"ranks bring it should be of {wanted[0]} rows to {wanted[1]}"
                )
        return None

    # ---- one rank's call ---------------------------------------------------------------------

    def _rank(
        self, number: int, turn: Turn, rank: int, meetings: dict[int, int]
    ) -> list[tuple[object, ...]]:
        world = self.world
        program = world.programs[turn.program]
        lines = self._lines_of(turn, rank)
        callers = self._lane(turn, rank, program.caller_stream)
        begin = self._caller(number, turn, rank, callers, -1, BEGIN, ())
        ends: list[int] = []
        exits: list[int] = []
        issued: list[tuple[object, ...]] = []
        for position, line in enumerate(lines):
            lane = self._lane(turn, rank, line.operation.stream)
            before = [ends[place] for place in line.after if world.lane[ends[place]] != lane]
            if line.entry:
                before.append(begin)
            site = len(world.sites)
            world.sites.append(Site(number, rank, position, line.operation, line.operation.id))
            world.first.append(len(world.lane))
            if line.groups:
                self._kernel(turn, lane, site, line, tuple(before))
            elif isinstance(line.operation, Collective):
                self._collective(turn, lane, site, line, tuple(before), meetings, len(issued))
                issued.append(_issue(line.operation, line.part.touches))
            else:
                self._simple(turn, lane, site, line.part, tuple(before))
            world.last.append(len(world.lane) - 1)
            ends.append(len(world.lane) - 1)
            if line.exit:
                exits.append(ends[-1])
        self._caller(number, turn, rank, callers, len(lines), END, tuple(exits))
        return issued

    def _caller(
        self,
        number: int,
        turn: Turn,
        rank: int,
        lane: int,
        position: int,
        name: str,
        before: tuple[int, ...],
    ) -> int:
        """Add the caller's work: it writes inputs, and reads outputs and spoils all it may."""
        world = self.world
        site = len(world.sites)
        world.sites.append(Site(number, rank, position, None, name))
        event = self._event(lane, site, before)
        world.first.append(event)
        world.last.append(event)
        program = world.programs[turn.program]
        for buffer in program.buffers:
            if buffer.role == "workspace":
                continue
            if name == BEGIN and turn.first:
                new = (turn.program, rank, buffer.name) not in self._begun
                self._begun.add((turn.program, rank, buffer.name))
                if buffer.reuse == "caller_stream" or (new and buffer.initial == "caller"):
                    self._touch_whole("write", turn, buffer, rank, event, site)
            elif name == END and turn.last:
                if buffer.role == "output":
                    self._touch_whole("read", turn, buffer, rank, event, site)
                if buffer.reuse == "caller_stream":
                    self._touch_whole("write", turn, buffer, rank, event, site)
        return event

    def _touch_whole(
        self, mode: str, turn: Turn, buffer: Buffer, rank: int, event: int, site: int
    ) -> None:
        self._access(self._resolved(turn.program, mode, View(buffer.name), rank), turn, event, site)

    def _simple(
        self, turn: Turn, lane: int, site: int, part: _Part, before: tuple[int, ...]
    ) -> None:
        """Add the events of an operation, or of a part of a fused kernel."""
        world = self.world
        if part.kind == "wait":
            event = self._event(lane, site, before)
            world.awaited[event] = tuple(_wired(wire, turn.call) for wire in part.waits)
            return
        if part.kind != "signal":
            event = self._event(lane, site, before)
            before = ()
            for touch in part.touches:
                made = self._access(touch, turn, event, site)
                if made is not None and part.flies and touch.mode != "read":
                    made.flies, made.finish = True, NEVER
                    self._flying.setdefault(lane, []).append(made)
        for wire in part.signals:
            event = self._event(lane, site, before)
            before = ()
            world.fired[event] = _wired(wire, turn.call)
            if self._ordered:
                for made in self._flying.pop(lane, ()):
                    made.finish = event

    def _collective(
        self,
        turn: Turn,
        lane: int,
        site: int,
        line: _Line,
        before: tuple[int, ...],
        meetings: dict[int, int],
        number: int,
    ) -> None:
        world = self.world
        if number not in meetings:
            meetings[number] = len(world.meetings)
            world.meetings.append([])
        meeting = meetings[number]
        comes = self._event(lane, site, before)
        world.meetings[meeting].append(comes)
        leaves = self._event(lane, site, ())
        world.meeting_of[leaves] = meeting
        for touch in line.part.touches:
            made = self._access(touch, turn, comes, site)
            if made is not None:
                made.finish, made.meeting = leaves, meeting
        operation = line.operation
        assert isinstance(operation, Collective)
        program = world.programs[turn.program]
        symmetric = program.buffer[operation.destination.buffer].kind == "symmetric"
        if self._pushed and symmetric and operation.collective == "all_gather":
            # Others may write here from the moment at which they come; that is over when all left.
            _, destination = line.part.touches
            for peer in range(world.world_size):
                if peer != world.sites[site].rank:
                    pushed = self._access(destination._replace(owner=peer), turn, comes, site)
                    if pushed is not None:
                        pushed.finish, pushed.meeting = leaves, meeting

    def _kernel(
        self, turn: Turn, lane: int, site: int, line: _Line, before: tuple[int, ...]
    ) -> None:
        """Add a fused kernel: its groups run side by side between its begin and its end."""
        world = self.world
        operation = line.operation
        assert isinstance(operation, FusedGemm)
        begin = self._event(lane, site, before)
        crew = Crew(site, operation.tiling.workers, begin, begin, [])
        rank = world.sites[site].rank
        for index, (tiles, parts) in enumerate(line.groups):
            owner = (*world.lanes[lane].owner, operation.id, index)
            own = self._numbered(Lane(rank, operation.stream, owner))
            first = len(world.lane)
            for part in parts:
                begun = len(world.lane) == first
                self._simple(turn, own, site, part, (begin,) if begun else ())
            crew.groups.append((tiles, first, len(world.lane) - 1))
            # What a group has sent without a signal is ordered by the stream's next one.
            self._flying.setdefault(lane, []).extend(self._flying.pop(own, ()))
        crew.end = self._event(lane, site, tuple(last for _, _, last in crew.groups))
        world.crews.append(crew)

    # ---- events, lanes, accesses -------------------------------------------------------------

    def _event(self, lane: int, site: int, before: tuple[int, ...]) -> int:
        world = self.world
        event = len(world.lane)
        events = world.events_of[lane]
        events.append(event)
        world.lane.append(lane)
        world.place.append(len(events))
        world.site.append(site)
        world.before.append(before)
        return event

    def _lane(self, turn: Turn, rank: int, stream: str) -> int:
        program = self.world.programs[turn.program]
        if stream == program.caller_stream:
            return self._numbered(Lane(rank, stream, ()))
        owner = (turn.program, turn.call) if self._fresh else (turn.program,)
        return self._numbered(Lane(rank, stream, owner))

    def _numbered(self, lane: Lane) -> int:
        number = self._lane_numbers.get(lane)
        if number is None:
            number = self._lane_numbers[lane] = len(self.world.lanes)
            self.world.lanes.append(lane)
            self.world.events_of.append([])
        return number

    def _access(self, touch: _Touch, turn: Turn, event: int, site: int) -> Access | None:
        if touch.row == touch.row_stop or touch.column == touch.column_stop:
            return None
        key = (touch.memory, touch.owner, (turn.call + touch.slot) % touch.slots)
        storage = self._storage_numbers.get(key)
        if storage is None:
            storage = self._storage_numbers[key] = len(self.world.storages)
            self.world.storages.append(key)
        made = Access(
            touch.mode,
            storage,
            touch.shape,
            touch.row,
            touch.row_stop,
            touch.column,
            touch.column_stop,
            event,
            event,
            site,
        )
        self.world.accesses.append(made)
        return made

    # ---- names to numbers, once a rank -------------------------------------------------------

    def _lines_of(self, turn: Turn, rank: int) -> list[_Line]:
        key = (turn.program, id(turn.phase), rank)
        lines = self._lines.get(key)
        if lines is None:
            program, body = self.world.programs[turn.program], turn.phase.body(rank)
            entries, exits = set(program.entries(body)), set(program.exits(body))
            lines = self._lines[key] = [
                _Line(
                    operation,
                    tuple(body.index[id] for id in operation.after),
                    operation.id in entries,
                    operation.id in exits,
                    _Part("kernel")
                    if isinstance(operation, FusedGemm)
                    else self._part(turn.program, operation, rank),
                    tuple(self._groups(turn.program, operation, rank))
                    if isinstance(operation, FusedGemm)
                    else (),
                )
                for operation in body.operations
            ]
        return lines

    def _groups(
        self, program: int, operation: FusedGemm, rank: int
    ) -> Iterator[tuple[int, tuple[_Part, ...]]]:
        parts = {part.id: part for part in operation.parts()}
        for number, group in enumerate(operation.groups):
            name = f"{operation.id}/{number}."
            own = [part for id, part in parts.items() if id.startswith(name)]
            out = self._resolved(program, "write", group.out, rank)
            rows, columns = out.row_stop - out.row, out.column_stop - out.column
            tiling = operation.tiling
            tiles = ceil_div(rows, tiling.tile_m) * ceil_div(columns, tiling.tile_n)
            yield tiles, tuple(self._part(program, part, rank) for part in own)

    def _part(self, program: int, operation: OperationBase, rank: int) -> _Part:
        if isinstance(operation, Wait):
            return _Part("wait", waits=self._wires(operation.waits(), rank))
        if isinstance(operation, Signal):
            return _Part("signal", signals=self._wires(operation.signals(), rank))
        mode = "add" if isinstance(operation, Put) and operation.mode == "add" else "write"
        touches = tuple(
            [self._resolved(program, "read", view, rank) for view in operation.reads()]
            + [self._resolved(program, mode, view, rank) for view in operation.writes()]
        )
        flies = isinstance(operation, Put) and touches[-1].owner != rank
        return _Part(operation.kind, touches, self._wires(operation.signals(), rank), flies=flies)

    def _wires(self, syncs: Iterable[Sync], rank: int) -> tuple[_Wire, ...]:
        return tuple(
            (*self.world.flags.number(sync.word, rank), sync.value.stride, sync.value.offset)
            for sync in syncs
        )

    def _resolved(self, number: int, mode: str, view: View, rank: int) -> _Touch:
        program = self.world.programs[number]
        buffer = program.buffer[view.buffer]
        size = program.world_size
        key = (number, view, rank)
        span = self._spans.get(key)
        if span is None:
            place = view.resolve(buffer, rank=rank, world_size=size)
            span = self._spans[key] = (
                place.owner,
                place.row,
                place.row + place.rows,
                place.column,
                place.column + place.columns,
            )
        element = DTYPE_BYTES[buffer.dtype]
        shape = (buffer.columns.stored(size) * element, element)
        if shape not in self._shape_numbers:
            self._shape_numbers[shape] = len(self.world.shapes)
            self.world.shapes.append(shape)
        shared = buffer.role == "workspace" and buffer.kind == "symmetric"
        memory = ("shared" if shared else number, buffer.name)
        return _Touch(
            mode,
            memory,
            self._shape_numbers[shape],
            span[0],
            buffer.slots,
            view.slot,
            *span[1:],
        )


def _wired(wire: _Wire, call: int) -> tuple[int, int]:
    base, slots, step, slot, stride, offset = wire
    return base + step * ((call + slot) % slots), signed(call * stride + offset)


def _issue(operation: Collective, touches: Sequence[_Touch]) -> tuple[object, ...]:
    """Return what all ranks must agree on: what kind, of which buffers, how wide."""
    source, destination = touches
    return (
        operation.collective,
        operation.source.buffer,
        operation.destination.buffer,
        source.column_stop - source.column,
        destination.column_stop - destination.column,
    )


def _difference(one: list[tuple[object, ...]], other: list[tuple[object, ...]]) -> str:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return (
                f"its collective number {place + 1} of the call is {_named(right)}, that of rank 0 "
                f"is {_named(left)}"
            )
    return f"it issues {len(other)} collectives in the call, rank 0 issues {len(one)}"


def _named(issue: tuple[object, ...]) -> str:
    kind, source, destination, columns, _ = issue
    return f"{kind} of {columns} columns of {source!r} to {destination!r}"
