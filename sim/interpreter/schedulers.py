"""Who goes next: the schedulers of the interpreter, from fair to malicious.

The interpreter advances one *step* at a time: the begin of an operation, a part of its data, one
word of a signal, its end.  A scheduler picks among the steps that could be taken now, and says in
which *manner* an operation moves its data.  All of it is allowed by the contracts of the language:
a Program whose numbers depend on the scheduler has a race.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stretto.schedules.language import SpanKey

__all__ = [
    "HOSTILE",
    "PLAIN",
    "Chosen",
    "Delayed",
    "InOrder",
    "Manner",
    "Random",
    "Scheduler",
    "Step",
]


class Step(NamedTuple):
    """Something that could happen next.

    Attributes
    ----------
    order
        Number of the stream among all; steps are offered in this order.
    call, rank, stream, operation, kind
        What would make progress.  Work of the caller between calls has the kind ``caller``.
    landing
        Whether it is the data of a put that ended on its stream without having landed.
    """

    order: int
    call: int
    rank: int
    stream: str
    operation: str
    kind: str
    landing: bool = False

    @property
    def key(self) -> SpanKey:
        """The operation of that rank and call."""
        return SpanKey(self.call, self.rank, self.operation)


@dataclass(frozen=True, slots=True)
class Manner:
    """How an operation moves its data between its begin and its end.

    Attributes
    ----------
    reads
        Whether it reads everything when it begins, or nothing before it ends.
    scribbles
        Whether what it will write holds NaN from its begin on.
    by_rows
        Whether a put or a copy goes row by row, with steps of others in between.
    lands_late
        Whether the data of a put to another rank stay under way after its end, until a signal of
        the same stream needs them there.
    """

    reads: Literal["begin", "end"] = "begin"
    scribbles: bool = False
    by_rows: bool = False
    lands_late: bool = False


PLAIN = Manner()
"""Read when it begins, write when it ends."""

HOSTILE = Manner(reads="end", scribbles=True, lands_late=True)
"""Occupy the destination at once, and do the work only when it must be done."""


class Scheduler(ABC):
    """Decides what happens next; the same scheduler on the same Program decides the same."""

    def begin(self) -> None:
        """Forget everything; called once before an interpretation."""
        return

    @abstractmethod
    def pick(self, steps: Sequence[Step]) -> int:
        """Return the index of the step to take among `steps` (sorted by order, never empty)."""

    def manner(self, step: Step) -> Manner:
        """Return how the operation that `step` begins moves its data."""
        del step
        return PLAIN

    def ended(self, key: SpanKey) -> None:
        """Take note that an operation has ended."""
        return


class InOrder(Scheduler):
    """Fair and plain: every stream in turn.

    Parameters
    ----------
    manner
        Of every operation.
    """

    def __init__(self, manner: Manner = PLAIN) -> None:
        self._manner = manner
        self._last = -1

    def begin(self) -> None:
        self._last = -1

    def pick(self, steps: Sequence[Step]) -> int:
        position = bisect_left(steps, self._last + 1, key=lambda step: step.order)
        position %= len(steps)
        self._last = steps[position].order
        return position

    def manner(self, step: Step) -> Manner:
        return self._manner


class Random(Scheduler):
    """Streams have random priorities that change now and then; manners are random too.

    How often priorities change is random as well: from every step (an even shuffle) to almost
    never (some streams run as far as they can, others starve).

    Parameters
    ----------
    seed
        The same seed gives the same decisions.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.begin()

    def begin(self) -> None:
        self._random = random.Random(self._seed)
        self._change = self._random.choice((1.0, 0.2, 0.03, 0.003))
        self._priority: dict[int, float] = {}

    def pick(self, steps: Sequence[Step]) -> int:
        draw, priority = self._random.random, self._priority
        best, highest = 0, -1.0
        for position, step in enumerate(steps):
            value = priority.get(step.order)
            if value is None:
                value = priority[step.order] = draw()
            if value > highest:
                best, highest = position, value
        if draw() < self._change:
            priority[steps[best].order] = draw()
        return best

    def manner(self, step: Step) -> Manner:
        bits = self._random.getrandbits(4)
        return Manner(
            reads="end" if bits & 1 else "begin",
            scribbles=bool(bits & 2),
            by_rows=bool(bits & 4),
            lands_late=bool(bits & 8),
        )


class Delayed(Scheduler):
    """What is chosen makes progress only when nothing else can, and in the worst manner.

    A step is chosen if it fits every criterion that is given; with none given, nothing is.

    Parameters
    ----------
    ranks, streams, kinds, operations, calls
        Which steps; None does not restrict.
    among
        Decides between the others, and between the chosen when they alone are left.
    """

    def __init__(
        self,
        *,
        ranks: Collection[int] | None = None,
        streams: Collection[str] | None = None,
        kinds: Collection[str] | None = None,
        operations: Collection[str] | None = None,
        calls: Collection[int] | None = None,
        among: Scheduler | None = None,
    ) -> None:
        self._criteria = [
            (field, frozenset(wanted))
            for field, wanted in (
                ("rank", ranks),
                ("stream", streams),
                ("kind", kinds),
                ("operation", operations),
                ("call", calls),
            )
            if wanted is not None
        ]
        self._among = InOrder() if among is None else among

    def begin(self) -> None:
        self._among.begin()

    def pick(self, steps: Sequence[Step]) -> int:
        others = [position for position, step in enumerate(steps) if not self._delays(step)]
        if not others or len(others) == len(steps):
            return self._among.pick(steps)
        return others[self._among.pick([steps[position] for position in others])]

    def manner(self, step: Step) -> Manner:
        return HOSTILE if self._delays(step) else self._among.manner(step)

    def ended(self, key: SpanKey) -> None:
        self._among.ended(key)

    def _delays(self, step: Step) -> bool:
        return bool(self._criteria) and all(
            getattr(step, field) in wanted for field, wanted in self._criteria
        )


class Chosen(Scheduler):
    """Operations end in a given order, as far as the Program allows it.

    What is not in the sequence goes on meanwhile, as little as possible.  ``Chosen(result.trace)``
    repeats a run; a counterexample is replayed in the same way.

    Parameters
    ----------
    sequence
        Operations in the order in which they shall end.
    manner
        Of every operation.
    """

    def __init__(self, sequence: Sequence[tuple[int, int, str]], *, manner: Manner = PLAIN) -> None:
        self._sequence = [SpanKey(*key) for key in sequence]
        self._manner = manner
        self.begin()

    def begin(self) -> None:
        self._next = 0
        self._left = set(self._sequence)
        self._fair = InOrder()

    def pick(self, steps: Sequence[Step]) -> int:
        while self._next < len(self._sequence) and self._sequence[self._next] not in self._left:
            self._next += 1
        if self._next < len(self._sequence):
            wanted = self._sequence[self._next]
            for position, step in enumerate(steps):
                if step.key == wanted:
                    return position
            unnamed = [
                position for position, step in enumerate(steps) if step.key not in self._left
            ]
            if unnamed:
                return unnamed[self._fair.pick([steps[position] for position in unnamed])]
        return self._fair.pick(steps)

    def manner(self, step: Step) -> Manner:
        return self._manner

    def ended(self, key: SpanKey) -> None:
        self._left.discard(key)
