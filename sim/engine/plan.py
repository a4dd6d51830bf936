"""From a Program to what the engine runs: costs and dependencies, worked out before time starts.

A rank's call becomes a list of `Step`, one an operation, with its duration when alone, what it
shares, the steps it depends on, and the flag words it touches.  Costs depend on the rank through
short shards only, so steps are shared between ranks wherever they are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from stretto.schedules.language import (
    DTYPE_BYTES,
    ROW_OPERATIONS,
    Block,
    Body,
    Collective,
    Copy,
    Extent,
    Fill,
    FlagRef,
    FusedGemm,
    Gemm,
    Interval,
    Opaque,
    OperationBase,
    Peer,
    Program,
    Put,
    Reduce,
    RowOp,
    Signal,
    Sync,
    View,
    Wait,
    Whole,
)
from stretto.sim.engine.fluid import Resource
from stretto.sim.machine import Machine, TransportModel, Validity, worst

__all__ = ["Plan", "RankPlan", "Step", "SyncStep", "WordKey", "can_fold", "make_plan"]

WordKey = tuple[str, int, int]
"""Flag, home rank and position; the slot follows from the call."""


@dataclass(slots=True)
class SyncStep:
    """A word that a step signals or awaits."""

    key: WordKey
    slot: int
    slots: int
    stride: int
    offset: int
    kind: str


@dataclass(slots=True)
class Step:
    """One operation of one rank, ready to be timed.

    Attributes
    ----------
    index
        Its place in the enqueue order.
    activity
        ``none`` (no time of its own), ``compute``, ``put`` or ``collective``.
    alone_us
        Duration when nothing disturbs it.
    tail_us
        Time on the stream after that (the signal after a put).
    peer
        Of a put.
    weight
        What it consumes at full rate: GB/s of a put, cores of a computation on a CPU.
    wave_us
        Of a GEMM: the time of one wave of its tiles.
    polls
        Of a wait: whether it holds a multiprocessor until its signal comes.
    uses, disturbed
        Resources that may be crowded, and whether anything can change its rate.
    """

    index: int
    id: str
    kind: str
    activity: str
    alone_us: float = 0.0
    tail_us: float = 0.0
    peer: int | None = None
    weight: float = 0.0
    moved_bytes: int = 0
    flops: float = 0.0
    after: tuple[int, ...] = ()
    entry: bool = False
    signals: tuple[SyncStep, ...] = ()
    waits: tuple[SyncStep, ...] = ()
    validity: Validity = "measured"
    wave_us: float = 0.0
    polls: bool = False
    uses: tuple[tuple[Resource, float], ...] = ()
    disturbed: bool = False


@dataclass(slots=True)
class RankPlan:
    """One rank's side of one phase."""

    streams: dict[str, list[Step]]
    count: int
    last_of_caller: int | None
    exits: tuple[int, ...]


@dataclass(slots=True)
class Plan:
    """What the engine needs of a Program on a machine.

    Attributes
    ----------
    ranks
        Simulated ranks: all, or rank 0 standing for all.
    folded
        Whether rank 0 stands for all.
    phases
        For each phase, by rank.
    validity
        Of the least certain cost.
    ordered_words
        Flags whose signals must be applied in the order of time.
    collectives_beside_compute
        Whether a collective runs on another stream than computation does.
    """

    ranks: list[int]
    folded: bool
    phases: list[dict[int, RankPlan]]
    validity: Validity
    ordered_words: set[str] = field(default_factory=set)
    collectives_beside_compute: bool = False


