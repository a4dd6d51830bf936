"""The memory of all ranks: buffers as numpy arrays, flags as 32-bit words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from stretto.schedules.language import (
    DTYPE_BYTES,
    Buffer,
    Flag,
    FlagRef,
    Program,
    View,
    Word,
    cyclic_reached,
    in_slot,
    is_own,
    slot_bytes,
    slot_places,
)
from stretto.sim.interpreter.rounding import Array, rounded

__all__ = ["MASK", "Memory", "Part", "Words"]

MASK = 0xFFFFFFFF


class Part(NamedTuple):
    """A rectangle of one rank's memory (`values` is a window on it) and the dtype it is held in."""

    values: Array
    dtype: str

    def overlaps(self, other: Part) -> bool:
        """Whether both might have an element in common."""
        return np.may_share_memory(self.values, other.values)


class Memory:
    """Every buffer of every rank.

    Slots of the workspace are one piece of memory for all Programs, as large as the largest asks;
    each sees its own buffers in it, at the bytes where a real workspace has them.  (Elements of
    different sizes disturb each other where they begin at the same byte.)  All other buffers are a
    Program's own; symmetric ones of one name that two Programs have are the same memory.

    Parameters
    ----------
    programs
        Those that take turns.
    keep_dtypes
        Whether numbers are rounded to the dtype of the buffer that they are written to (and held
        in float32, in float64 if there is a buffer of fp64); otherwise everything is float64.
    """

    def __init__(self, programs: Sequence[Program], *, keep_dtypes: bool) -> None:
        wide = any(buffer.dtype == "fp64" for program in programs for buffer in program.buffers)
        self.number = np.float32 if keep_dtypes and not wide else np.float64
        self._keep_dtypes = keep_dtypes
        self._programs = programs
        self._arrays: dict[tuple[int, str], list[list[Array]]] = {}
        size = programs[0].world_size
        elements = [
            DTYPE_BYTES[buffer.dtype]
            for program in programs
            for buffer in program.buffers
            if in_slot(buffer)
        ]
        self._unit = gcd(*elements) or 1
        largest = max(slot_bytes(program) for program in programs) // self._unit
        slots = max(program.slots for program in programs)
        self._slots: list[list[Array]] = [
            [np.full(largest, np.nan, self.number) for _ in range(slots)] for _ in range(size)
        ]
        own: dict[str, list[list[Array]]] = {}
        for index, program in enumerate(programs):
            places = slot_places(program)
            for buffer in program.buffers:
                if buffer.name in places:
                    storage = self._in_slot(buffer, places[buffer.name], size)
                elif is_own(buffer):
                    if buffer.name not in own:
                        own[buffer.name] = self._storage(buffer, self._largest(buffer.name), size)
                    storage = own[buffer.name]
                else:
                    storage = self._storage(buffer, _elements(buffer, size), size)
                shape = buffer.rows.stored(size), buffer.columns.stored(size)
                self._arrays[index, buffer.name] = [
                    [flat[: shape[0] * shape[1]].reshape(shape) for flat in flats]
                    for flats in storage
                ]

    def whole(self, program: int, buffer: Buffer, rank: int, slot: int = 0) -> Part:
        """Return one slot of a buffer, with all it stores."""
        return Part(self._arrays[program, buffer.name][rank][slot], buffer.dtype)

    def part(self, program: int, view: View, *, rank: int, call: int) -> Part:
        """Return what `rank` means by `view` in use `call` of the workspace."""
        buffer = self._programs[program].buffer[view.buffer]
        world_size = self._programs[program].world_size
        place = view.resolve(buffer, rank=rank, world_size=world_size, call=call)
        array = self._arrays[program, view.buffer][place.owner][place.slot]
        rows = slice(place.row, place.row + place.rows)
        return Part(array[rows, place.column : place.column + place.columns], buffer.dtype)

    def write(self, part: Part, values: Array) -> None:
        """Store `values`, rounded if dtypes are kept."""
        part.values[...] = rounded(values, part.dtype) if self._keep_dtypes else values

    def add(self, part: Part, values: Array) -> None:
        """Accumulate `values` onto what is there."""
        number = self.arithmetic([part])
        self.write(part, part.values.astype(number) + values.astype(number))

    def arithmetic(self, parts: Iterable[Part]) -> type[np.floating[Any]]:
        """Return in what an operation computes that reads and writes these parts.

        float32 if dtypes are kept and none of them is fp64, else float64.
        """
        wide = not self._keep_dtypes or any(part.dtype == "fp64" for part in parts)
        return np.float64 if wide else np.float32

    def poison(self, rank: int, slot: int) -> None:
        """Let a rank's slot of the workspace hold NaN, whichever Program used it."""
        self._slots[rank][slot].fill(np.nan)

    def _in_slot(self, buffer: Buffer, place: int, world_size: int) -> list[list[Array]]:
        """Return a buffer's elements in every rank's slots: windows on them."""
        step = DTYPE_BYTES[buffer.dtype] // self._unit
        first = place // self._unit
        window = slice(first, first + _elements(buffer, world_size) * step, step)
        found: list[list[Array]] = []
        for slots in self._slots:
            found.append([slot[window] for slot in slots])
        return found

    def _largest(self, name: str) -> int:
        """Return how many elements a slot of a symmetric buffer has in the largest Program."""
        return max(
            _elements(program.buffer[name], program.world_size)
            for program in self._programs
            if name in program.buffer
        )

    def _storage(self, buffer: Buffer, elements: int, world_size: int) -> list[list[Array]]:
        content = 0.0 if buffer.initial == "zero" else np.nan
        return [
            [np.full(elements, content, self.number) for _ in range(buffer.slots)]
            for _ in range(world_size)
        ]


