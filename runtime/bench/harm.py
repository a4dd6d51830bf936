"""Whether a mutant does harm, shown by running its numbers.

The numpy interpreter executes calls of the mutant, alone and between other schedules on the same
workspace (`harm_partners`), under schedulers that are as nasty as the contracts of the language
allow.  Wrong numbers or no progress in any of them is harm.  A finding of the verifier says where
to look: its operations are held back as long as anything else can go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stretto.runtime.bench.harm_partners import Broadcast, Neighbour, Relay, Staged, source_of
from stretto.schedules import schedule_class
from stretto.schedules.ag_gemm import AllGatherGemm
from stretto.schedules.language import (
    ALL_COLLECTIVES,
    ALL_VERBS,
    Capabilities,
    Deadlock,
    InvalidInput,
    Program,
    Signal,
    SpanKey,
    in_slot,
)
from stretto.schedules.verifier import Finding, Verdict
from stretto.sim.interpreter import (
    HOSTILE,
    Delayed,
    InOrder,
    Random,
    Scheduler,
    Step,
    interpret_sequence,
)

__all__ = ["CAPABILITIES", "Harm", "Judge", "Scenario"]

CAPABILITIES = Capabilities("any", ALL_VERBS, ALL_COLLECTIVES, signal_orders_puts=True)
"""Of the transport that mutants are made for: whatever carries all verbs."""

Array = npt.NDArray[np.float64]


class Harm(NamedTuple):
    """What went wrong, and in which run."""

    what: str
    run: str


@dataclass(frozen=True)
class Scenario:
    """One run: which Programs in turn, who goes first, on which terms."""

    name: str
    programs: tuple[Program, ...]
    scheduler: Scheduler
    fresh_streams: bool = False


class Stalled(Scheduler):
    """One operation stops in its middle, after some steps, for as long as anything else can go on.

    Parameters
    ----------
    key
        Which one.
    steps
        How many it takes before it stops; up to there it goes first.
    until
        When this one has ended, it goes first again.  Calls after that one do not begin before.
    """

    def __init__(self, key: SpanKey, steps: int, until: SpanKey) -> None:
        self._key, self._steps, self._until = key, steps, until
        self.begin()

    def begin(self) -> None:
        self._taken, self._goes = 0, False
        self._among = InOrder()

    def ended(self, key: SpanKey) -> None:
        self._goes = self._goes or key == self._until

    def pick(self, steps: Sequence[Step]) -> int:
        own = [place for place, step in enumerate(steps) if step.key == self._key]
        others = [place for place in range(len(steps)) if place not in own]
        if own and (self._taken < self._steps or self._goes or not others):
            self._taken += 1
            return own[0]
        if not self._goes:
            early = [place for place in others if steps[place].call <= self._until.call]
            others = early or others
        return others[self._among.pick([steps[place] for place in others])]


class Judge:
    """Runs mutants of one Program.

    Parameters
    ----------
    program
        The one without a mistake.
    thorough
        How many runs without a hint are made before a mutant passes as harmless.
    """

    def __init__(self, program: Program, *, thorough: int = 12) -> None:
        self.program, self.thorough = program, thorough
        self._random = np.random.default_rng(7)
        size, sizes = program.world_size, program.sizes
        self._weights = self._whole(size, sizes["n"], sizes["k"])

    def harm(self, mutant: Program, verdict: Verdict) -> Harm | None:
        """Return how the mutant goes wrong, or None if it never does here."""
        for scenario in self.scenarios(mutant, verdict):
            found = self.run(scenario)
            if found is not None:
                return Harm(found, scenario.name)
        return None

    def run(self, scenario: Scenario) -> str | None:
        """Return what is wrong after one run, or None."""
        blocks = [self._blocks(program) for program in scenario.programs]
        try:
            result = interpret_sequence(
                scenario.programs,
                lambda execution: {"x": blocks[execution], "w": list(self._weights)},
                scheduler=scenario.scheduler,
                fresh_streams=scenario.fresh_streams,
            )
        except Deadlock:
            return "no progress"
        except InvalidInput as error:
            # Refused before it began: some cannot be mixed, of others it is known how it would end.
            return "no progress" if "wait for ever" in str(error) else None
        for execution, outputs in enumerate(result.by_call):
            program = scenario.programs[execution]
            for rank, y in enumerate(outputs["y"]):
                if not np.array_equal(y, self._expected(program, blocks[execution], rank)):
                    return "wrong numbers"
        return None

    # ---- what is tried -----------------------------------------------------------------------

    def scenarios(self, mutant: Program, verdict: Verdict) -> Iterator[Scenario]:
        """Yield runs, those that a finding points at first."""
        alone = (mutant,) * 4
        neighbour, unfused = self._like(mutant, Neighbour), self._like(mutant, None)
        relay, staged = self._like(mutant, Relay), self._like(mutant, Staged)
        broadcast = self._like(mutant, Broadcast)
        after = (neighbour, neighbour, mutant, neighbour, unfused)
        before = (mutant, neighbour, neighbour, unfused, unfused)
        yield Scenario("alone, in order", alone, InOrder(HOSTILE))
        for finding in verdict.errors:
            yield from self._hinted(finding, alone, "alone")
        slow = Delayed(ranks=[1 % mutant.world_size], kinds=["gemm"], calls=[0])
        yield Scenario("after another schedule that is slow to read", after, slow)
        for finding in verdict.errors:
            yield from self._hinted(finding, before, "before another schedule")
        yield Scenario(
            "after another schedule that waits for nobody",
            (broadcast, broadcast, mutant, neighbour, unfused),
            Delayed(ranks=[0], kinds=["gemm"], calls=[0]),
        )
        for rank in range(min(2, mutant.world_size)):
            yield Scenario(
                "after another schedule that is slow to forward",
                (relay, relay, mutant, relay, unfused),
                Delayed(ranks=[rank], operations=["put1"], calls=[0]),
                fresh_streams=True,
            )
            yield Scenario(
                "after another schedule that is slow to send",
                (staged, mutant, mutant, neighbour),
                Delayed(ranks=[rank], operations=["put0"], calls=[0]),
                fresh_streams=True,
            )
        yield from self._stalls(mutant, neighbour, unfused)
        for seed in range(self.thorough):
            programs, name = ((alone, "alone"), (after, "after others"), (before, "before others"))[
                seed % 3
            ]
            yield Scenario(f"{name}, at random ({seed})", programs, Random(seed), seed % 2 == 1)
        for operation in mutant.phases[0].body(0).operations[: 2 * self.thorough]:
            delayed = Delayed(ranks=[0], operations=[operation.id], among=Random(1))
            yield Scenario(f"alone, {operation.id} of rank 0 late", alone, delayed)
            delayed = Delayed(ranks=[0], operations=[operation.id], calls=[0])
            yield Scenario(f"before others, {operation.id} of rank 0 late", before, delayed)

    def _hinted(
        self, finding: Finding, programs: tuple[Program, ...], name: str
    ) -> Iterator[Scenario]:
        for place in finding.places[:4]:
            for calls in ([place.call], None):
                delayed = Delayed(ranks=[place.rank], operations=[place.operation], calls=calls)
                yield Scenario(
                    f"{name}, {place.operation} of rank {place.rank} late", programs, delayed
                )
        if finding.kind == "early_release":
            for kind in ("gemm", "put", "wait"):
                delayed = Delayed(ranks=[0], kinds=[kind])
                yield Scenario(f"{name}, each {kind} of rank 0 late", programs, delayed)

    def _stalls(self, mutant: Program, neighbour: Program, unfused: Program) -> Iterator[Scenario]:
        """Let a release stop between two ranks' words, until the slot's next one is through."""
        slots = mutant.slots or 1
        for first in (neighbour, mutant):
            between = (neighbour,) * (slots - 1)
            programs = (first, *between, mutant, mutant, unfused, unfused)
            releases = _releases(first), _releases(mutant)
            if not all(releases):
                continue
            for rank in range(min(2, mutant.world_size)):
                for words in range(mutant.world_size, 0, -1):
                    for until in (slots, slots + 1):
                        yield Scenario(
                            f"{releases[0][0]} of rank {rank} stops after {words} steps",
                            programs,
                            Stalled(
                                SpanKey(0, rank, releases[0][0]),
                                words,
                                SpanKey(until, rank, releases[1][0]),
                            ),
                            fresh_streams=True,
                        )

    def _like(self, mutant: Program, cls: type[AllGatherGemm] | None) -> Program:
        """Return another schedule for the workspace of the mutant, as the mutant declares it."""
        chosen = schedule_class("ag-gemm", "unfused") if cls is None else cls
        sizes = mutant.sizes
        other = chosen(
            world_size=mutant.world_size,
            m=sizes["m"],
            n=sizes["n"],
            k=sizes["k"],
            dtype=mutant.dtype,  # type: ignore[arg-type]
            capabilities=CAPABILITIES,
        ).build()
        slots = mutant.slots or other.slots
        return replace(
            other,
            buffers=tuple(
                replace(one, slots=slots) if in_slot(one) else one for one in other.buffers
            ),
            flags=tuple(
                replace(one, slots=slots) if one.purpose != "own" else one for one in other.flags
            ),
        )

    # ---- numbers -----------------------------------------------------------------------------

    def _whole(self, *shape: int) -> Array:
        """Return small whole numbers, so that sums come out exactly."""
        return self._random.integers(-8, 9, shape).astype(np.float64)

    def _blocks(self, program: Program) -> list[Array]:
        rows, size = program.sizes["m"], program.world_size
        x = self._whole(rows, program.sizes["k"])
        block = -(-rows // size)
        return [x[rank * block : (rank + 1) * block] for rank in range(size)]

    def _expected(self, program: Program, blocks: Sequence[Array], rank: int) -> Array:
        x, w = np.concatenate(list(blocks)), self._weights[rank]
        if program.computes == "all_gather_gemm":
            return x @ w.T
        source = source_of(program, rank)
        y = np.zeros((len(x), len(w)))
        start = sum(len(block) for block in blocks[:source])
        y[start : start + len(blocks[source])] = blocks[source] @ w.T
        return y


def _releases(program: Program) -> list[str]:
    return [
        one.id
        for one in program.phases[0].body(0).operations
        if one.tags.note == "release" and isinstance(one, Signal)
    ]
