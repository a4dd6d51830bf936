"""How a schedule is written: `Schedule` and the `RankBuilder` that it enqueues on.

The builder traces `Schedule.enqueue` once with a symbolic rank.  What the schedule says relative
to its rank stays relative, so one body stands for all.  A schedule that asks for the rank's number
(``rank.index``) is traced once for every rank instead.

Slots, credits and epochs are the builder's business (`stretto.schedules.language.workspace` has the
protocol, and why it is enough):

* the workspace has two slots by default, used in turn by successive calls; all buffers that a
  schedule asks for with `RankBuilder.workspace` lie in them;
* a put into a workspace signals the arrival of its rows, and ``rank.wait(workspace[block])`` waits
  for that;
* before a stream first writes a rank's slot in a call comes a *credit*: a wait until that rank
  has released the slot's last use (a collective writes every rank's slot, its own included);
* at the end of a call every rank *releases* its slot to all ranks, by one signal after its last
  access to anything in it.  That must come after its own release of the slot's last use, which may
  be another schedule's on another stream, has reached all ranks.  So a credit is for the own word
  too, which is set last; where a stream has had no credit before its release, it waits for its
  *turn*.  (To have received a put that needed the release is not enough: it says that one rank's
  word was set, while those of others may still be under way.)

All flags have the workspace's slots, so that each slot is a domain of its own: what is waited for
is always what the slot's last use signalled, whatever the other slots are at.

Release goes to all ranks, not only to those that wrote in this call, because the next call on the
workspace may be another schedule with other writers.  A transport without signals has collectives
alone, which synchronise by themselves: there, credits and releases are left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

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
from stretto.schedules.language.workspace import arrival_flag, in_slot, release_flag

__all__ = ["RankBuilder", "Schedule"]

MAX_SIZE = 2**31 - 1
"""Largest size and world size accepted: beyond it indices of common libraries overflow."""


class Schedule(ABC):
    """A way to do one layer's compute and communication, for any world size and shape.

    Subclasses say what the buffers of the caller are (`declare`) and what a rank enqueues
    (`enqueue`).

    Parameters
    ----------
    world_size
        Number of ranks, at least 1.
    dtype
        Of inputs and outputs.
    capabilities
        Of the transport that will carry it.
    **sizes
        What `sizes` declares, each at least 1.  By convention m are global rows, n and k columns
        of one rank's weight's output and input.

    Attributes
    ----------
    sizes
        Names of the sizes that a shape consists of.
    slots
        Of the workspace.

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
    sizes: ClassVar[tuple[str, ...]] = ("m", "n", "k")
    slots: ClassVar[int] = 2

    m: int
    n: int
    k: int

    def __init__(
        self,
        *,
        world_size: int,
        dtype: DType = "bf16",
        capabilities: Capabilities,
        **sizes: int,
    ) -> None:
        missing = [name for name in self.sizes if name not in sizes]
        unknown = [name for name in sizes if name not in self.sizes]
        if missing or unknown:
            raise InvalidInput(
                f"{self.name} {self.variant} has the sizes {', '.join(self.sizes)}; "
                + (f"give {missing[0]}." if missing else f"leave {unknown[0]} out.")
            )
        for what, size in (("world size", world_size), *sizes.items()):
            if not isinstance(size, int) or not 1 <= size <= MAX_SIZE:
                raise InvalidInput(f"{what} is {size}; give a whole number from 1 to {MAX_SIZE}.")
        self.world_size = world_size
        self.size = {name: sizes[name] for name in self.sizes}
        for name in ("m", "n", "k"):
            if name in self.size:
                setattr(self, name, self.size[name])
        self.dtype: DType = dtype
        self.capabilities = capabilities

    @abstractmethod
    def declare(self) -> tuple[Buffer, ...]:
        """Return the buffers of the caller."""

    @abstractmethod
    def enqueue(self, rank: RankBuilder) -> None:
        """Enqueue one call's operations of one rank; `RankBuilder.phase` says of which phase."""

    def phases(self) -> tuple[tuple[str, int], ...]:
        """Return names and numbers of calls of the phases, in their order (layers that differ)."""
        return (("call", 1),)

    def build(self) -> Program:
        """Return the Program of one execution."""
        traced = [(name, repeats, self._traced(name)) for name, repeats in self.phases()]
        builders = [builder for _, _, ranks in traced for builder in ranks]
        # A rank that leaves the workspace alone in a call releases its slot all the same: the next
        # call counts on it.
        released = any(builder.uses_slot for builder in builders)
        for builder in builders:
            builder.finish(release=released)
        phases = []
        for name, repeats, ranks in traced:
            bodies = list(dict.fromkeys(builder.body for builder in ranks))
            body_of = tuple(bodies.index(one.body) for one in ranks) if len(bodies) > 1 else ()
            phases.append(Phase(name, tuple(bodies), body_of, repeats))
        return Program(
            name=self.name,
            variant=self.variant,
            world_size=self.world_size,
            shape=tuple(self.size.items()),
            dtype=self.dtype,
            transport=self.capabilities.transport,
            buffers=_merged("buffer", [tuple(one.buffers.values()) for one in builders]),
            flags=_merged("flag", [tuple(one.flags.values()) for one in builders]),
            phases=tuple(phases),
            computes=self.computes,
        )

    def _traced(self, phase: str) -> list[RankBuilder]:
        """Return one builder for all ranks, or one each if the schedule asks for the rank."""
        try:
            builders = [RankBuilder(self, phase, index=None)]
            self.enqueue(builders[0])
        except _IndexAsked:
            builders = [RankBuilder(self, phase, index=index) for index in range(self.world_size)]
            for builder in builders:
                self.enqueue(builder)
        return builders


