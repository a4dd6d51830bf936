"""The workspace: memory and flags that Programs take turns on, and the protocol that makes it safe.

A workspace has *slots*, used in turn: call c uses slot ``c mod slots``, whichever Program it is of.
In a slot lie the symmetric buffers that are reused on release, those of one Program one behind the
other, so that a slot is as large as the largest Program wants it::

    slot 0   | gathered (ag-gemm)                     |
             | partials (gemm-rs)   | sums   |        |     the same bytes, in another call
    slot 1   ...
    words    slot.released[rank], gathered.arrived[rank], ... of each slot

Three kinds of flags, told apart by their `Flag.purpose`:

``arrival``
    Rank p's word says that rows have come.  In call c it is signalled to a value above c and at
    most c + slots, and waits expect more than c: what another Program left there is at most c.
``release``
    Word r says that rank r has no more use for the slot.  It is what is given back: not one buffer
    but the slot, by one signal to every rank and call, after the last access to anything in it.
``own``
    Of one Program alone; no other one on the workspace may declare a flag of that name.

In call c, with s slots, every Program keeps this:

1. *Credit.*  A rank writes rank q's slot, or signals an arrival there, only after some rank has
   waited, in the same call, for ``slot.released[q]`` to reach c + 1 - s.
2. *Release.*  Rank r sets its word on every rank to c + 1 (or more, but at most c + s), once, after
   every access to its slot and every landing in it is over and every arrival has been awaited.
   No other rank sets its word.
3. *Turn.*  It does so after the same wait for its own word, and sets its own word last.  So
   released epochs only grow, whichever streams they are set on.
4. *Slot.*  All of this is about the slot of the call, and what is read there was written in the
   call.

Then any Programs may take turns, in any order, with no barrier in between: by 3, a credit follows
the release of call c - s and of all calls before on that slot; by 2, it follows all use of the slot
in these; by 1, nothing touches the slot sooner; by 4, nothing depends on what others left.

A transport without signals has collectives alone.  Its Programs have no release: each rank touches
its own part of the slot between the begin and the end of the call on the caller's stream.

Symmetric buffers that are reused otherwise are a Program's own, as its own flags are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stretto.schedules.language.buffers import Buffer, Flag, Word
from stretto.schedules.language.errors import InvalidInput

if TYPE_CHECKING:
    from stretto.schedules.language.program import Program

__all__ = [
    "RELEASED",
    "SLOT",
    "WorkspaceLayout",
    "arrival_flag",
    "in_slot",
    "is_own",
    "is_symmetric",
    "own_names",
    "release_flag",
    "require_shareable",
    "slot_bytes",
    "slot_places",
]

SLOT = "(slot)"
"""Name of the memory, in a layout, that Programs take turns on."""

RELEASED = "slot.released"
"""Name of the one release flag."""

ALIGNMENT_BYTES = 512
"""Of every buffer in a slot."""


# ---- what is what --------------------------------------------------------------------------------


def in_slot(buffer: Buffer) -> bool:
    """Whether a buffer lies in the slot, which is given back as a whole."""
    return is_symmetric(buffer) and buffer.reuse == "release"


def is_own(buffer: Buffer) -> bool:
    """Whether a buffer is symmetric and one Program's alone."""
    return is_symmetric(buffer) and buffer.reuse != "release"


def is_symmetric(buffer: Buffer) -> bool:
    """Whether a buffer is symmetric memory of the library."""
    return buffer.role == "workspace" and buffer.kind == "symmetric"


def release_flag(world_size: int, slots: int) -> Flag:
    """Return the flag by which ranks give their slots back, a word a rank."""
    return Flag(RELEASED, count=world_size, slots=slots, purpose="release")


def arrival_flag(buffer: str, chunk: int, world_size: int, slots: int) -> Flag:
    """Return the flag that says that a chunk of a rank's block has come, a word a rank.

    Its name depends on the chunk's number and not on its rows, so that Programs of any m share it.
    """
    name = f"{buffer}.arrived" if chunk == 0 else f"{buffer}.arrived.{chunk}"
    return Flag(name, count=world_size, slots=slots, purpose="arrival")


def own_names(program: Program) -> tuple[str, ...]:
    """Return the symmetric buffers and the flags that no other Program on a workspace may use."""
    return (
        *(buffer.name for buffer in program.buffers if is_own(buffer)),
        *(flag.name for flag in program.flags if flag.purpose == "own"),
    )


# ---- where it lies -------------------------------------------------------------------------------


def slot_places(program: Program) -> dict[str, int]:
    """Return where in a slot each of the Program's buffers begins, in bytes."""
    places, end = {}, 0
    for buffer in program.buffers:
        if in_slot(buffer):
            places[buffer.name] = end
            end += _aligned(buffer.slot_bytes(program.world_size))
    return places


