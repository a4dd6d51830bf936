"""The operations of a Program, one frozen dataclass each.

Every operation has a stable ``id``, a FIFO ``stream``, ``after`` edges to operations enqueued
before it (events between streams) and ``tags`` for reports.  What it touches is asked through
four methods (`reads`, `writes`, `signals`, `waits`), so that the verifier, the interpreter, the
simulator and the lowering need no table of kinds to find out about dependencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from stretto.schedules.language.buffers import DType, FlagRef, View
from stretto.schedules.language.expressions import FORBID_EXTRA, Epoch, Peer

__all__ = [
    "COMMUNICATION_KINDS",
    "COMPUTE_KINDS",
    "Collective",
    "Copy",
    "Fill",
    "Gemm",
    "Opaque",
    "OperationBase",
    "Put",
    "Reduce",
    "RowOp",
    "Signal",
    "Sync",
    "Tags",
    "Wait",
]

COMPUTE_KINDS = frozenset(
    {
        "gemm",
        "row_op",
        "opaque",
        "copy",
        "fill",
        "reduce",
        "gather_gemm",
        "gemm_reduce_scatter",
        "gemm_all_reduce",
    }
)
"""Kinds whose span is compute of the rank that runs it."""

COMMUNICATION_KINDS = frozenset({"put", "collective"})
"""Kinds whose span moves bytes between ranks (a signal is four bytes, a wait is idleness)."""


class Sync(NamedTuple):
    """One word and the value that a signal leaves in it, or that a wait expects."""

    word: FlagRef
    value: Epoch


@dataclass(frozen=True, slots=True)
class Tags:
    """What an operation belongs to; reports and figures use it, execution does not.

    Attributes
    ----------
    step
        Round of a ring or of a push schedule.
    shard
        Whose rows it works on.
    layer
        Layer of a stack.
    note
        Free text, such as ``credit`` or ``release``.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    step: int | None = None
    shard: Peer | None = None
    layer: int | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationBase:
    """What all operations share.

    Attributes
    ----------
    id
        Unique in its body, the same in every build of the same schedule.
    stream
        The FIFO queue that runs it.
    after
        Ids of operations, enqueued before this one, that must have ended.
    tags
        For reports.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    id: str
    stream: str
    after: tuple[str, ...] = ()
    tags: Tags = Tags()

    @property
    def kind(self) -> str:
        """The operation's kind, as in its JSON form (``put``, ``gemm``, ...)."""
        return self.op  # type: ignore[attr-defined,no-any-return]

    def reads(self) -> tuple[View, ...]:
        """Return the rectangles that it reads."""
        return ()

    def writes(self) -> tuple[View, ...]:
        """Return the rectangles that it writes."""
        return ()

    def signals(self) -> tuple[Sync, ...]:
        """Return the words that it signals when it ends, with the values."""
        return ()

    def waits(self) -> tuple[Sync, ...]:
        """Return the words that it waits for before it starts, with the values."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Put(OperationBase):
    """Copy a local rectangle into a peer's symmetric buffer, then signal if asked to.

    An empty rectangle moves nothing and signals all the same.  `mode` ``add`` accumulates; only
    a fused kernel can do that, so a Program never names it as an operation of its own.
    """

    source: View
    destination: View
    signal: FlagRef | None = None
    value: Epoch = Epoch()
    mode: Literal["set", "add"] = "set"
    op: Literal["put"] = "put"

    def reads(self) -> tuple[View, ...]:
        return (self.source,)

    def writes(self) -> tuple[View, ...]:
        return (self.destination,)

    def signals(self) -> tuple[Sync, ...]:
        return () if self.signal is None else (Sync(self.signal, self.value),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal(OperationBase):
    """Set (epoch), add to (counter) or fill (mailbox) one or more words."""

    words: tuple[FlagRef, ...]
    value: Epoch = Epoch()
    op: Literal["signal"] = "signal"

    def signals(self) -> tuple[Sync, ...]:
        return tuple(Sync(word, self.value) for word in self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(OperationBase):
    """Hold the stream until every word (of this rank) has reached the value."""

    words: tuple[FlagRef, ...]
    value: Epoch = Epoch()
    op: Literal["wait"] = "wait"

    def waits(self) -> tuple[Sync, ...]:
        return tuple(Sync(word, self.value) for word in self.words)

    @property
    def is_credit(self) -> bool:
        """Whether it waits for epochs of earlier calls only, and for nothing of its own call."""
        return not self.after and self.value.stride >= 1 and self.value.offset <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(OperationBase):
    """One library collective over all ranks, which all issue it in the same order.

    ``all_gather``: source is this rank's block, destination all blocks.  ``reduce_scatter``:
    source is a full matrix of addends, destination this rank's block of their sum.
    ``all_reduce``: both full.
    """

    collective: Literal["all_gather", "reduce_scatter", "all_reduce"]
    source: View
    destination: View
    op: Literal["collective"] = "collective"

    def reads(self) -> tuple[View, ...]:
        return (self.source,)

    def writes(self) -> tuple[View, ...]:
        return (self.destination,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm(OperationBase):
    """``out[m, n] = a[m, k] @ b[n, k].T``, plus ``accumulate[m, n]`` if given.

    The sums are of dtype `accumulator` and rounded once to that of `out`, whose buffer may have
    another dtype than the operands'.  `out` may lie on another rank: then the kernel stores into
    the peer's symmetric memory.
    """

    a: View
    b: View
    out: View
    accumulate: View | None = None
    accumulator: DType = "fp32"
    op: Literal["gemm"] = "gemm"

    def reads(self) -> tuple[View, ...]:
        return (self.a, self.b) if self.accumulate is None else (self.a, self.b, self.accumulate)

    def writes(self) -> tuple[View, ...]:
        return (self.out,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOp(OperationBase):
    """Work per token: its cost goes with the rows, rows do not mix.

    Attributes
    ----------
    function
        Name of what is done.  `stretto.schedules.language.row_operations` has a table of known
        names; any other is simulated by the cost stated here, interpreted by a function that the
        caller gives, and refused by name where a Program is run for real.
    inputs, outputs
        Rectangles with equal row counts.
    flops_per_row, bytes_per_row
        For the cost model; 0 stands for what the table says.
    tables
        Rectangles that are read whole, whatever the row: a norm's weight [1, n].
    options
        Names and numbers, sorted by name: ``(("eps", 1e-6),)``.
    """

    function: str
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    flops_per_row: float = 0.0
    bytes_per_row: float = 0.0
    tables: tuple[View, ...] = ()
    options: tuple[tuple[str, float], ...] = ()
    op: Literal["row_op"] = "row_op"

    def reads(self) -> tuple[View, ...]:
        return (*self.inputs, *self.tables)

    def writes(self) -> tuple[View, ...]:
        return self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(OperationBase):
    """Copy a rectangle to another one of this rank."""

    source: View
    destination: View
    op: Literal["copy"] = "copy"

    def reads(self) -> tuple[View, ...]:
        return (self.source,)

    def writes(self) -> tuple[View, ...]:
        return (self.destination,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill(OperationBase):
    """Set every element of a rectangle to one number."""

    destination: View
    number: float = 0.0
    op: Literal["fill"] = "fill"

    def writes(self) -> tuple[View, ...]:
        return (self.destination,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce(OperationBase):
    """``out = sum(inputs)``, element by element, added in the given order in fp32, rounded once.

    In fp64 if the operands are fp64.
    """

    inputs: tuple[View, ...]
    out: View
    op: Literal["reduce"] = "reduce"

    def reads(self) -> tuple[View, ...]:
        return self.inputs

    def writes(self) -> tuple[View, ...]:
        return (self.out,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque(OperationBase):
    """Work known by its cost alone: an attention core, the experts."""

    function: str
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    flops: float
    moved_bytes: float
    op: Literal["opaque"] = "opaque"

    def reads(self) -> tuple[View, ...]:
        return self.inputs

    def writes(self) -> tuple[View, ...]:
        return self.outputs
