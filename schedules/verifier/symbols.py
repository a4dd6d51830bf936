"""Symbols for the numbers in memory, so that equal numbers have equal symbols.

A *value* is a symbol and a shift: element (i, j) of a rectangle is element (i + down, j + right) of
the matrix that the symbol stands for.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

__all__ = ["ONCE", "Symbols", "Value"]

ONCE = -1
"""In place of an execution: given before the first one, for all."""


class Value(NamedTuple):
    """A symbol, and where in its matrix a rectangle begins."""

    symbol: int
    down: int = 0
    right: int = 0

    def moved(self, down: int, right: int) -> Value:
        """Return the value as seen from a corner that lies so much further down and right."""
        return Value(self.symbol, self.down + down, self.right + right)


class Symbols:
    """Gives every matrix that occurs one number, whichever way it was come by."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._forms: list[tuple[Any, ...]] = []
        self._later: dict[tuple[int, int], Value] = {}
        self.zero = Value(self._number(("zero",)))

    def input(self, name: str, execution: int, rank: int | None) -> Value:
        """Return what the caller gave for an execution: to all ranks (by global row), or to one."""
        return Value(self._number(("input", name, execution, rank)))

    def constant(self, number: float) -> Value:
        """Return a matrix of one number."""
        return self.zero if number == 0 else Value(self._number(("constant", number)))

    def unknown(self, of: Hashable) -> Value:
        """Return a matrix of which nothing is known; all that is made of it is unknown, too."""
        return Value(self._number(("unknown", of)))

    def is_unknown(self, value: Value) -> bool:
        """Whether the value is `unknown`."""
        return bool(self._forms[value.symbol][0] == "unknown")

    def function(
        self, name: str, output: int, arguments: Hashable, values: Iterable[Value]
    ) -> Value:
        """Return an output of a named function; `values` are those among the arguments."""
        for value in values:
            if self.is_unknown(value):
                return value
        return Value(self._number(("function", name, output, arguments)))

    def has_place(self, value: Value) -> bool:
        """Whether the value differs from element to element."""
        return self._forms[value.symbol][0] not in ("zero", "constant")

    def moved(self, value: Value, down: int, right: int) -> Value:
        """Return `value` from another corner; what is the same everywhere has no place."""
        return value.moved(down, right) if self.has_place(value) else value

    def dot(self, a: Value, b: Value, start: int, length: int) -> Value:
        """Return ``a[:, start:start + length] @ b[:, start:start + length].T``."""
        for value in (a, b):
            if self.is_unknown(value):
                return value
        if length == 0 or self.zero.symbol in (a.symbol, b.symbol):
            return self.zero
        form = ("dot", a.symbol, start + a.right, b.symbol, start + b.right, length)
        return Value(self._number(form), a.down, b.down)

    def sum(self, values: Iterable[Value]) -> Value:
        """Return the sum; the order of addends does not matter, nor how a dot product was cut."""
        terms: list[Value] = []
        for value in values:
            form = self._forms[value.symbol]
            if form[0] == "unknown":
                return value
            if form[0] == "sum":
                terms += [self.moved(term, value.down, value.right) for term in form[1]]
            elif form[0] != "zero":
                terms.append(value)
        terms = sorted(self._joined(terms))
        if len(terms) < 2:
            return terms[0] if terms else self.zero
        placed = [term for term in terms if self._forms[term.symbol][0] != "constant"]
        down, right = placed[0][1:] if placed else (0, 0)
        form = ("sum", tuple(self.moved(term, -down, -right) for term in terms))
        return Value(self._number(form), down, right)

    def later(self, value: Value, executions: int) -> Value:
        """Return what stands in the place of `value` so many executions later."""
        key = (value.symbol, executions)
        if key not in self._later:
            self._later[key] = self._made_later(value.symbol, executions)
        return self.moved(self._later[key], value.down, value.right)

    def text(self, value: Value, rows: int, *, columns: bool = False) -> str:
        """Say in words what `rows` rows of a value are (or, with `columns`, all its rows)."""
        form = self._forms[value.symbol]
        match form:
            case ("input", name, execution, rank):
                whose = "" if rank is None else f" of rank {rank}"
                if columns:
                    return f"{name}{whose}"
                return f"{_rows(value.down, rows)} of {name}{whose} as of execution {execution}"
            case ("dot", a, _, b, _, _):
                left = self.text(Value(a, value.down), rows, columns=columns)
                return f"{left} times {self.text(Value(b), 0, columns=True)}"
            case ("sum", terms):
                texts = [
                    self.text(term.moved(value.down, 0), rows, columns=columns)
                    for term in terms[:3]
                ]
                return " + ".join(texts) + (" + ..." if len(terms) > 3 else "")
            case ("function", name, _, _):
                return f"{name}(...)"
            case ("constant", number):
                return f"the number {number}"
            case ("unknown", _):
                return "bytes nobody wrote"
        return "zeros"

    def _made_later(self, symbol: int, executions: int) -> Value:
        match self._forms[symbol]:
            case ("input", name, execution, rank) if execution != ONCE:
                return self.input(name, execution + executions, rank)
            case ("dot", a, start, b, other, length):
                left, right = Value(a, 0, start), Value(b, 0, other)
                return self.dot(
                    self.later(left, executions), self.later(right, executions), 0, length
                )
            case ("sum", terms):
                return self.sum(self.later(term, executions) for term in terms)
            case ("function", name, output, arguments):
                moved = self._all_later(arguments, executions)
                return Value(self._number(("function", name, output, moved)))
        return Value(symbol)

    def _all_later(self, arguments: Any, executions: int) -> Any:
        if isinstance(arguments, Value):
            return self.later(arguments, executions)
        if isinstance(arguments, tuple):
            return tuple(self._all_later(one, executions) for one in arguments)
        return arguments

    def _joined(self, terms: list[Value]) -> list[Value]:
        """Join dot products over adjoining parts of k."""
        joined: list[Value] = []
        parts: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for term in terms:
            form = self._forms[term.symbol]
            if form[0] != "dot":
                joined.append(term)
                continue
            _, a, start, b, other, length = form
            key = (a, b, other - start, term.down, term.right)
            parts.setdefault(key, []).append((start, length))
        for (a, b, shift, down, right), pieces in parts.items():
            pieces.sort()
            merged: list[tuple[int, int]] = []
            for start, length in pieces:
                if merged and sum(merged[-1]) == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((start, length))
            for start, length in merged:
                form = ("dot", a, start, b, start + shift, length)
                joined.append(Value(self._number(form), down, right))
        return joined

    def _number(self, form: tuple[Hashable, ...]) -> int:
        number = self._numbers.get(form)
        if number is None:
            number = self._numbers[form] = len(self._forms)
            self._forms.append(form)
        return number


def _rows(first: int, count: int) -> str:
    return f"row {first}" if count == 1 else f"rows {first} to {first + count - 1}"
