"""What the functions that Programs name in `Program.computes` are, in symbols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from stretto.schedules.language import Program
from stretto.schedules.verifier.symbols import Symbols, Value

__all__ = ["FORMULAS", "Expected", "Formula"]


class Expected(NamedTuple):
    """What an output must hold on one rank, from its first row and column on."""

    buffer: str
    value: Value


InputOf = Callable[[str, int], Value]
"""What the caller gave, by buffer and rank."""

Formula = Callable[[Program, Symbols, InputOf, int], Expected]
"""Takes the rank whose output it is."""


def _all_gather_gemm(program: Program, symbols: Symbols, given: InputOf, rank: int) -> Expected:
    """``y = all_gather(x) @ w.T``."""
    k = program.buffer["w"].columns.size
    return Expected("y", symbols.dot(given("x", 0), given("w", rank), 0, k))


def _gemm_reduce_scatter(program: Program, symbols: Symbols, given: InputOf, rank: int) -> Expected:
    """``y = (sum over ranks of x @ w.T)``, this rank's rows of it."""
    total = _summed_gemm(program, symbols, given)
    return Expected("y", total.moved(rank * program.buffer["y"].rows.block(program.world_size), 0))


def _gemm_all_reduce(program: Program, symbols: Symbols, given: InputOf, rank: int) -> Expected:
    """``y = sum over ranks of x @ w.T``, all rows of it."""
    return Expected("y", _summed_gemm(program, symbols, given))


def _summed_gemm(program: Program, symbols: Symbols, given: InputOf) -> Value:
    k = program.buffer["w"].columns.size
    return symbols.sum(
        symbols.dot(given("x", rank), given("w", rank), 0, k) for rank in range(program.world_size)
    )


FORMULAS: Mapping[str, Formula] = {
    "all_gather_gemm": _all_gather_gemm,
    "gemm_all_reduce": _gemm_all_reduce,
    "gemm_reduce_scatter": _gemm_reduce_scatter,
}
"""By name; what is not here is not held against anything."""
