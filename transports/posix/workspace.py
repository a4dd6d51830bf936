"""A workspace in one shared segment: every rank's part, one behind the other.

A rank's part, beginning on a page::

    | meeting line | flag words | buffer 0, slot 0 | slot 1 | buffer 1 ... | staging |
      64 bytes       4 each       every slot on a 256-byte boundary          for collectives

The meeting line and the staging area belong to the collectives
(`stretto.transports.posix.collectives`).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stretto.schedules.language import (
    InvalidInput,
    RunFailed,
    StrettoError,
    Unsupported,
    Word,
    WorkspaceLayout,
    ceil_div,
)
from stretto.transports.interface import DeviceHandle, Memory, Workspace
from stretto.transports.posix import segment
from stretto.transports.posix.control import FIRST_STEP, Control
from stretto.transports.posix.futex import MASK, SharedWord
from stretto.transports.posix.gate import Gate

__all__ = ["Plan", "SharedWorkspace", "allocate"]

LINE_BYTES = 64
SLOT_ALIGNMENT_BYTES = 256
SMALLEST_CELL_BYTES = 1 << 16
LARGEST_CELL_BYTES = 1 << 19
_CLOSE_LIMIT_S = 5.0
_LONGEST_ERROR = 300


class Plan:
    """Where everything lies in one rank's part of the segment.

    Attributes
    ----------
    words_offset
        Of the flag words.
    slots
        Begin and end of every slot, by buffer name and slot.
    staging_offset
        Of the staging area: two halves of world_size cells.
    cell_bytes
        Size of a cell.
    part_bytes
        Size of a rank's part, whole pages.
    """

    def __init__(self, layout: WorkspaceLayout) -> None:
        self.words_offset = LINE_BYTES
        place = self.words_offset + 4 * layout.words
        self.slots: dict[tuple[str, int], tuple[int, int]] = {}
        largest = 0
        for name, slot_bytes, slots in layout.buffers:
            largest = max(largest, slot_bytes)
            for slot in range(slots):
                place = _aligned(place, SLOT_ALIGNMENT_BYTES)
                self.slots[name, slot] = (place, place + slot_bytes)
                place += slot_bytes
        self.staging_offset = _aligned(place, SLOT_ALIGNMENT_BYTES)
        share = _aligned(ceil_div(largest, layout.world_size), LINE_BYTES)
        self.cell_bytes = min(max(share, SMALLEST_CELL_BYTES), LARGEST_CELL_BYTES)
        end = self.staging_offset + 2 * layout.world_size * self.cell_bytes
        self.part_bytes = _aligned(end, mmap.PAGESIZE)
        filled = sorted((*bounds, name) for (name, _), bounds in self.slots.items())
        self._filled = [one for one in filled if one[0] < one[1]]
        self._begins = [begin for begin, _, _ in self._filled]

    def check_inside(self, offset: int, size_bytes: int) -> None:
        """Refuse bytes that are not all in one slot of one buffer."""
        place = bisect_right(self._begins, offset) - 1
        if place >= 0:
            _, end, name = self._filled[place]
            if offset + size_bytes <= end:
                return
            if offset < end:
                raise InvalidInput(
                    f"{size_bytes} bytes from here run over the end of a slot of buffer "
                    f"{name!r} by {offset + size_bytes - end}."
                )
        raise InvalidInput("The address is in no buffer of the workspace.")


class SharedWorkspace(Workspace):
    """Symmetric buffers and flags in one shared segment; made by `allocate`."""

    def __init__(
        self, layout: WorkspaceLayout, rank: int, plan: Plan, mapping: segment.Mapping
    ) -> None:
        self.layout, self.rank, self.plan = layout, rank, plan
        self.use_count = 0
        self.gate = Gate("workspace")
        self.lines = [mapping.address + peer * plan.part_bytes for peer in range(layout.world_size)]
        # What collectives of this workspace share: one at a time, counted alike on all ranks.
        self.meeting_lock = threading.Lock()
        self.meeting_step = FIRST_STEP
        self._mapping = mapping
        self._first_words: dict[str, int] = {}
        before = 0
        for flag in layout.flags:
            self._first_words[flag.name] = before
            before += flag.count * flag.slots

    def initialise(self) -> None:
        """Write this rank's flags as they are before the first call."""
        SharedWord(self.lines[self.rank]).cell.value = FIRST_STEP
        for flag in self.layout.flags:
            for slot in range(flag.slots):
                for place in range(flag.count):
                    word = Word(flag.name, self.rank, slot, place)
                    self.word(word).cell.value = flag.initial & MASK

    def address(self, buffer: str, *, rank: int, slot: int) -> int:
        bounds = self.plan.slots.get((buffer, slot))
        if bounds is None or not 0 <= rank < self.layout.world_size:
            raise InvalidInput(f"The workspace has no buffer {buffer!r}, slot {slot}, rank {rank}.")
        return self.lines[rank] + bounds[0]

    def word_address(self, word: Word) -> int:
        flag = self.layout.flag(word.flag)
        if not (
            0 <= word.home < self.layout.world_size
            and 0 <= word.slot < flag.slots
            and 0 <= word.position < flag.count
        ):
            raise InvalidInput(f"The workspace has no word {word}.")
        index = self._first_words[word.flag] + word.slot * flag.count + word.position
        return self.lines[word.home] + self.plan.words_offset + 4 * index

    def word(self, word: Word) -> SharedWord:
        """Return a flag word to load, store and block on."""
        return SharedWord(self.word_address(word))

    def read_word(self, word: Word) -> int:
        with self.gate.inside():
            value: int = self.word(word).cell.value
            return value

    def cell_address(self, *, on: int, half: int, of: int) -> int:
        """Return rank `on`'s staging cell for rank `of`, in one of the two halves."""
        number = half * self.layout.world_size + of
        return self.lines[on] + self.plan.staging_offset + number * self.plan.cell_bytes

    def holds(self, address: int) -> bool:
        """Whether the address is in this workspace."""
        return 0 <= address - self._mapping.address < self._mapping.size_bytes

    def owner(self, memory: Memory) -> int | None:
        """Return whose buffer a rectangle is in, or None if it is not in this workspace.

        Raises
        ------
        InvalidInput
            If it begins in the workspace but is not inside one slot of a buffer.
        """
        if not self.holds(memory.address):
            return None
        rank, inside = divmod(memory.address - self._mapping.address, self.plan.part_bytes)
        if memory.total_bytes:
            span = (memory.rows - 1) * memory.pitch_bytes + memory.row_bytes
            self.plan.check_inside(inside, span)
        return rank

    def device_handle(self) -> DeviceHandle:
        raise Unsupported("No kernel can reach memory of shared_memory; use its verbs.")

    def close(self) -> None:
        # Rather keep the mapping until the process ends than pull it from under a running launch.
        if self.gate.shut(_CLOSE_LIMIT_S):
            self._mapping.close()


