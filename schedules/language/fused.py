"""Fused kernels: a GEMM whose tiles wait for their rows, or send their results, themselves.

They are no black boxes.  A fused operation states its tiles, the order in which resident workers
take them, how many streaming multiprocessors communication holds, and for every *group* of tiles
its gates (words that must be reached before a tile of the group may start) and what it emits when
all its tiles are done.  `parts` writes that out as the plain operations it stands for, group by
group; the verifier, the interpreter and the simulator read it so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from stretto.schedules.language.buffers import FlagRef, View
from stretto.schedules.language.expressions import FORBID_EXTRA, Epoch
from stretto.schedules.language.operations import (
    Gemm,
    OperationBase,
    Put,
    Signal,
    Sync,
    Wait,
)

__all__ = [
    "Emit",
    "FusedGemm",
    "Gate",
    "GatherGemm",
    "GemmAllReduce",
    "GemmReduceScatter",
    "TileGroup",
    "TileOrder",
    "Tiling",
]


@dataclass(frozen=True, slots=True)
class TileOrder:
    """A named order of tiles with its parameters, so that it is a rule and not a list.

    ``row_major`` and ``column_major`` run through the groups in their order; ``grouped`` takes
    `width` tile rows at a time (L2 reuse); ``ring`` starts at this rank's own rows.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    name: Literal["row_major", "column_major", "grouped", "ring"] = "row_major"
    width: int = 1


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a fused kernel is cut and staffed.

    Attributes
    ----------
    tile_m, tile_n
        Output tile, in elements.
    order
        The order in which workers take tiles.
    workers
        Resident workers (thread blocks) that compute; each takes the next tile in order.
    communication_sms
        Streaming multiprocessors held by communication warps while the kernel runs.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    tile_m: int
    tile_n: int
    workers: int
    order: TileOrder = TileOrder()
    communication_sms: int = 0


@dataclass(frozen=True, slots=True)
class Gate:
    """A word of this rank that must have reached a value before a tile of the group starts."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    word: FlagRef
    threshold: Epoch = Epoch()


@dataclass(frozen=True, slots=True)
class Emit:
    """What a group sends when its tiles are done.

    Attributes
    ----------
    source
        The rectangle that goes; None sends the signal alone.
    destination
        Where it goes (the view names the rank); None sends the signal alone.
    word, value
        What is signalled afterwards; None signals nothing.
    mode
        ``set`` stores, ``add`` accumulates into the destination.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    source: View | None = None
    destination: View | None = None
    word: FlagRef | None = None
    value: Epoch = Epoch()
    mode: Literal["set", "add"] = "set"


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles that share their gates: the output rectangle they fill, from which rows of `a`."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    a: View
    out: View
    gates: tuple[Gate, ...] = ()
    emits: tuple[Emit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGemm(OperationBase):
    """What the three fused kernels share: ``out = a @ b.T`` by groups of tiles.

    Attributes
    ----------
    b
        The weight, all groups share it.
    tiling
        Tile shape, order, workers.
    groups
        In the order in which tiles are taken.
    reduction
        How partial results are combined: ``none``, ``add`` (plain adds in the accumulator's
        dtype) or ``multimem`` (in the switch).
    accumulator
        dtype of partial sums.
    """

    b: View
    tiling: Tiling
    groups: tuple[TileGroup, ...]
    reduction: Literal["none", "add", "multimem"] = "none"
    accumulator: Literal["fp32", "bf16"] = "fp32"

    def reads(self) -> tuple[View, ...]:
        sent = (emit.source for group in self.groups for emit in group.emits)
        return (
            self.b,
            *(group.a for group in self.groups),
            *(view for view in sent if view is not None),
        )

    def writes(self) -> tuple[View, ...]:
        sent = (emit.destination for group in self.groups for emit in group.emits)
        return (
            *(group.out for group in self.groups),
            *(view for view in sent if view is not None),
        )

    def signals(self) -> tuple[Sync, ...]:
        return tuple(
            Sync(emit.word, emit.value)
            for group in self.groups
            for emit in group.emits
            if emit.word is not None
        )

    def waits(self) -> tuple[Sync, ...]:
        return tuple(
            Sync(gate.word, gate.threshold) for group in self.groups for gate in group.gates
        )

    def parts(self) -> Iterator[OperationBase]:
        """Yield the plain operations that this kernel stands for, in the order of its groups.

        They run on the kernel's stream, with ids ``<id>/<group>.<what>``.
        """
        after = self.after
        for number, group in enumerate(self.groups):
            name = f"{self.id}/{number}"
            common = {"stream": self.stream, "tags": self.tags}
            for index, gate in enumerate(group.gates):
                yield Wait(
                    id=f"{name}.gate{index}",
                    words=(gate.word,),
                    value=gate.threshold,
                    after=after,
                    **common,  # type: ignore[arg-type]
                )
                after = ()
            gemm = Gemm(id=f"{name}.gemm", a=group.a, b=self.b, out=group.out, **common)  # type: ignore[arg-type]
            yield replace(gemm, after=after)
            after = ()
            for index, emit in enumerate(group.emits):
                yield _emitted(f"{name}.emit{index}", emit, common)


def _emitted(id: str, emit: Emit, common: dict[str, object]) -> OperationBase:
    if emit.source is not None and emit.destination is not None:
        return Put(
            id=id,
            source=emit.source,
            destination=emit.destination,
            signal=emit.word,
            value=emit.value,
            mode=emit.mode,
            **common,  # type: ignore[arg-type]
        )
    words = () if emit.word is None else (emit.word,)
    return Signal(id=id, words=words, value=emit.value, **common)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherGemm(FusedGemm):
    """A GEMM over gathered rows whose tiles wait for the rows they need."""

    op: Literal["gather_gemm"] = "gather_gemm"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmReduceScatter(FusedGemm):
    """A GEMM whose tiles are summed over the ranks, each rank keeping its own rows."""

    op: Literal["gemm_reduce_scatter"] = "gemm_reduce_scatter"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmAllReduce(FusedGemm):
    """A GEMM whose tiles are summed over the ranks, every rank receiving the sum."""

    op: Literal["gemm_all_reduce"] = "gemm_all_reduce"