def make_plan(
    program: Program, machine: Machine, transport: TransportModel, *, mode: str, fold: bool
) -> Plan:
    """Work out costs and dependencies of every rank, or of the one that stands for all."""
    ranks = [0] if fold else list(range(program.world_size))
    maker = _Maker(program, machine, transport, mode=mode, folded=fold)
    phases = []
    for phase in program.phases:
        phases.append({rank: maker.rank_plan(phase.body(rank), rank) for rank in ranks})
    streams = {"compute": set[str](), "collective": set[str]()}
    for rank_plans in phases:
        for rank_plan in rank_plans.values():
            for stream, steps in rank_plan.streams.items():
                for step in steps:
                    if step.activity in streams:
                        streams[step.activity].add(stream)
    return Plan(
        ranks,
        fold,
        phases,
        worst(maker.validities),
        _shared_words(phases, program),
        bool(streams["collective"]) and streams["compute"] != streams["collective"],
    )


def can_fold(program: Program) -> bool:
    """Whether one rank's times are every rank's.

    They are if one body stands for all, nothing names an absolute rank, and every axis that is cut
    into blocks is cut into equal ones.
    """
    if not program.symmetric:
        return False
    for phase in program.phases:
        for operation in phase.bodies[0].operations:
            if any(peer.absolute for peer in _peers(operation)):
                return False
            for view in (*operation.reads(), *operation.writes()):
                buffer = program.buffer[view.buffer]
                for extent, interval in (
                    (buffer.rows, view.rows),
                    (buffer.columns, view.columns),
                ):
                    cut = isinstance(interval, Block) or extent.layout == "shard"
                    if cut and extent.size % program.world_size:
                        return False
    return True


def _peers(operation: OperationBase) -> Iterator[Peer]:
    for view in (*operation.reads(), *operation.writes()):
        yield view.on
        for interval in (view.rows, view.columns):
            if isinstance(interval, Block):
                yield interval.of
    for sync in (*operation.signals(), *operation.waits()):
        yield sync.word.on
        if isinstance(sync.word.index, Peer):
            yield sync.word.index


def _shared_words(phases: list[dict[int, RankPlan]], program: Program) -> set[str]:
    """Return the flags whose signals must be applied in the order of time.

    Counters and mailboxes, and epoch words that more than one stream writes.
    """
    writers: dict[WordKey, set[tuple[int, str]]] = {}
    shared = {flag.name for flag in program.flags if flag.kind != "epoch"}
    for phase in phases:
        for rank, plan in phase.items():
            for stream, steps in plan.streams.items():
                for step in steps:
                    for sync in step.signals:
                        writers.setdefault(sync.key, set()).add((rank, stream))
    return shared | {key[0] for key, streams in writers.items() if len(streams) > 1}