class _IndexAsked(Exception):
    """The schedule asked for the rank's number while being traced for all ranks."""


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

    def __init__(self, schedule: Schedule, phase: str, *, index: int | None) -> None:
        self._schedule, self._phase = schedule, phase
        self._index = index
        self.buffers = {buffer.name: buffer for buffer in schedule.declare()}
        self.flags: dict[str, Flag] = {}
        self._streams: dict[str, Stream] = {}
        self._operations: list[Operation] = []
        self._counts: dict[str, int] = {}
        self._step: int | None = None
        self._credited: set[tuple[Peer, str]] = set()
        self._release_on: Stream | None = None
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

    @property
    def phase(self) -> str:
        """Name of the phase that is being enqueued (`Schedule.phases`)."""
        return self._phase

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
        self,
        name: str,
        *,
        rows: int,
        columns: int,
        dtype: DType | None = None,
        layout: Literal["padded", "exchange"] = "padded",
    ) -> BufferHandle:
        """Return a symmetric buffer in the workspace's slot.

        Parameters
        ----------
        name
            Unique in the schedule; ask for it with the same arguments in all phases.
        rows
            Global rows.  ``padded``: world_size equal blocks of them.  ``exchange``: world_size
            blocks at equal steps, each as long as the block of the rank that stores it.
        columns
            Of every row.
        dtype
            The schedule's, if None.
        layout
            See `Extent`.
        """
        buffer = Buffer(
            name,
            "workspace",
            dtype or self._schedule.dtype,
            rows=Extent(rows, layout),
            columns=Extent(columns),
            kind="symmetric",
            slots=self._schedule.slots,
            reuse="release",
        )
        return BufferHandle(self._remember(self.buffers, buffer))

    def scratch(
        self,
        name: str,
        *,
        rows: Extent,
        columns: int,
        dtype: DType | None = None,
        slots: int = 1,
    ) -> BufferHandle:
        """Return a buffer of this rank alone, with slots that successive calls use in turn."""
        buffer = Buffer(
            name,
            "workspace",
            dtype or self._schedule.dtype,
            rows=rows,
            columns=Extent(columns),
            slots=slots,
        )
        return BufferHandle(self._remember(self.buffers, buffer))

    def flag(self, flag: Flag) -> FlagHandle:
        """Declare a flag of the schedule's own."""
        return FlagHandle(self._remember(self.flags, flag))

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
        self._release_on = on
        return self._add(
            Put,
            "put",
            on,
            shard=source.shard or SELF,
            source=source.view(),
            destination=into.view(on=to),
            signal=signal,
        )

    def signal(self, region: Region, *, to: Peer, on: Stream) -> Event:
        """Tell rank `to` that the rows of its `region` have come, by stores enqueued before."""
        to = to.within(self.world_size)
        word = self._arrival(region, on=to)
        self._release_on = on
        return self._add(Signal, "signal", on, shard=region.shard, words=(word,))

    def wait(self, region: Region, *, on: Stream) -> Event:
        """Hold stream `on` until the rows of `region`, a block of a workspace, have arrived."""
        self._release_on = self._release_on or on
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
        to: Peer = SELF,
        accumulator: DType = "fp32",
    ) -> Event:
        """Enqueue ``out = a @ b.T (+ accumulate)``.

        Parameters
        ----------
        a, b, out
            [m, k], [n, k] and [m, n].
        on
            The stream.
        accumulate
            [m, n], added before the one rounding to out's dtype.
        to
            Whose `out` is written, by stores of the kernel; `signal` then tells that rank.
        accumulator
            dtype of the sums.
        """
        return self._add(
            Gemm,
            "gemm",
            on,
            shard=out.shard,
            a=a.view(),
            b=b.view(),
            out=out.view(on=to.within(self.world_size)),
            accumulate=None if accumulate is None else accumulate.view(),
            accumulator=accumulator,
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
    def uses_slot(self) -> bool:
        """Whether this rank has to release its slot of the workspace."""
        return self._release_on is not None

    @property
    def body(self) -> Body:
        """What was enqueued."""
        return Body(tuple(self._operations))

    def finish(self, *, release: bool) -> None:
        """Enqueue the release, if the schedule's ranks release their slots."""
        if release:
            self._release(self._release_on or Stream("compute"))

    def _release(self, stream: Stream) -> None:
        """Signal all ranks that this one no longer uses its slot of the workspace."""
        last: dict[str, str] = {}
        for operation in self._operations:
            views = (*operation.reads(), *operation.writes())
            own = any(in_slot(self.buffers[view.buffer]) and view.on == SELF for view in views)
            waited = any(
                self.flags[sync.word.flag].purpose == "arrival" for sync in operation.waits()
            )
            if own or waited:
                last[operation.stream] = operation.id
        last.pop(stream.name, None)
        if (SELF, stream.name) not in self._credited:
            turn = (FlagRef(self._released().name, SELF),)
            self._add(Wait, "turn", stream, words=turn, value=self._freed, note="release")
        stream.after(*(Event(id) for id in last.values()))
        words = tuple(
            FlagRef(self._released().name, SELF, Peer(offset % self.world_size))
            for offset in range(1, self.world_size + 1)  # the own word last: it ends the turn
        )
        self._add(Signal, "release", stream, words=words, note="release")

    @property
    def _freed(self) -> Epoch:
        """What a word of release has reached once the slot's last use is over."""
        return Epoch(1, 1 - self._schedule.slots)

    def _credit(self, operation: Operation, stream: Stream) -> None:
        """Wait, where it is due, until the slots that `operation` writes are free again."""
        owners = [view.on for view in operation.writes() if in_slot(self.buffers[view.buffer])]
        if not owners or not self._has_flags:
            return
        self._release_on = self._release_on or stream
        if isinstance(operation, Collective):
            owners = [Peer(offset) for offset in range(self.world_size)]
        due = [owner for owner in dict.fromkeys(owners) if self._needs_credit(owner, stream)]
        if due and self._needs_credit(SELF, stream):
            due.append(SELF)  # for the release at the end of the call
        if due:
            waiting = Wait(
                id=self._name("credit"),
                stream=stream.name,
                words=tuple(FlagRef(self._released().name, owner) for owner in due),
                value=self._freed,
                tags=Tags(step=self._step, note="credit"),
            )
            self._operations.append(waiting)

    def _needs_credit(self, owner: Peer, stream: Stream) -> bool:
        key = (owner, stream.name)
        if key in self._credited:
            return False
        self._credited.add(key)
        return True

    def _released(self) -> Flag:
        flag: Flag = self._remember(self.flags, release_flag(self.world_size, self._schedule.slots))
        return flag

    def _arrival(self, region: Region, *, on: Peer) -> FlagRef:
        """Return the word that says that the rows of `region` have arrived on rank `on`."""
        rows, buffer = region.rows, region.buffer
        if not in_slot(buffer) or not isinstance(rows, Block):
            raise ProgramError(
                f"arrivals are known for blocks of a workspace, not for {buffer.name!r}; "
                "use a flag of your own"
            )
        if (rows.start, rows.stop) != (0, None):
            raise ProgramError(
                f"arrivals are known for whole blocks and for their chunks, not for rows of "
                f"{buffer.name!r}; cut them with .chunk(number, of=count)"
            )
        flag = arrival_flag(buffer.name, rows.chunk, self.world_size, buffer.slots)
        self._remember(self.flags, flag)
        return FlagRef(flag.name, rows.of.within(self.world_size), on)

    def _declared(self, name: str, role: str) -> BufferHandle:
        buffer = self.buffers.get(name)
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
        elif isinstance(operation, Gemm):
            self._require_gemm(operation)
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

    def _require_gemm(self, operation: Gemm) -> None:
        """Refuse a GEMM whose output no provider can write."""
        capabilities = self._schedule.capabilities
        operands = self.buffers[operation.a.buffer].dtype
        out = self.buffers[operation.out.buffer].dtype
        lacking = None
        if operation.out.on != SELF and "store" not in capabilities.kernel_access:
            lacking = (
                f"no kernel can store into a peer's memory over transport "
                f"{capabilities.transport!r}; compute into a local buffer and put it"
            )
        elif operation.accumulator != "fp32":
            lacking = f"no GEMM here accumulates in {operation.accumulator}; leave it at fp32"
        elif out != operands and (operands, out) not in capabilities.gemm_outputs:
            lacking = (
                f"no GEMM here stores {out} from operands of {operands}; give its output the "
                "operands' dtype"
            )
        if lacking is not None:
            raise Unsupported(
                f"{self._schedule.name} --variant {self._schedule.variant}, operation "
                f"{operation.id}: {lacking}, or choose another --transport."
            )