def allocate(control: Control, layout: WorkspaceLayout, directory: Path) -> SharedWorkspace:
    """Make a workspace, together with all other ranks; raise on all of them or on none.

    Rank 0 makes the segment if there is memory for all parts; every rank reserves its own part,
    maps the whole, and writes its flags; then nobody holds a file any more.
    """
    plan = Plan(layout)
    _agree(control, layout)
    rank, part_bytes, size_bytes = (
        control.rank,
        plan.part_bytes,
        layout.world_size * plan.part_bytes,
    )
    purpose = (
        f"A workspace of {layout.world_size} ranks ({part_bytes} bytes each, with flags and "
        "staging)"
    )
    descriptor: int | None = None
    mapping: segment.Mapping | None = None
    try:
        if rank == 0:
            make = partial(segment.create, purpose, size_bytes, directory=directory)
            descriptor, error = _attempt(make)
            made = _settle(control, error, descriptor)[0]
        else:
            made = _settle(control, None)[0]
            descriptor, error = _attempt(
                partial(segment.open_peer, 0, made["pid"], made["descriptor"])
            )
        if descriptor is not None:
            _, error = _attempt(partial(segment.reserve, descriptor, rank * part_bytes, part_bytes))
        _settle(control, error)
        if descriptor is not None:
            mapping, error = _attempt(partial(segment.Mapping, descriptor, size_bytes))
        _settle(control, error)
        if mapping is None:
            raise RunFailed("no rank failed to map, and yet there is no mapping")
        workspace = SharedWorkspace(layout, rank, plan, mapping)
        workspace.initialise()
        _settle(control, None)
    except BaseException:
        if mapping is not None:
            mapping.close()
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return workspace


def _agree(control: Control, layout: WorkspaceLayout) -> None:
    digest = hashlib.sha256(repr(layout).encode()).hexdigest()
    summary = (
        f"{layout.rank_bytes} bytes in {len(layout.buffers)} buffers, {layout.words} words in "
        f"{len(layout.flags)} flags, world size {layout.world_size}"
    )
    layouts = control.exchange({"digest": digest, "summary": summary})
    for rank, other in enumerate(layouts):
        if other["digest"] != layouts[0]["digest"]:
            raise InvalidInput(
                "The ranks ask for different workspaces: rank 0 for "
                f"{layouts[0]['summary']}; rank {rank} for {other['summary']}."
            )
    if layout.world_size != control.world_size:
        raise InvalidInput(
            f"The workspace is laid out for {layout.world_size} ranks, there are "
            f"{control.world_size}."
        )


T = TypeVar("T")


def _attempt(step: Callable[[], T]) -> tuple[T | None, StrettoError | None]:
    """Run a step that may fail on one rank, and then has to fail on all."""
    try:
        return step(), None
    except StrettoError as error:
        return None, error


def _settle(
    control: Control, error: StrettoError | None, descriptor: int | None = None
) -> list[dict[str, Any]]:
    """Tell all ranks how this one's step went; return what they said, or raise an error of one."""
    text = None if error is None else str(error)[:_LONGEST_ERROR]
    said = control.exchange({"error": text, "pid": os.getpid(), "descriptor": descriptor})
    if error is not None:
        raise error
    for rank, other in enumerate(said):
        if other["error"] is not None:
            raise InvalidInput(f"rank {rank}: {other['error']}")
    return said


def _aligned(place: int, alignment: int) -> int:
    return ceil_div(place, alignment) * alignment
