"""Verification before first use, once for each class of shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from stretto.schedules.language import Block, Buffer, Extent, FusedGemm, Program, Unsafe, Whole
from stretto.schedules.verifier.checker import verify
from stretto.schedules.verifier.verdict import Verdict

__all__ = ["verified"]

_KEPT = 256
"""Verdicts that are remembered."""


def verified(program: Program, *, alone: bool = False) -> None:
    """Do nothing if the Program is safe; what was found is remembered for its class of shapes.

    Programs of one class differ in sizes alone, and not in which ranks have rows, a full block or
    a short one.  Where a Program names rows by number its sizes are its class.

    Parameters
    ----------
    program
        What is about to be run.
    alone
        Whether nobody else will use its workspace.

    Raises
    ------
    Unsafe
        If it may race, hang or read what nobody wrote; the message names the operations.
    """
    verdict = _verdict(_ShapeClass(program), alone)
    if not verdict.safe:
        first, *others = verdict.errors
        more = f" ({len(others)} more)" if others else ""
        raise Unsafe(
            f"{program.name} {program.variant} at TP{program.world_size} is not safe to run: "
            f"{first.message}{more} See the evidence with stretto verify, or run it unverified "
            "with --no-verify."
        )


@lru_cache(maxsize=_KEPT)
def _verdict(shapes: _ShapeClass, alone: bool) -> Verdict:
    return verify(shapes.program, alone=alone)


@dataclass(frozen=True, eq=False)
class _ShapeClass:
    """A Program that is equal to others of its class."""

    program: Program

    @cached_property
    def key(self) -> tuple[object, ...]:
        """What the class's Programs have in common."""
        program = self.program
        operations = [
            operation
            for phase in program.phases
            for body in phase.bodies
            for operation in body.operations
        ]
        views = [view for one in operations for view in (*one.reads(), *one.writes())]
        exact = any(isinstance(one, FusedGemm) for one in operations) or not all(
            _scales(view.rows) and _scales(view.columns) for view in views
        )
        cut = {(view.buffer, 0) for view in views if isinstance(view.rows, Block)}
        cut |= {(view.buffer, 1) for view in views if isinstance(view.columns, Block)}

        def size(buffer: Buffer, axis: int) -> object:
            extent = (buffer.rows, buffer.columns)[axis]
            if exact:
                return extent
            if extent.layout == "full" and (buffer.name, axis) not in cut:
                return extent.layout, extent.size > 0
            return _pattern(extent, program.world_size)

        return (
            program.world_size,
            program.computes,
            program.caller_stream,
            program.phases,
            program.flags,
            tuple(
                (
                    buffer.name,
                    buffer.role,
                    buffer.kind,
                    buffer.slots,
                    buffer.initial,
                    buffer.reuse,
                    size(buffer, 0),
                    size(buffer, 1),
                )
                for buffer in program.buffers
            ),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ShapeClass) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _scales(interval: object) -> bool:
    """Whether an interval means the same part of an axis of any size."""
    if isinstance(interval, Block):
        return (interval.start, interval.stop, interval.chunks) == (0, None, 1)
    return isinstance(interval, Whole)


def _pattern(extent: Extent, world_size: int) -> tuple[object, ...]:
    """Return which blocks of an axis are full, short or empty."""
    block = extent.block(world_size)
    valid = [extent.valid(rank, world_size) for rank in range(world_size)]
    return (
        extent.layout,
        *("empty" if rows == 0 else "full" if rows == block else "short" for rows in valid),
    )
