"""How a schedule is written: `Schedule` and the `RankBuilder` that it enqueues on.

The builder traces `Schedule.enqueue` once with a symbolic rank.  What the schedule says relative
to its rank stays relative, so one body stands for all.  A schedule that asks for the rank's number
(``rank.index``) is traced once for every rank instead.

Slots, credits and epochs are the builder's business:

* a workspace has two slots by default, used in turn by successive calls;
* a put into a workspace signals the word ``<workspace>.arrived[block]`` of its slot, and
  ``rank.wait(workspace[block])`` waits for it;
* before a stream first writes a rank's slot in a call comes a *credit*: a wait until that rank
  has released the slot's last use (a collective writes every rank's slot, its own included);
* at the end of a call every rank *releases* the slot to all ranks, after its last access.  That
  must come after its own release of the slot's last use, which may be another schedule's on
  another stream, has reached all ranks.  So a credit is for the own word too, which is set last;
  where a stream has had no credit before its release, it waits for its *turn*.  (To have received
  a put that needed the release is not enough: it says that one rank's word was set, while those of
  others may still be under way.)

All flags have the workspace's slots, so that each slot is a domain of its own: what is waited for
is always what the slot's last use signalled, whatever the other slots are at.

Release goes to all ranks, not only to those that wrote in this call, because the next call on the
workspace may be another schedule with other writers.  A transport without signals has collectives
alone, which synchronise by themselves: there, credits and releases are left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from stretto.schedules.language.buffers import Buffer, DType, Flag, FlagRef
from stretto.schedules.language.capabilities import Capabilities, CollectiveKind
from stretto.schedules.language.errors import InvalidInput, ProgramError, Unsupported
from stretto.schedules.language.expressions import (
    SELF,
    Block,
    Epoch,
    Extent,
    Peer,
)
from stretto.schedules.language.handles import (
    BufferHandle,
    Event,
    FlagHandle,
    Region,
    Stream,
    ThisRank,
)
from stretto.schedules.language.operations import (
    Collective,
    Copy,
    Fill,
    Gemm,
    Opaque,
    OperationBase,
    Put,
    Reduce,
    RowOp,
    Signal,
    Tags,
    Wait,
)
from stretto.schedules.language.program import Body, Operation, Phase, Program

__all__ = ["RankBuilder", "Schedule"]

MAX_SIZE = 2**31 - 1
"""Largest m, n, k and world size accepted: beyond it indices of common libraries overflow."""


class Schedule(ABC):
    """A way to do one layer's compute and communication, for any world size and shape.

    Subclasses say what the buffers of the caller are (`declare`) and what a rank enqueues
    (`enqueue`).

    Parameters
    ----------
    world_size
        Number of ranks, at least 1.
    m
        Global rows, at least 1.
    n, k
        Columns of one rank's weight's output and input, at least 1.
    dtype
        Of inputs and outputs.
    capabilities
        Of the transport that will carry it.

    Raises
    ------
    InvalidInput
        For a size that cannot be.
    Unsupported
        From `build`, if the transport lacks what the schedule needs.
    """

    name: ClassVar[str]
    variant: ClassVar[str]
    computes: ClassVar[str | None] = None
    slots: ClassVar[int] = 2

    def __init__(
        self,
        *,
        world_size: int,
        m: int,
        n: int,
        k: int,
        dtype: DType = "bf16",
        capabilities: Capabilities,
    ) -> None:
        for what, size in (("world size", world_size), ("m", m), ("n", n), ("k", k)):
            if not isinstance(size, int) or not 1 <= size <= MAX_SIZE:
                raise InvalidInput(f"{what} is {size}; give a whole number from 1 to {MAX_SIZE}.")
        self.world_size, self.m, self.n, self.k = world_size, m, n, k
        self.dtype: DType = dtype
        self.capabilities = capabilities

    @abstractmethod
    def declare(self) -> tuple[Buffer, ...]:
        """Return the buffers of the caller."""

    @abstractmethod
    def enqueue(self, rank: RankBuilder) -> None:
        """Enqueue one call's operations of one rank."""

    def build(self) -> Program:
        """Return the Program of one call."""
        try:
            builders = [RankBuilder(self, index=None)]
            self.enqueue(builders[0])
        except _IndexAsked:
            builders = [RankBuilder(self, index=index) for index in range(self.world_size)]
            for builder in builders:
                self.enqueue(builder)
        # A rank that leaves a workspace alone releases it all the same: the next call counts on it.
        released = dict.fromkeys(name for builder in builders for name in builder.released)
        parts = [builder.finish(tuple(released)) for builder in builders]
        bodies = list(dict.fromkeys(part.body for part in parts))
        body_of = tuple(bodies.index(part.body) for part in parts) if len(bodies) > 1 else ()
        return Program(
            name=self.name,
            variant=self.variant,
            world_size=self.world_size,
            shape=(("m", self.m), ("n", self.n), ("k", self.k)),
            dtype=self.dtype,
            transport=self.capabilities.transport,
            buffers=_merged("buffer", [part.buffers for part in parts]),
            flags=_merged("flag", [part.flags for part in parts]),
            phases=(Phase("call", tuple(bodies), body_of),),
            computes=self.computes,
        )


