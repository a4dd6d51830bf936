"""What a few calls of some Programs amount to: events in lanes, and accesses to memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stretto.schedules.language import (
    Flag,
    FlagRef,
    OperationBase,
    Phase,
    Program,
    Word,
)

__all__ = [
    "BEGIN",
    "END",
    "NEVER",
    "Access",
    "Crew",
    "Flags",
    "Lane",
    "Site",
    "Turn",
    "World",
    "signed",
]

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
    buffer
        Its name in that Program.
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
    buffer: str
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
        self.flag: dict[str, Flag] = {}
        for program in programs:
            for flag in program.flags:
                known = self.flag.setdefault(flag.name, flag)
                self.flag[flag.name] = replace(known, count=max(known.count, flag.count))
        self._base: dict[str, int] = {}
        self.kind: list[str] = []
        self.purpose: list[str] = []
        self.initial: list[int] = []
        for flag in self.flag.values():
            self._base[flag.name] = len(self.kind)
            words = flag.count * flag.slots * self.world_size
            self.kind += [flag.kind] * words
            self.purpose += [flag.purpose] * words
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
    """Return the 32-bit value as a number from -2^31.

    Words hold 32 bits and are compared cyclically; here they are plain numbers that never wrap.
    Both say the same as long as no two that are compared are 2^31 apart.
    """
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

    def turn_of(self, event: int) -> Turn:
        """Return the call that an event belongs to."""
        return self.turns[self.sites[self.site[event]].turn]

    def program_of(self, site: int) -> Program:
        """Return the Program that a site belongs to."""
        return self.programs[self.turns[self.sites[site].turn].program]

    def call_of(self, site: int) -> int:
        """Return the use count of the call that a site belongs to."""
        return self.turns[self.sites[site].turn].call

    def stream_of(self, event: int) -> str:
        """Return the name of the stream of an event."""
        return self.lanes[self.lane[event]].stream
