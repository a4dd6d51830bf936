"""Collectives of ranks that share memory, built from copies and meetings.

A *meeting* is a barrier on the workspace's own words: every rank counts its word up, wakes the
others, and waits until every word has come as far.  It begins each collective, so that nobody's
destination is written before it has reached the collective in its stream's order, and it ends each
collective, so that a rank leaves with all its data.  At the first one ranks also compare a checksum
of what they issue: different collectives are an error, not a mixture.

What moves where, with `cell` (on, of): rank `on`'s staging cell for rank `of`::

    all_gather      own block -> every rank's destination              | meet
      (staged)      own block -> cell (own, own) | meet | cells (r, r) -> destination
    reduce_scatter  addend for p -> cell (p, own) | meet | sum of own cells -> destination
    all_reduce      as reduce_scatter, then       | sum -> every rank's destination
      (staged)      as reduce_scatter, then       | sum -> cell (own, own) | meet | as all_gather

*Staged* is for a destination outside the workspace, which peers cannot write.  Sources may always
lie anywhere: they are pushed by their owner.

A cell is small (64 KiB to 512 KiB), so a block goes through it in rounds, and any collective fits
any workspace: nothing can be short in the middle of a run.  The two halves of the staging area are
used in turn: what round r leaves in a half has been read before a rank reaches the meeting of round
r + 1, and is overwritten after that meeting.

A rank has at most one collective of a workspace in progress; a second stream's waits its turn.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stretto.schedules.language import (
    DTYPE_BYTES,
    CollectiveKind,
    InvalidInput,
    StrettoError,
    ceil_div,
)
from stretto.transports.interface import Label, Launch, Memory
from stretto.transports.posix.control import Control
from stretto.transports.posix.copying import check_rectangle, copier, summer
from stretto.transports.posix.futex import HALF_RANGE, MASK, NEEDS_FENCE, SharedWord, fence
from stretto.transports.posix.workspace import SharedWorkspace

__all__ = ["prepare"]

Action = Callable[[], object]


class _Piece(NamedTuple):
    """A rectangle of a block that fits a cell: rows of it, and bytes of each row."""

    row: int
    rows: int
    byte: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class _Round:
    """What a rank does before and after one meeting, and after a second one if there is need."""

    push: tuple[Action, ...]
    gather: tuple[Action, ...] = ()
    fetch: tuple[Action, ...] = ()


def prepare(
    control: Control,
    workspace: SharedWorkspace,
    kind: CollectiveKind,
    source: Memory,
    destination: Memory,
    *,
    dtype: str,
    blocks: Sequence[int],
    label: Label,
) -> Launch:
    """Resolve everything that one collective does on this rank.

    Blocks are as a Program splits rows: all full, then one that may be short, then empty ones.
    Block b begins at row ``b * blocks[0]``, and ends before the valid rows do.

    Raises
    ------
    InvalidInput
        If the rectangles do not fit the blocks.
    Unsupported
        If numbers of that type cannot be added.
    """
    plan = _Plan(control, workspace, kind, source, destination, dtype, tuple(blocks))
    rounds = plan.rounds()
    fetches_sums = kind == "all_reduce" and plan.staged
    spreads_sums = kind == "all_reduce" and not plan.staged
    meeting = _Meeting(control, workspace, label, plan.signature())

    def launch(call: int) -> Sequence[int]:
        with workspace.meeting_lock:
            try:
                meeting.enter(call)
                for one in rounds:
                    for action in one.push:
                        action()
                    meeting.meet(call)
                    for action in one.gather:
                        action()
                    if fetches_sums:
                        meeting.meet(call)
                    for action in one.fetch:
                        action()
                if spreads_sums:
                    meeting.meet(call)
            except StrettoError:
                raise
            except BaseException as error:
                # Ctrl-C in the middle: this rank's count no longer agrees with the others'.
                control.abort(f"{meeting.where(call)} was interrupted ({type(error).__name__})")
                raise
        return ()

    return launch


class _Plan:
    """The actions of one collective on one rank."""

    def __init__(
        self,
        control: Control,
        workspace: SharedWorkspace,
        kind: CollectiveKind,
        source: Memory,
        destination: Memory,
        dtype: str,
        blocks: tuple[int, ...],
    ) -> None:
        self.rank, self.world_size = control.rank, control.world_size
        self.workspace, self.kind, self.dtype, self.blocks = workspace, kind, dtype, blocks
        self.source, self.destination = source, destination
        self._check()
        owner = workspace.owner(destination)
        if owner not in (None, self.rank):
            raise InvalidInput(f"The destination of a collective is on rank {owner}, not here.")
        self.staged = owner is None

    def _check(self) -> None:
        blocks = self.blocks
        full = blocks[0] if blocks else 0
        valid = sum(blocks)
        rule = tuple(min(max(valid - b * full, 0), full) for b in range(self.world_size))
        if blocks != rule:
            raise InvalidInput(
                f"Blocks {blocks} are not {self.world_size} full ones, then one short, then empty."
            )
        sharded = range(blocks[self.rank], full + 1)
        whole = range(valid, full * self.world_size + 1)
        sides = {
            "all_gather": (sharded, whole),
            "reduce_scatter": (whole, sharded),
            "all_reduce": (whole, whole),
        }
        for memory, rows in zip((self.source, self.destination), sides[self.kind], strict=True):
            check_rectangle(memory)
            if memory.rows not in rows:
                raise InvalidInput(
                    f"{self.kind} of blocks {blocks}: {memory.rows} rows do not fit on rank "
                    f"{self.rank}, which needs {rows[0]}."
                )
        if self.source.row_bytes != self.destination.row_bytes:
            raise InvalidInput(f"{self.kind}: source and destination differ in the bytes of a row.")
        if self.dtype not in DTYPE_BYTES:
            raise InvalidInput(f"{self.kind}: there is no type {self.dtype!r}.")

    def signature(self) -> int:
        """Return a checksum of what must be the same on all ranks."""
        place = None
        if not self.staged and self.kind != "reduce_scatter":
            offset = self.destination.address - self.workspace.lines[self.rank]
            place = (offset, self.destination.pitch_bytes)
        alike = (self.kind, self.dtype, self.destination.row_bytes, self.blocks, place)
        return zlib.crc32(repr(alike).encode())

    def rounds(self) -> list[_Round]:
        """Return what this rank does in every round; all ranks have equally many."""
        if self.kind == "all_gather" and not self.staged:
            return [_Round(self._spread(self.source, None))]
        pieces = [self._pieces(rows) for rows in self.blocks]
        make = self._gathered if self.kind == "all_gather" else self._reduced
        # At least one, so that no rank can begin the next collective while another one still
        # compares the checksums of this one.
        rounds = max(1, *map(len, pieces))
        return [
            make(
                number % 2,
                [of_block[number] if number < len(of_block) else None for of_block in pieces],
            )
            for number in range(rounds)
        ]

    def _gathered(self, half: int, pieces: list[_Piece | None]) -> _Round:
        own, piece = self._cell(self.rank, half, self.rank), pieces[self.rank]
        push: tuple[Action, ...] = ()
        if piece is not None:
            push = (copier(_part(self.source, 0, piece), own(piece)),)
        return _Round(push, (), self._fetched(half, pieces))

    def _reduced(self, half: int, pieces: list[_Piece | None]) -> _Round:
        push = tuple(
            copier(self._block(self.source, peer, piece), self._cell(peer, half, self.rank)(piece))
            for peer, piece in self._in_turn(pieces)
            if peer != self.rank
        )
        piece = pieces[self.rank]
        gather: list[Action] = []
        if piece is not None:
            addends = [
                self._block(self.source, self.rank, piece)
                if peer == self.rank
                else self._cell(self.rank, half, peer)(piece)
                for peer in range(self.world_size)
            ]
            if self.kind == "reduce_scatter":
                total = _part(self.destination, 0, piece)
            elif self.staged:
                total = self._cell(self.rank, half, self.rank)(piece)
            else:
                total = self._block(self.destination, self.rank, piece)
            gather.append(summer(addends, total, self.dtype))
            if self.kind == "all_reduce" and not self.staged:
                gather += self._spread(total, piece)
        staged_sum = self.kind == "all_reduce" and self.staged
        fetch = self._fetched(half, pieces) if staged_sum else ()
        return _Round(push, tuple(gather), fetch)

    def _fetched(self, half: int, pieces: list[_Piece | None]) -> tuple[Action, ...]:
        return tuple(
            copier(self._cell(peer, half, peer)(piece), self._block(self.destination, peer, piece))
            for peer, piece in self._in_turn(pieces)
        )

    def _spread(self, memory: Memory, piece: _Piece | None) -> tuple[Action, ...]:
        """Push this rank's block, or a piece of it, into every rank's destination."""
        whole = _Piece(0, self.blocks[self.rank], 0, self.destination.row_bytes)
        own = self._block(self.destination, self.rank, piece or whole)
        if piece is None:
            memory = _part(memory, 0, whole)
        lines = self.workspace.lines
        return tuple(
            copier(memory, own._replace(address=own.address - lines[self.rank] + lines[peer]))
            for peer, _ in self._in_turn([whole] * self.world_size)
        )

    def _in_turn(self, pieces: list[_Piece | None]) -> list[tuple[int, _Piece]]:
        """Return ranks and their pieces beginning with the next rank, so that targets differ."""
        ranks = [(self.rank + step) % self.world_size for step in range(1, self.world_size + 1)]
        return [(peer, piece) for peer in ranks if (piece := pieces[peer]) is not None]

    def _block(self, memory: Memory, block: int, piece: _Piece) -> Memory:
        return _part(memory, block * self.blocks[0], piece)

    def _cell(self, on: int, half: int, of: int) -> Callable[[_Piece], Memory]:
        address = self.workspace.cell_address(on=on, half=half, of=of)
        return lambda piece: Memory(address, piece.rows, piece.row_bytes, piece.row_bytes)

    def _pieces(self, rows: int) -> list[_Piece]:
        """Cut a block of `rows` rows into rectangles that fit a cell."""
        row_bytes, cell_bytes = self.destination.row_bytes, self.workspace.plan.cell_bytes
        if not rows or not row_bytes:
            return []
        if row_bytes <= cell_bytes:
            step = cell_bytes // row_bytes
            return [
                _Piece(row, min(step, rows - row), 0, row_bytes) for row in range(0, rows, step)
            ]
        parts = ceil_div(row_bytes, cell_bytes)
        return [
            _Piece(row, 1, part * cell_bytes, min(cell_bytes, row_bytes - part * cell_bytes))
            for row in range(rows)
            for part in range(parts)
        ]


class _Meeting:
    """The barrier of one workspace's collectives, as one prepared collective uses it."""

    def __init__(
        self, control: Control, workspace: SharedWorkspace, label: Label, signature: int
    ) -> None:
        self._control, self._workspace = control, workspace
        self._label, self._signature = label, signature
        self._words = [SharedWord(line) for line in workspace.lines]
        self._signatures = [SharedWord(line + 4).cell for line in workspace.lines]

    def enter(self, call: int) -> None:
        """Wait until every rank has reached this collective, and see that it is the same."""
        self._control.raise_if_aborted()
        self._signatures[self._control.rank].value = self._signature
        self.meet(call)
        for peer, cell in enumerate(self._signatures):
            if cell.value != self._signature:
                message = (
                    f"{self.where(call)}: rank {peer} issued another collective here; all ranks "
                    "must issue the same ones in the same order"
                )
                self._control.abort(message)
                raise InvalidInput(f"{message}.")

    def meet(self, call: int) -> None:
        """Wait until every rank is here."""
        workspace, control = self._workspace, self._control
        step = workspace.meeting_step = (workspace.meeting_step + 1) & MASK
        own = self._words[control.rank]
        if NEEDS_FENCE:
            fence()
        own.cell.value = step
        own.wake()
        for peer, word in enumerate(self._words):
            if (word.cell.value - step) & MASK >= HALF_RANGE:
                late = self._late(call, peer)
                control.hold(word, step, late, gate=workspace.gate, needs=peer)
        if NEEDS_FENCE:
            fence()

    def where(self, call: int) -> str:
        """Name the rank, stream, operation and call."""
        stream, operation = self._label
        return f"rank {self._control.rank}, stream {stream!r}, operation {operation!r}, call {call}"

    def _late(self, call: int, peer: int) -> Callable[[int, float], str]:
        def late(seen: int, waited_s: float) -> str:
            return (
                f"{self.where(call)}: waited {waited_s:g} s for rank {peer} to do its part of "
                "the collective"
            )

        return late


def _part(memory: Memory, row: int, piece: _Piece) -> Memory:
    address = memory.address + (row + piece.row) * memory.pitch_bytes + piece.byte
    return Memory(address, piece.rows, piece.row_bytes, memory.pitch_bytes)