class _IndexAsked(Exception):
    """The schedule asked for the rank's number while being traced for all ranks."""


@dataclass(frozen=True)
class _Traced:
    body: Body
    buffers: tuple[Buffer, ...]
    flags: tuple[Flag, ...]


def _merged(what: str, parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    merged: dict[str, Any] = {}
    for part in parts:
        for item in part:
            if merged.setdefault(item.name, item) != item:
                raise ProgramError(f"ranks declare {what} {item.name!r} differently")
    return tuple(merged.values())


class RankBuilder(ThisRank):
    """One rank's side of a schedule: arithmetic on ranks, buffers, streams, operations.

    ``rank + 1`` and ``rank - step`` are other ranks.  Every operation names its stream with
    ``on=`` and returns an `Event`.
    """

    def __init__(self, schedule: Schedule, *, index: int | None) -> None:
        self._schedule = schedule
        self._index = index
        self._buffers = {buffer.name: buffer for buffer in schedule.declare()}
        self._flags: dict[str, Flag] = {}
        self._streams: dict[str, Stream] = {}
        self._operations: list[Operation] = []
        self._counts: dict[str, int] = {}
        self._step: int | None = None
        self._credited: set[tuple[str, Peer, str]] = set()
        self._release_on: dict[str, Stream] = {}
        capabilities = schedule.capabilities
        self._has_flags = capabilities.lacks("signal") is None is capabilities.lacks("wait")

    # ---- ranks -------------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """The number of this rank; asking for it gives every rank a body of its own."""
        if self._index is None:
            raise _IndexAsked
        return self._index

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._schedule.world_size

    def steps(self) -> Iterator[int]:
        """Yield 1 .. world_size - 1 and tag what is enqueued meanwhile with the step."""
        for step in range(1, self.world_size):
            self._step = step
            yield step
        self._step = None

    # ---- buffers, flags, streams -------------------------------------------------------------

    def input(self, name: str) -> BufferHandle:
        """Return a declared input."""
        return self._declared(name, "input")

    def weight(self, name: str) -> BufferHandle:
        """Return a declared weight."""
        return self._declared(name, "weight")

    def output(self, name: str) -> BufferHandle:
        """Return a declared output."""
        return self._declared(name, "output")

    def workspace(
        self, name: str, *, rows: int, columns: int, dtype: DType | None = None
    ) -> BufferHandle:
        """Return a symmetric buffer of `rows` global rows (world_size equal blocks) x `columns`.

        It has the schedule's number of slots.
        """
        buffer = Buffer(
            name,
            "workspace",
            dtype or self._schedule.dtype,
            rows=Extent(rows, "padded"),
            columns=Extent(columns),
            kind="symmetric",
            slots=self._schedule.slots,
            reuse="release",
        )
        return BufferHandle(self._remember(self._buffers, buffer))

    def scratch(
        self, name: str, *, rows: Extent, columns: int, dtype: DType | None = None
    ) -> BufferHandle:
        """Return a buffer of this rank alone."""
        buffer = Buffer(
            name, "workspace", dtype or self._schedule.dtype, rows=rows, columns=Extent(columns)
        )
        return BufferHandle(self._remember(self._buffers, buffer))

    def flag(self, flag: Flag) -> FlagHandle:
        """Declare a flag of the schedule's own."""
        return FlagHandle(self._remember(self._flags, flag))

    def streams(self, *names: str) -> tuple[Stream, ...]:
        """Return the streams of these names; ``compute`` is the caller's."""
        return tuple(self._streams.setdefault(name, Stream(name)) for name in names)

    # ---- operations --------------------------------------------------------------------------

    def put(self, source: Region, *, to: Peer, into: Region, on: Stream) -> Event:
        """Push `source` into rank `to`'s `into`, and signal its arrival there.

        `into` is rows of a block of a workspace.  The credit is put before it where one is due.
        """
        to = to.within(self.world_size)
        signal = self._arrival(into, on=to)
        self._release_on[into.buffer.name] = on
        return self._add(
            Put,
            "put",
            on,
            shard=source.shard or SELF,
            source=source.view(),
            destination=into.view(on=to),
            signal=signal,
        )

    def wait(self, region: Region, *, on: Stream) -> Event:
        """Hold stream `on` until the rows of `region`, a block of a workspace, have arrived."""
        self._release_on.setdefault(region.buffer.name, on)
        return self._add(
            Wait, "wait", on, shard=region.shard, words=(self._arrival(region, on=SELF),)
        )

    def signal_words(self, *words: FlagRef, value: Epoch, on: Stream) -> Event:
        """Signal words of the schedule's own flags."""
        return self._add(Signal, "signal", on, words=self._tidied(words), value=value)

    def wait_words(self, *words: FlagRef, value: Epoch, on: Stream) -> Event:
        """Wait for words of the schedule's own flags."""
        return self._add(Wait, "wait", on, words=self._tidied(words), value=value)

    def collective(
        self, kind: CollectiveKind, source: Region, destination: Region, *, on: Stream
    ) -> Event:
        """Issue a library collective."""
        return self._add(
            Collective,
            kind,
            on,
            collective=kind,
            source=source.view(),
            destination=destination.view(),
        )

    def gemm(
        self,
        a: Region,
        b: Region,
        out: Region,
        *,
        on: Stream,
        accumulate: Region | None = None,
    ) -> Event:
        """Enqueue ``out = a @ b.T (+ accumulate)``."""
        return self._add(
            Gemm,
            "gemm",
            on,
            shard=out.shard,
            a=a.view(),
            b=b.view(),
            out=out.view(),
            accumulate=None if accumulate is None else accumulate.view(),
        )

    def row_op(
        self,
        function: str,
        inputs: tuple[Region, ...],
        outputs: tuple[Region, ...],
        *,
        on: Stream,
        flops_per_row: float = 0.0,
        bytes_per_row: float = 0.0,
        tables: tuple[Region, ...] = (),
        options: Mapping[str, float] | None = None,
    ) -> Event:
        """Enqueue work per token; see `RowOp`, and `language.row_operations` for known names."""
        return self._add(
            RowOp,
            function,
            on,
            function=function,
            inputs=tuple(region.view() for region in inputs),
            outputs=tuple(region.view() for region in outputs),
            flops_per_row=flops_per_row,
            bytes_per_row=bytes_per_row,
            tables=tuple(region.view() for region in tables),
            options=tuple(sorted((options or {}).items())),
        )

    def copy(self, source: Region, destination: Region, *, on: Stream) -> Event:
        """Copy within this rank."""
        return self._add(Copy, "copy", on, source=source.view(), destination=destination.view())

    def fill(self, destination: Region, number: float = 0.0, *, on: Stream) -> Event:
        """Set every element to one number."""
        return self._add(Fill, "fill", on, destination=destination.view(), number=number)

    def reduce(self, inputs: tuple[Region, ...], out: Region, *, on: Stream) -> Event:
        """Add rectangles of this rank."""
        return self._add(
            Reduce, "reduce", on, inputs=tuple(region.view() for region in inputs), out=out.view()
        )

    def opaque(
        self,
        function: str,
        inputs: tuple[Region, ...],
        outputs: tuple[Region, ...],
        *,
        flops: float,
        moved_bytes: float,
        on: Stream,
    ) -> Event:
        """Enqueue work known by its cost alone."""
        return self._add(
            Opaque,
            function,
            on,
            function=function,
            inputs=tuple(region.view() for region in inputs),
            outputs=tuple(region.view() for region in outputs),
            flops=flops,
            moved_bytes=moved_bytes,
        )

    def operation(self, operation: Operation) -> Event:
        """Enqueue an operation made by hand (a fused kernel)."""
        self._require(operation)
        pending = self._streams.setdefault(operation.stream, Stream(operation.stream)).take()
        self._credit(operation, self._streams[operation.stream])
        self._operations.append(
            replace(operation, after=tuple(dict.fromkeys((*operation.after, *pending))))
        )
        return Event(operation.id)

    # ---- the end -----------------------------------------------------------------------------

    @property
    def released(self) -> tuple[str, ...]:
        """Workspaces whose slot this rank has to release."""
        return tuple(self._release_on)

    def finish(self, released: tuple[str, ...]) -> _Traced:
        """Add the releases of these workspaces and return what was enqueued."""
        for name in released:
            self._release(name, self._release_on.get(name) or Stream("compute"))
        return _Traced(
            Body(tuple(self._operations)),
            tuple(self._buffers.values()),
            tuple(self._flags.values()),
        )

    def _release(self, workspace: str, stream: Stream) -> None:
        """Signal all ranks that this one no longer uses the slot of `workspace`."""
        flags = (f"{workspace}.arrived",)
        last: dict[str, str] = {}
        for operation in self._operations:
            views = (*operation.reads(), *operation.writes())
            own = any(view.buffer == workspace and view.on == SELF for view in views)
            waited = any(sync.word.flag.startswith(flags) for sync in operation.waits())
            if own or waited:
                last[operation.stream] = operation.id
        last.pop(stream.name, None)
        released = self._released(workspace)
        if (workspace, SELF, stream.name) not in self._credited:
            freed = Epoch(1, 1 - self._buffers[workspace].slots)
            turn = (FlagRef(released.name, SELF),)
            self._add(Wait, "turn", stream, words=turn, value=freed, note="release")
        stream.after(*(Event(id) for id in last.values()))
        words = tuple(
            FlagRef(released.name, SELF, Peer(offset % self.world_size))
            for offset in range(1, self.world_size + 1)  # the own word last: it ends the turn
        )
        self._add(Signal, "release", stream, words=words, note="release")

    def _credit(self, operation: Operation, stream: Stream) -> None:
        """Wait, where it is due, until the slots that `operation` writes are free again."""
        for view in operation.writes():
            buffer = self._buffers[view.buffer]
            if buffer.reuse != "release" or not self._has_flags:
                continue
            self._release_on.setdefault(buffer.name, stream)
            owners = [view.on]
            if isinstance(operation, Collective):
                owners = [Peer(offset) for offset in range(self.world_size)]
            due = [owner for owner in owners if self._needs_credit(buffer.name, owner, stream)]
            if due and self._needs_credit(buffer.name, SELF, stream):
                due.append(SELF)  # for the release at the end of the call
            if due:
                released = self._released(buffer.name)
                waiting = Wait(
                    id=self._name("credit"),
                    stream=stream.name,
                    words=tuple(FlagRef(released.name, owner) for owner in due),
                    value=Epoch(1, 1 - buffer.slots),
                    tags=Tags(step=self._step, note="credit"),
                )
                self._operations.append(waiting)

    def _needs_credit(self, workspace: str, owner: Peer, stream: Stream) -> bool:
        key = (workspace, owner, stream.name)
        if key in self._credited:
            return False
        self._credited.add(key)
        return True

    def _released(self, workspace: str) -> Flag:
        slots = self._buffers[workspace].slots
        flag = Flag(f"{workspace}.released", count=self.world_size, slots=slots)
        self._remember(self._flags, flag)
        return flag

    def _arrival(self, region: Region, *, on: Peer) -> FlagRef:
        """Return the word that says that the rows of `region` have arrived on rank `on`."""
        rows, buffer = region.rows, region.buffer
        if buffer.kind != "symmetric" or not isinstance(rows, Block):
            raise ProgramError(
                f"arrivals are known for blocks of a workspace, not for {buffer.name!r}; "
                "use a flag of your own"
            )
        name = f"{buffer.name}.arrived"
        if (rows.start, rows.stop) != (0, None):
            name += f"[{rows.start}:{'' if rows.stop is None else rows.stop}]"
        self._remember(self._flags, Flag(name, count=self.world_size, slots=buffer.slots))
        return FlagRef(name, rows.of.within(self.world_size), on)

    def _declared(self, name: str, role: str) -> BufferHandle:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.role != role:
            raise ProgramError(f"the schedule declares no {role} called {name!r}")
        return BufferHandle(buffer)

    def _remember(self, table: dict[str, Any], item: Any) -> Any:
        if table.setdefault(item.name, item) != item:
            raise ProgramError(f"{item.name!r} is declared twice, differently")
        return item

    def _tidied(self, words: tuple[FlagRef, ...]) -> tuple[FlagRef, ...]:
        return tuple(replace(word, on=word.on.within(self.world_size)) for word in words)

    def _add(
        self,
        cls: type[OperationBase],
        name: str,
        stream: Stream,
        *,
        shard: Peer | None = None,
        note: str | None = None,
        **fields: Any,
    ) -> Event:
        operation: Any = cls(
            id=self._name(name),
            stream=stream.name,
            after=stream.take(),
            tags=Tags(
                step=self._step,
                shard=None if shard is None else shard.within(self.world_size),
                note=note,
            ),
            **fields,
        )
        self._require(operation)
        self._credit(operation, stream)
        self._operations.append(operation)
        return Event(operation.id)

    def _name(self, prefix: str) -> str:
        number = self._counts.get(prefix, 0)
        self._counts[prefix] = number + 1
        return f"{prefix}{number}"

    def _require(self, operation: Operation) -> None:
        """Refuse, while building, what the transport cannot do."""
        capabilities, schedule = self._schedule.capabilities, self._schedule
        lacking = None
        if isinstance(operation, Collective):
            lacking = capabilities.lacks("collective", operation.collective)
        elif isinstance(operation, Put):
            lacking = capabilities.lacks("put")
            if lacking is None and operation.signal is not None:
                lacking = capabilities.lacks("signal")
                if lacking is None and not capabilities.signal_orders_puts:
                    lacking = f"a signal of transport {capabilities.transport!r} orders no put"
        elif isinstance(operation, (Signal, Wait)):
            lacking = capabilities.lacks("signal" if isinstance(operation, Signal) else "wait")
        if lacking is not None:
            push = isinstance(operation, Collective)
            instead = "a variant that pushes" if push else "--variant unfused"
            raise Unsupported(
                f"{schedule.name} --variant {schedule.variant} cannot be carried: {lacking}; "
                f"choose {instead}, or another --transport."
            )