def slot_bytes(program: Program) -> int:
    """Return how many bytes of a slot the Program uses."""
    return sum(
        _aligned(buffer.slot_bytes(program.world_size))
        for buffer in program.buffers
        if in_slot(buffer)
    )


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class WorkspaceLayout:
    """What every rank's part of a workspace holds; equal on all ranks.

    Attributes
    ----------
    world_size
        Number of ranks.
    buffers
        Symmetric memory: name, bytes of one slot, slots.  What Programs take turns on is the one
        called `SLOT`; the others are Programs' own.
    flags
        Flag arrays of the Programs that use the workspace.
    """

    world_size: int
    buffers: tuple[tuple[str, int, int], ...]
    flags: tuple[Flag, ...]

    @classmethod
    def of(cls, *programs: Program) -> WorkspaceLayout:
        """Return a layout that fits every given Program, so that they may take turns on it.

        Raises
        ------
        InvalidInput
            If they cannot (`require_shareable`).
        """
        require_shareable(programs)
        world_size = programs[0].world_size
        sizes: dict[str, tuple[int, int]] = {}
        flags: dict[str, Flag] = {}
        for program in programs:
            shared = slot_bytes(program)
            if shared:
                known = sizes.get(SLOT, (0, 0))[0]
                sizes[SLOT] = (max(known, shared), program.slots)
            for buffer in program.buffers:
                if is_own(buffer):
                    sizes[buffer.name] = (buffer.slot_bytes(world_size), buffer.slots)
            for flag in program.flags:
                known_flag = flags.setdefault(flag.name, flag)
                flags[flag.name] = replace(known_flag, count=max(known_flag.count, flag.count))
        return cls(
            world_size,
            tuple((name, *size) for name, size in sizes.items()),
            tuple(flags.values()),
        )

    def holds(self, needed: WorkspaceLayout) -> bool:
        """Whether a workspace of this layout serves where one of layout `needed` is asked for."""
        sizes = {name: (size_bytes, slots) for name, size_bytes, slots in self.buffers}
        flags = {flag.name: flag for flag in self.flags}
        return (
            needed.world_size == self.world_size
            and all(
                name in sizes and size_bytes <= sizes[name][0] and slots == sizes[name][1]
                for name, size_bytes, slots in needed.buffers
            )
            and all(
                flag.name in flags
                and flag.count <= flags[flag.name].count
                and replace(flag, count=flags[flag.name].count) == flags[flag.name]
                for flag in needed.flags
            )
        )

    @property
    def rank_bytes(self) -> int:
        """Size of one rank's memory, all slots, in bytes."""
        return sum(size_bytes * slots for _, size_bytes, slots in self.buffers)

    @property
    def words(self) -> int:
        """Number of 32-bit words of one rank's flags."""
        return sum(flag.count * flag.slots for flag in self.flags)

    def word_index(self, word: Word) -> int:
        """Return the place of `word` among its home rank's words."""
        before = 0
        for flag in self.flags:
            if flag.name == word.flag:
                return before + word.slot * flag.count + word.position
            before += flag.count * flag.slots
        raise InvalidInput(f"The workspace has no flag {word.flag!r}.")

    def flag(self, name: str) -> Flag:
        """Return the flag array of this name."""
        for flag in self.flags:
            if flag.name == name:
                return flag
        raise InvalidInput(f"The workspace has no flag {name!r}.")


# ---- who may take turns --------------------------------------------------------------------------


def require_shareable(programs: Sequence[Program], *, alone: bool = False) -> None:
    """Do nothing if the Programs may take turns on one workspace, as far as they declare.

    That each of them keeps the protocol is for the verifier to prove.

    Parameters
    ----------
    programs
        At least one; the same one may come again.
    alone
        Whether they are called in a known order and nobody else uses the workspace.  Then two of
        them may use a flag or buffer of one name, if they declare it alike.

    Raises
    ------
    InvalidInput
        If they may not; the message says which two, and why.
    """
    for one, other in _pairs(programs):
        reason = _reason_against(one, other, alone=alone)
        if reason is not None:
            raise InvalidInput(
                f"{_called(one)} and {_called(other)} cannot take turns on one workspace: {reason}."
            )


def _pairs(programs: Sequence[Program]) -> Iterator[tuple[Program, Program]]:
    """Yield the first Program with each other one, and each two that might share a name."""
    distinct: list[Program] = []
    for program in programs:
        if not any(program is known or program == known for known in distinct):
            distinct.append(program)
    for place, program in enumerate(distinct):
        for known in distinct[:place]:
            yield known, program


def _reason_against(one: Program, other: Program, *, alone: bool) -> str | None:
    """Return why two different Programs may not take turns, or None if they may."""
    if one.world_size != other.world_size:
        return f"one is for {one.world_size} ranks, the other for {other.world_size}"
    if (one.release is None) != (other.release is None):
        gives, keeps = (one, other) if one.release is not None else (other, one)
        return (
            f"{_called(gives)} gives its slot back in every call and {_called(keeps)} does not, "
            "so that a later call would wait for ever"
        )
    if one.slots and other.slots and one.slots != other.slots:
        return f"one has {one.slots} slots, the other {other.slots}"
    for name in one.flag.keys() & other.flag.keys():
        first, second = one.flag[name], other.flag[name]
        own = first.purpose == "own"
        if own and not alone:
            return f"both have a flag {name!r} of their own; give one of them another name"
        if (first if own else replace(first, count=second.count)) != second:
            return f"they declare flag {name!r} differently"
    for name in one.buffer.keys() & other.buffer.keys():
        mine, theirs = one.buffer[name], other.buffer[name]
        if not (is_own(mine) and is_own(theirs)):
            continue
        if not alone:
            return f"both have a buffer {name!r} that is not given back; give one another name"
        if (mine.slots, mine.initial) != (theirs.slots, theirs.initial):
            return f"they give buffer {name!r} different numbers of slots or initial states"
    return None


def _called(program: Program) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in program.shape)
    return f"{program.name} {program.variant} ({sizes})"
