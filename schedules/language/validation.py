"""What makes a Program well formed; races and deadlocks are the verifier's, not checked here.

The checks run over every rank.  Expressions are few and ranks may be many, so the numbers of an
expression on all ranks are worked out once and kept while one Program is checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stretto.schedules.language.buffers import DTYPE_BYTES, Buffer, FlagRef, View
from stretto.schedules.language.errors import InvalidInput, ProgramError
from stretto.schedules.language.expressions import SELF, Epoch, Extent, Interval, Peer
from stretto.schedules.language.fused import FusedGemm
from stretto.schedules.language.operations import (
    Collective,
    Copy,
    Gemm,
    OperationBase,
    Put,
    Reduce,
    RowOp,
    Signal,
    Wait,
)
from stretto.schedules.language.row_operations import Matrix, row_operation_error
from stretto.schedules.language.workspace import RELEASED, in_slot

if TYPE_CHECKING:
    from stretto.schedules.language.program import Body, Phase, Program

__all__ = ["validate"]

FARTHEST = 2**30
"""How far from 0, in either direction, initial epochs and offsets of epochs may be."""

STEEPEST = 2**16
"""The most by which an epoch may grow from call to call."""


def validate(program: Program) -> None:
    """Raise ProgramError at the first contradiction in `program`."""
    _check_header(program)
    for buffer in program.buffers:
        _check_buffer(buffer, program.world_size)
    checker = _BodyChecker(program)
    for phase in program.phases:
        _check_phase(phase, program)
        for index, body in enumerate(phase.bodies):
            ranks = [
                rank
                for rank in range(program.world_size)
                if not phase.body_of or phase.body_of[rank] == index
            ]
            checker.check(body, ranks)


def _check_header(program: Program) -> None:
    if program.world_size < 1:
        raise ProgramError(f"world_size is {program.world_size}; it must be at least 1")
    if program.dtype not in DTYPE_BYTES:
        raise ProgramError(f"dtype {program.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    if not program.phases:
        raise ProgramError("a Program needs at least one phase")
    for what, names in (
        ("buffer", [buffer.name for buffer in program.buffers]),
        ("flag", [flag.name for flag in program.flags]),
        ("phase", [phase.name for phase in program.phases]),
    ):
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ProgramError(f"two {what}s are called {sorted(twice)[0]!r}")
    for flag in program.flags:
        if flag.count < 1 or flag.slots < 1:
            raise ProgramError(f"flag {flag.name!r}: count and slots must be at least 1")
        if flag.kind == "mailbox" and flag.initial not in (0, 1):
            raise ProgramError(f"flag {flag.name!r}: a mailbox holds 0 or 1")
        if not 0 <= flag.initial < 2**32:
            raise ProgramError(f"flag {flag.name!r}: initial must fit 32 bits")
        if flag.kind == "epoch" and FARTHEST <= flag.initial <= 2**32 - FARTHEST:
            raise ProgramError(
                f"flag {flag.name!r}: initial is {flag.initial}; epochs are compared cyclically "
                f"and start near 0, so give less than 2^{FARTHEST.bit_length() - 1} (or 2^32 less "
                "that)"
            )
    _check_protocol(program)


def _check_protocol(program: Program) -> None:
    """Refuse flags and buffers that contradict the workspace's protocol."""
    releases = [flag for flag in program.flags if flag.purpose == "release"]
    if len(releases) > 1:
        raise ProgramError(
            f"flags {releases[0].name!r} and {releases[1].name!r} both release; a slot is given "
            "back as a whole, by one flag"
        )
    for flag in program.flags:
        if flag.purpose == "own":
            if flag.name == RELEASED:
                raise ProgramError(f"flag {RELEASED!r} is the workspace's; choose another name")
            continue
        if flag.kind != "epoch" or flag.initial != 0:
            raise ProgramError(
                f"flag {flag.name!r}: a flag of purpose {flag.purpose!r} is an epoch from 0"
            )
        if flag.purpose == "release" and (flag.name, flag.count) != (RELEASED, program.world_size):
            raise ProgramError(
                f"flag {flag.name!r}: the release flag is called {RELEASED!r} and has a word for "
                f"each of {program.world_size} ranks"
            )
        if flag.slots != program.slots:
            raise ProgramError(
                f"flag {flag.name!r} has {flag.slots} slots, the workspace has {program.slots}"
            )
    for buffer in program.buffers:
        if in_slot(buffer) and buffer.initial != "undefined":
            raise ProgramError(
                f"buffer {buffer.name!r} lies in a slot, which holds what its last use left; its "
                "initial state is 'undefined'"
            )
        if in_slot(buffer) and buffer.slots != program.slots:
            raise ProgramError(
                f"buffer {buffer.name!r} has {buffer.slots} slots, the workspace has "
                f"{program.slots}"
            )