def _elements(buffer: Buffer, world_size: int) -> int:
    return buffer.rows.stored(world_size) * buffer.columns.stored(world_size)


class Words:
    """Every flag word of every rank, exact in 32 bits.

    Parameters
    ----------
    programs
        Those that take turns.
    first_call
        Words are as if so many earlier calls had ended (of the Program that declares the flag; a
        mailbox is as declared).
    """

    def __init__(self, programs: Sequence[Program], first_call: int) -> None:
        self._flags: dict[str, Flag] = {}
        self.values: dict[Word, int] = {}
        largest: dict[str, Flag] = {}
        for program in programs:
            for flag in program.flags:
                known = largest.setdefault(flag.name, flag)
                largest[flag.name] = replace(known, count=max(known.count, flag.count))
        for program in programs:
            fresh = [largest[one.name] for one in program.flags if one.name not in self._flags]
            self._flags |= {flag.name: flag for flag in fresh}
            self.values |= {
                Word(flag.name, home, slot, place): flag.initial
                for flag in fresh
                for home in range(program.world_size)
                for slot in range(flag.slots)
                for place in range(flag.count)
            }
            self._age(program, {flag.name for flag in fresh if flag.kind != "mailbox"}, first_call)

    def word(self, ref: FlagRef, *, rank: int, world_size: int, call: int) -> Word:
        """Return which word `rank` means by `ref` in use `call`."""
        return ref.resolve(self._flags[ref.flag], rank=rank, world_size=world_size, call=call)

    def kind(self, word: Word) -> str:
        """Return the kind of the flag that the word belongs to."""
        return self._flags[word.flag].kind

    def passes(self, word: Word, expected: int) -> bool:
        """Whether a wait for `expected` may go on."""
        if self.kind(word) == "mailbox":
            return self.values[word] == 1
        return cyclic_reached(self.values[word], expected)

    def accepts(self, word: Word) -> bool:
        """Whether a signal may be written now: always, but into a mailbox that is still full."""
        return self.kind(word) != "mailbox" or self.values[word] == 0

    def receive(self, word: Word, value: int) -> None:
        """Let a signal of `value` arrive (at a mailbox, which must be empty, a 1)."""
        if self.kind(word) == "counter":
            value += self.values[word]
        self.values[word] = value & MASK

    def _age(self, program: Program, names: set[str], first_call: int) -> None:
        """Bring the flags of these names to where `first_call` calls of `program` leave them."""
        if not first_call or not names:
            return
        phases = [call.phase for call in program.call_sequence()]
        period = program.slot_period * len(phases)
        for back in range(min(period, first_call), 0, -1):
            last = first_call - back
            times = 1 + last // period
            phase = phases[-back % len(phases)]
            for rank in range(program.world_size):
                for operation in phase.body(rank).operations:
                    for sync in operation.signals():
                        if sync.word.flag not in names:
                            continue
                        word = self.word(
                            sync.word, rank=rank, world_size=program.world_size, call=last
                        )
                        if self.kind(word) == "epoch":
                            self.receive(word, sync.value.at(last))
                            continue
                        # the adds of the calls last, last - period, ..., summed
                        earlier = period * (times * (times - 1) // 2) * sync.value.stride
                        self.receive(word, times * sync.value.at(last) - earlier)