class _Maker:
    """Makes steps; caches what ranks share."""

    def __init__(
        self,
        program: Program,
        machine: Machine,
        transport: TransportModel,
        *,
        mode: str,
        folded: bool,
    ) -> None:
        self.program, self.machine, self.transport = program, machine, transport
        self.folded = folded
        self.validities: list[Validity] = ["measured"]
        self.node_us = machine.host.enqueue_us("graph") if mode == "graph" else 0.0
        self.threads = 1.0
        if machine.cores is not None:
            self.threads = float(max(1, machine.cores // program.world_size))
        cores = machine.cores
        crowded = cores is not None and self.threads * program.world_size > cores
        self.contention = machine.host.contention if crowded else 1.0
        self._valid: dict[Extent, list[int]] = {}
        self._frames: dict[int, tuple[Body, _Frame]] = {}

    def rank_plan(self, body: Body, rank: int) -> RankPlan:
        frame = self._frame(body)
        streams: dict[str, list[Step]] = {stream: [] for stream in frame.streams}
        for place, operation in enumerate(frame.operations):
            step = self.step(operation, rank, place)
            step.after = frame.after[place]
            step.entry = place in frame.entries
            streams[operation.stream].append(step)
        return RankPlan(streams, len(frame.operations), frame.last_of_caller, frame.exits)

    def _frame(self, body: Body) -> _Frame:
        """Return what is the same on all ranks that share a body."""
        found = self._frames.get(id(body))
        if found is None:
            found = self._frames[id(body)] = (body, _frame_of(self.program, body))
        return found[1]

    def step(self, operation: OperationBase, rank: int, place: int) -> Step:
        step = Step(place, operation.id, operation.kind, "none")
        step.signals = tuple(self._sync(sync, rank, signal=True) for sync in operation.signals())
        step.waits = tuple(self._sync(sync, rank, signal=False) for sync in operation.waits())
        self._cost(step, operation, rank)
        step.alone_us += self.node_us
        self.validities.append(step.validity)
        return step

    def _cost(self, step: Step, operation: OperationBase, rank: int) -> None:
        if isinstance(operation, Put):
            self._cost_of_put(step, operation, rank)
        elif isinstance(operation, Signal):
            step.tail_us = self.transport.signal_us
        elif isinstance(operation, Wait):
            step.tail_us = self.transport.wait_us
            # A credit is waited for by the kernel that begins the call, before any GEMM of it.
            step.polls = not operation.is_credit
        elif isinstance(operation, Collective):
            self._cost_of_collective(step, operation, rank)
        else:
            step.activity = "compute"
            step.weight = self.threads
            self._cost_of_compute(step, operation, rank)
            step.alone_us *= self.contention

    def _cost_of_put(self, step: Step, operation: Put, rank: int) -> None:
        step.activity = "put"
        step.peer = operation.destination.on.of(rank, self.program.world_size)
        step.moved_bytes = self._bytes(operation.source, rank)
        if step.moved_bytes:
            step.alone_us, step.validity = self.transport.put(step.moved_bytes)
            step.weight = self.transport.put_rate_gb_per_s(step.moved_bytes)
        if operation.signal is not None:
            step.tail_us = self.transport.signal_us

    def _cost_of_collective(self, step: Step, operation: Collective, rank: int) -> None:
        full = operation.destination if operation.collective == "all_gather" else operation.source
        step.activity = "collective"
        step.moved_bytes = self._bytes(full, rank)
        estimate = self.transport.collective(
            operation.collective, step.moved_bytes, self.program.world_size
        )
        step.alone_us, step.validity = estimate.us, estimate.validity

    def _cost_of_compute(self, step: Step, operation: OperationBase, rank: int) -> None:
        if isinstance(operation, Gemm):
            (m, k), n = self._shape(operation.a, rank), self._shape(operation.out, rank)[1]
            estimate = self.machine.gemm(m, n, k, self.program.buffer[operation.a.buffer].dtype)
            step.alone_us, step.validity = estimate.us, estimate.validity
            measured_with = self.machine.host.gemm_threads
            if measured_with is not None and measured_with != self.threads:
                step.alone_us *= measured_with / self.threads
                step.validity = worst((step.validity, "extrapolated"))
            step.flops = 2.0 * m * n * k
            step.wave_us = step.alone_us / max(1, self.machine.gemm_waves(m, n))
        elif isinstance(operation, (Copy, Fill, Reduce)):
            moved = sum(
                self._bytes(view, rank) for view in (*operation.reads(), *operation.writes())
            )
            step.moved_bytes, step.alone_us = moved, self.machine.moved_us(moved)
        elif isinstance(operation, RowOp):
            rows = self._shape(operation.outputs[0], rank)[0] if operation.outputs else 0
            moved_by_rows = rows * operation.bytes_per_row
            step.flops = rows * operation.flops_per_row
            known = ROW_OPERATIONS.get(operation.function)
            if known is not None and rows:  # what is not stated is the table's
                views = (*operation.inputs, *operation.outputs)
                operands = [
                    (self._shape(view, rank)[1], self.program.buffer[view.buffer].dtype)
                    for view in views
                ]
                moved_by_rows = moved_by_rows or (
                    rows * known.bytes_per_row(operands)
                    + sum(self._bytes(view, rank) for view in operation.tables)
                )
                step.flops = step.flops or rows * known.flops_per_row(
                    operands[0][0], len(operation.inputs), dict(operation.options)
                )
                step.moved_bytes = int(moved_by_rows)
            step.alone_us = self.machine.moved_us(moved_by_rows)
        elif isinstance(operation, Opaque):
            step.flops = operation.flops
            step.alone_us = max(
                self.machine.moved_us(operation.moved_bytes),
                self.machine.flops_us(operation.flops, self.program.dtype),
            )

    def _shape(self, view: View, rank: int) -> tuple[int, int]:
        buffer = self.program.buffer[view.buffer]
        return (
            self._count(buffer.rows, view.rows, view.on, rank),
            self._count(buffer.columns, view.columns, view.on, rank),
        )

    def _count(self, extent: Extent, interval: Interval, on: Peer, rank: int) -> int:
        """Return how many elements of an axis are meant (a plan asks for this very often)."""
        if isinstance(interval, Whole) and extent.layout != "shard":
            return extent.size
        world_size = self.program.world_size
        valid = self._valid.get(extent)
        if valid is None:
            valid = [extent.valid(one, world_size) for one in range(world_size)]
            self._valid[extent] = valid
        if isinstance(interval, Whole):
            return valid[on.of(rank, world_size)]
        if (
            isinstance(interval, Block)
            and (interval.start, interval.stop, interval.chunks) == (0, None, 1)
            and extent.layout != "exchange"
        ):
            return valid[interval.of.of(rank, world_size)]
        owner = on.of(rank, world_size)
        start, stop = extent.resolve(interval, rank=rank, owner=owner, world_size=world_size)
        return stop - start

    def _bytes(self, view: View, rank: int) -> int:
        rows, columns = self._shape(view, rank)
        return rows * columns * DTYPE_BYTES[self.program.buffer[view.buffer].dtype]

    def _sync(self, sync: Sync, rank: int, *, signal: bool) -> SyncStep:
        """Resolve a word; when folded, a signal is that of the rank which signals rank 0."""
        word: FlagRef = sync.word
        flag = self.program.flag[word.flag]
        world_size = self.program.world_size
        by = (rank - word.on.offset) % world_size if self.folded and signal else rank
        index = word.index
        position = index if isinstance(index, int) else index.of(by, world_size)
        return SyncStep(
            (word.flag, word.on.of(by, world_size), position),
            word.slot,
            flag.slots,
            sync.value.stride,
            sync.value.offset,
            flag.kind,
        )


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a body is like on any rank: its plain operations and how they depend on each other."""

    operations: tuple[OperationBase, ...]
    streams: tuple[str, ...]
    after: tuple[tuple[int, ...], ...]
    entries: frozenset[int]
    exits: tuple[int, ...]
    last_of_caller: int | None


def _frame_of(program: Program, body: Body) -> _Frame:
    operations = tuple(_plain(body))
    index = {operation.id: place for place, operation in enumerate(operations)}
    ends = dict(index)
    begins = dict(index)
    for fused in body.operations:  # a fused kernel begins and ends with its parts
        if isinstance(fused, FusedGemm):
            parts = [part.id for part in fused.parts()]
            begins[fused.id], ends[fused.id] = index[parts[0]], index[parts[-1]]
    caller = [place for place, one in enumerate(operations) if one.stream == program.caller_stream]
    return _Frame(
        operations,
        tuple(dict.fromkeys(one.stream for one in operations)),
        tuple(tuple(ends[id] for id in one.after) for one in operations),
        frozenset([*(begins[id] for id in program.entries(body)), *caller[:1]]),
        tuple(ends[id] for id in program.exits(body)),
        caller[-1] if caller else None,
    )


def _plain(body: Body) -> Iterator[OperationBase]:
    """Yield the operations with fused kernels written out as their parts."""
    for operation in body.operations:
        if isinstance(operation, FusedGemm):
            yield from operation.parts()
        else:
            yield operation