def _check_buffer(buffer: Buffer, world_size: int) -> None:
    where = f"buffer {buffer.name!r}"
    if buffer.dtype not in DTYPE_BYTES:
        raise ProgramError(f"{where}: dtype {buffer.dtype!r} is not known")
    if buffer.slots < 1:
        raise ProgramError(f"{where}: slots must be at least 1")
    if buffer.rows.size < 0 or buffer.columns.size < 0:
        raise ProgramError(f"{where}: sizes must not be negative")
    if buffer.of_caller and buffer.slots != 1:
        raise ProgramError(f"{where}: a buffer of the caller has one slot")


def _check_phase(phase: Phase, program: Program) -> None:
    if phase.repeats < 1:
        raise ProgramError(f"phase {phase.name!r}: repeats must be at least 1")
    if not phase.bodies:
        raise ProgramError(f"phase {phase.name!r} has no body")
    if not phase.body_of:
        if len(phase.bodies) != 1:
            raise ProgramError(f"phase {phase.name!r}: body_of must name each rank's body")
    elif len(phase.body_of) != program.world_size or not all(
        0 <= index < len(phase.bodies) for index in phase.body_of
    ):
        raise ProgramError(f"phase {phase.name!r}: body_of must give each rank one of the bodies")


class _BodyChecker:
    """Checks bodies of one Program; keeps the numbers of expressions between operations."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ranks: list[int] = []
        self._peers: dict[Peer, list[int]] = {}
        self._spans: dict[tuple[Extent, Interval, Peer], list[tuple[int, int]]] = {}

    def check(self, body: Body, ranks: list[int]) -> None:
        if ranks != self.ranks:
            self.ranks = ranks
            self._peers.clear()
            self._spans.clear()
        seen: set[str] = set()
        for operation in body.operations:
            try:
                self._check_operation(operation, seen)
            except ProgramError:
                raise
            except InvalidInput as error:
                raise ProgramError(
                    str(error), rank=_first(ranks), stream=operation.stream, operation=operation.id
                ) from error
            seen.add(operation.id)

    def _check_operation(self, operation: OperationBase, seen: set[str]) -> None:
        if not operation.id or not operation.stream:
            raise self._fail(operation, "id and stream must not be empty")
        if operation.id in seen:
            raise self._fail(operation, "another operation of this body has the same id")
        for earlier in operation.after:
            if earlier not in seen:
                raise self._fail(
                    operation, f"'after' names {earlier!r}, which is not enqueued before it"
                )
        for view in operation.reads():
            self._check_view(operation, view, remote_allowed=False)
        may_write_remote = isinstance(operation, (Put, Gemm, FusedGemm))
        for view in operation.writes():
            self._check_view(operation, view, remote_allowed=may_write_remote)
            if self.program.buffer[view.buffer].role in ("input", "weight"):
                raise self._fail(operation, f"it writes {view.buffer!r}, which it may only read")
        for sync in operation.signals():
            self._check_word(operation, sync.word, sync.value, signals=True)
        for sync in operation.waits():
            self._check_word(operation, sync.word, sync.value, signals=False)
            if sync.word.on != SELF:
                raise self._fail(operation, "a wait looks at a word of its own rank only")
        if isinstance(operation, (Signal, Wait)) and not operation.words:
            raise self._fail(operation, "it names no word")
        if isinstance(operation, FusedGemm):
            self._check_fused(operation)
        else:
            self._check_shapes(operation)

    def _check_view(self, operation: OperationBase, view: View, *, remote_allowed: bool) -> None:
        buffer = self.program.buffer.get(view.buffer)
        if buffer is None:
            raise self._fail(operation, f"there is no buffer {view.buffer!r}")
        if view.on != SELF and any(
            owner != rank for owner, rank in zip(self._owners(view.on), self.ranks, strict=True)
        ):
            if not remote_allowed:
                raise self._fail(
                    operation, "only a put or a kernel's stores may touch another rank's memory"
                )
            if buffer.kind != "symmetric":
                raise self._fail(
                    operation, f"buffer {view.buffer!r} is local, a peer cannot reach it"
                )
        self._span(buffer.rows, view.rows, view.on)
        self._span(buffer.columns, view.columns, view.on)

    def _check_word(
        self, operation: OperationBase, word: FlagRef, value: Epoch, *, signals: bool
    ) -> None:
        flag = self.program.flag.get(word.flag)
        if flag is None:
            raise self._fail(operation, f"there is no flag {word.flag!r}")
        indices = [word.index] if isinstance(word.index, int) else self._owners(word.index)
        self._owners(word.on)
        for index in indices:
            if not 0 <= index < flag.count:
                raise self._fail(
                    operation, f"flag {word.flag!r} has {flag.count} words, not one at {index}"
                )
        if flag.kind == "mailbox" and (value.stride, value.offset) != (0, 1):
            raise self._fail(operation, f"flag {word.flag!r} is a mailbox; its value is always 1")
        if flag.kind == "epoch" and not 1 <= value.stride <= STEEPEST:
            raise self._fail(
                operation,
                f"epoch flag {word.flag!r} needs a value that grows with the calls, by 1 to "
                f"{STEEPEST}",
            )
        if abs(value.offset) >= FARTHEST:
            raise self._fail(
                operation, f"the value for flag {word.flag!r} is too far off: {value.offset}"
            )
        if (
            flag.kind == "counter"
            and signals
            and (value.stride < 0 or value.offset < 0 or value == Epoch(0, 0))
        ):
            raise self._fail(
                operation, f"counter {word.flag!r} only grows; what is added must be positive"
            )

    def _check_shapes(self, operation: OperationBase) -> None:
        rows, columns = self._rows, self._columns
        if isinstance(operation, Gemm):
            same = [
                (rows(operation.a), rows(operation.out), "a and out differ in rows (m)"),
                (columns(operation.a), columns(operation.b), "a and b differ in columns (k)"),
                (rows(operation.b), columns(operation.out), "n is not the same in b and out"),
            ]
            if operation.accumulate is not None:
                same += [
                    (rows(operation.accumulate), rows(operation.out), "accumulate and out differ"),
                    (
                        columns(operation.accumulate),
                        columns(operation.out),
                        "accumulate and out differ",
                    ),
                ]
            self._require_same(operation, same)
        elif isinstance(operation, (Put, Copy)):
            if isinstance(operation, Put) and operation.mode != "set":
                raise self._fail(operation, "only a fused kernel can add into a peer's memory")
            self._require_alike(operation, (operation.source,), operation.destination)
        elif isinstance(operation, Reduce):
            self._require_alike(operation, operation.inputs, operation.out)
        elif isinstance(operation, RowOp):
            views = (*operation.inputs, *operation.outputs)
            self._require_same(
                operation,
                [(rows(view), rows(views[0]), "its views differ in rows") for view in views[1:]],
            )
            self._check_row_operation(operation)
        elif isinstance(operation, Collective):
            self._check_collective(operation)

    def _check_row_operation(self, operation: RowOp) -> None:
        kinds = (operation.inputs, operation.tables, operation.outputs)
        sizes = [[(self._rows(one), self._columns(one)) for one in views] for views in kinds]
        dtypes = [[self.program.buffer[one.buffer].dtype for one in views] for views in kinds]
        for index, rank in enumerate(self.ranks):
            operands = [
                [
                    Matrix(rows[index], columns[index], dtype)
                    for (rows, columns), dtype in zip(*of_kind, strict=True)
                ]
                for of_kind in zip(sizes, dtypes, strict=True)
            ]
            error = row_operation_error(operation, *operands)
            if error is not None:
                raise self._fail(operation, error, rank=rank)

    def _check_collective(self, operation: Collective) -> None:
        source = self.program.buffer[operation.source.buffer]
        destination = self.program.buffer[operation.destination.buffer]
        if source.dtype != destination.dtype:
            raise self._fail(operation, "source and destination differ in dtype")
        if source.columns.size != destination.columns.size:
            raise self._fail(operation, "source and destination differ in columns")
        if source.rows.size != destination.rows.size:
            raise self._fail(operation, "source and destination differ in rows")
        sharded = {"all_gather": source, "reduce_scatter": destination}.get(operation.collective)
        if sharded is not None and sharded.rows.layout != "shard":
            raise self._fail(
                operation, f"{operation.collective} needs {sharded.name!r} sharded by rows"
            )

    def _check_fused(self, operation: FusedGemm) -> None:
        tiling = operation.tiling
        if min(tiling.tile_m, tiling.tile_n, tiling.workers) < 1 or tiling.communication_sms < 0:
            raise self._fail(operation, "tile_m, tile_n and workers must be at least 1")
        if not operation.groups:
            raise self._fail(operation, "a fused kernel needs at least one group of tiles")
        for group in operation.groups:
            self._require_same(
                operation,
                (
                    (self._rows(group.a), self._rows(group.out), "a and out differ in rows (m)"),
                    (
                        self._columns(group.a),
                        self._columns(operation.b),
                        "a and b differ in columns (k)",
                    ),
                    (
                        self._rows(operation.b),
                        self._columns(group.out),
                        "n is not the same in b and out",
                    ),
                ),
            )
            for emit in group.emits:
                if (emit.source is None) != (emit.destination is None):
                    raise self._fail(operation, "an emit has both source and destination, or none")
                if emit.source is None and emit.word is None:
                    raise self._fail(operation, "an emit without data must signal a word")
                if emit.source is not None and emit.destination is not None:
                    self._require_alike(operation, (emit.source,), emit.destination)

    def _require_alike(self, operation: OperationBase, sources: Iterable[View], out: View) -> None:
        for source in sources:
            if self.program.buffer[source.buffer].dtype != self.program.buffer[out.buffer].dtype:
                raise self._fail(operation, f"{source.buffer!r} and {out.buffer!r} differ in dtype")
            self._require_same(
                operation,
                (
                    (self._rows(source), self._rows(out), "source and destination differ in rows"),
                    (
                        self._columns(source),
                        self._columns(out),
                        "source and destination differ in columns",
                    ),
                ),
            )

    def _require_same(
        self, operation: OperationBase, pairs: Iterable[tuple[list[int], list[int], str]]
    ) -> None:
        for left, right, what in pairs:
            if left != right:
                rank, one, other = next(
                    (rank, one, other)
                    for rank, one, other in zip(self.ranks, left, right, strict=True)
                    if one != other
                )
                raise self._fail(operation, f"{what}: {one} against {other}", rank=rank)

    def _owners(self, peer: Peer) -> list[int]:
        found = self._peers.get(peer)
        if found is None:
            world_size = self.program.world_size
            if peer.absolute and not 0 <= peer.offset < world_size:
                raise InvalidInput(f"there is no rank {peer.offset} among {world_size}")
            found = [peer.of(rank, world_size) for rank in self.ranks]
            self._peers[peer] = found
        return found

    def _span(self, extent: Extent, interval: Interval, on: Peer) -> list[tuple[int, int]]:
        key = (extent, interval, on)
        found = self._spans.get(key)
        if found is None:
            found = [
                extent.resolve(interval, rank=rank, owner=owner, world_size=self.program.world_size)
                for rank, owner in zip(self.ranks, self._owners(on), strict=True)
            ]
            self._spans[key] = found
        return found

    def _rows(self, view: View) -> list[int]:
        spans = self._span(self.program.buffer[view.buffer].rows, view.rows, view.on)
        return [stop - start for start, stop in spans]

    def _columns(self, view: View) -> list[int]:
        spans = self._span(self.program.buffer[view.buffer].columns, view.columns, view.on)
        return [stop - start for start, stop in spans]

    def _fail(
        self, operation: OperationBase, message: str, *, rank: int | None = None
    ) -> ProgramError:
        return ProgramError(
            message,
            rank=_first(self.ranks) if rank is None else rank,
            stream=operation.stream,
            operation=operation.id,
        )


def _first(ranks: list[int]) -> int | None:
    return ranks[0] if ranks else None
