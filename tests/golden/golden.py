"""What must not change unnoticed: simulated timelines, and what the verifier says of mutants.

``python tests/golden/golden.py`` writes both tables again, beside this file.  A difference is a
change that the CHANGELOG has to name.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from stretto.runtime.bench.verify import subject
from stretto.schedules import SCHEDULES, schedule_class, verify
from stretto.schedules.language import Timeline
from stretto.schedules.verifier.mutants import mutants
from stretto.sim import Machine, simulate
from stretto.sim.machine import Mode

HERE = Path(__file__).parent
TIMELINES = HERE / "timelines.csv"
MUTANTS = HERE / "mutants.csv"

VARIANTS = tuple(SCHEDULES["ag-gemm"])
SIZES = (1, 1000, 8192)
TIMED_WORLD_SIZES = (1, 2, 4, 8, 16)
MODES: tuple[Mode, ...] = ("eager", "graph")
CALLS = 3
MUTATED_WORLD_SIZES = (2, 3, 4, 8)

Row = dict[str, str]


def timelines(world_sizes: Iterable[int] = TIMED_WORLD_SIZES) -> Iterator[Row]:
    """Yield a line for every variant, world size, m and mode: three calls on gb300-nvl72.

    Times are written so that they can be read back to the bit; the digest is over who did what
    when, names of operations and words left out.
    """
    machine = Machine.load("gb300-nvl72")
    for variant in VARIANTS:
        cls = schedule_class("ag-gemm", variant)
        capabilities = machine.transport(machine.default_transport(variant)).capabilities
        for world_size in world_sizes:
            for m in SIZES:
                program = (
                    cls(world_size=world_size, m=m, n=6288, k=7168, capabilities=capabilities)
                    .build()
                    .repeated(CALLS)
                )
                for mode in MODES:
                    result = simulate(program, machine, mode=mode)
                    yield {
                        "variant": variant,
                        "world_size": str(world_size),
                        "m": str(m),
                        "mode": mode,
                        "makespan_us": repr(result.makespan_us),
                        "roof_us": repr(result.roof_us),
                        "spans": str(len(result.timeline.spans)),
                        "digest": _digest(result.timeline),
                    }


def _digest(timeline: Timeline) -> str:
    lines = sorted(
        repr(
            (
                span.call,
                span.rank,
                span.stream,
                span.start_us,
                span.end_us,
                span.kind,
                span.step,
                span.shard,
                span.peer,
                span.bytes,
                span.flops,
            )
        )
        for span in timeline.spans
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def judged(world_sizes: Iterable[int] = MUTATED_WORLD_SIZES) -> Iterator[Row]:
    """Yield a line for every mutant: ``refused``, ``safe``, or the kinds of errors found."""
    for world_size in world_sizes:
        for variant in VARIANTS:
            for mutant in mutants(subject(variant, world_size)):
                if mutant.program is None:
                    verdict = "refused"
                else:
                    errors = verify(mutant.program).errors
                    verdict = " ".join(sorted({error.kind for error in errors})) or "safe"
                yield {
                    "variant": variant,
                    "world_size": str(world_size),
                    "family": mutant.family,
                    "mutation": mutant.what,
                    "verdict": verdict,
                }


def read(path: Path) -> list[Row]:
    """Return the lines of a table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write a table."""
    rows = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    write(TIMELINES, timelines())
    write(MUTANTS, judged())
