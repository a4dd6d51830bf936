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

from collections.abc import Sequence

from stretto.schedules.language import Buffer, Collective, FusedGemm, Program, View
from stretto.schedules.verifier.collectives import disagreements
from stretto.schedules.verifier.lines import Line, Lines, Part, Touch, wired
from stretto.schedules.verifier.world import (
    BEGIN,
    END,
    NEVER,
    Access,
    Crew,
    Flags,
    Lane,
    Site,
    Turn,
    World,
)

__all__ = ["unroll"]


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
        self._lines = Lines(programs, self.world.flags)
        self.world.shapes = self._lines.shapes
        self._flying: dict[int, list[Access]] = {}
        self._leaves: dict[tuple[int, int], int] = {}
        self._pushes: list[tuple[Access, int]] = []
        self._begun: set[tuple[int, int, str]] = set()

    def turn(self, number: int) -> None:
        world, turn = self.world, self.world.turns[number]
        meetings: dict[int, int] = {}
        lines = [self._lines.of(turn, rank) for rank in range(world.world_size)]
        for rank, own in enumerate(lines):
            self._rank(number, turn, rank, own, meetings)
        for pushed, owner in self._pushes:
            pushed.finish = self._leaves[pushed.meeting, owner]
        self._pushes.clear()
        world.unequal += [(number, *found) for found in disagreements(lines)]

    # ---- one rank's call ---------------------------------------------------------------------

    def _rank(
        self, number: int, turn: Turn, rank: int, lines: Sequence[Line], meetings: dict[int, int]
    ) -> None:
        world = self.world
        program = world.programs[turn.program]
        callers = self._lane(turn, rank, program.caller_stream)
        begin = self._caller(number, turn, rank, callers, -1, BEGIN, ())
        ends: list[int] = []
        exits: list[int] = []
        issued = 0
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
                self._collective(turn, lane, site, line, tuple(before), meetings, issued)
                issued += 1
            else:
                self._simple(turn, lane, site, line.part, tuple(before))
            world.last.append(len(world.lane) - 1)
            ends.append(len(world.lane) - 1)
            if line.exit:
                exits.append(ends[-1])
        self._caller(number, turn, rank, callers, len(lines), END, tuple(exits))

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
        self._access(
            self._lines.resolved(turn.program, mode, View(buffer.name), rank), turn, event, site
        )

    def _simple(
        self, turn: Turn, lane: int, site: int, part: Part, before: tuple[int, ...]
    ) -> None:
        """Add the events of an operation, or of a part of a fused kernel."""
        world = self.world
        if part.kind == "wait":
            event = self._event(lane, site, before)
            world.awaited[event] = tuple(wired(wire, turn.call) for wire in part.waits)
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
            world.fired[event] = wired(wire, turn.call)
            if self._ordered:
                for made in self._flying.pop(lane, ()):
                    made.finish = event

    def _collective(
        self,
        turn: Turn,
        lane: int,
        site: int,
        line: Line,
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
        self._leaves[meeting, world.sites[site].rank] = leaves
        for touch in line.part.touches:
            made = self._access(touch, turn, comes, site)
            if made is not None:
                made.finish, made.meeting = leaves, meeting
        operation = line.operation
        assert isinstance(operation, Collective)
        program = world.programs[turn.program]
        symmetric = program.buffer[operation.destination.buffer].kind == "symmetric"
        if self._pushed and symmetric and operation.collective == "all_gather":
            # Others may write here from the moment at which they come, until this rank leaves.
            _, destination = line.part.touches
            for peer in range(world.world_size):
                if peer != world.sites[site].rank:
                    pushed = self._access(destination._replace(owner=peer), turn, comes, site)
                    if pushed is not None:
                        pushed.meeting = meeting
                        self._pushes.append((pushed, peer))

    def _kernel(
        self, turn: Turn, lane: int, site: int, line: Line, before: tuple[int, ...]
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

    def _access(self, touch: Touch, turn: Turn, event: int, site: int) -> Access | None:
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
            touch.buffer,
        )
        self.world.accesses.append(made)
        return made
