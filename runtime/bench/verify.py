"""How good the verifier is, and how fast.

Mutants
    Every shipped schedule and variant at TP 2, 4 and 8, three rows a rank, with one mistake at a
    time (`stretto.schedules.verifier.mutants`).  A mutant is *refused* when it is built, *reported*
    by the verifier, or passes it.  Whether it does harm is found out by running its numbers in the
    interpreter, alone and between other schedules on the same workspace, under adversarial
    schedulers (`stretto.runtime.bench.harm`).  *Missed* is harm that was not reported, *not shown*
    is a report without harm; both should be 0.  *Harmless* mutants lack synchronisation that was
    not needed.
Real processes
    A sample of the reported mutants at TP 2 runs over ``shared_memory``, one process a rank, rank 1
    being 50 ms late: one call, then four back to back.  Inputs are the same in all calls, so that a
    slot that is overwritten too soon does not show in the numbers, nor does what only another
    schedule on the workspace would suffer from; the table says what did.
Speed
    `verify` of the ring, which looks at three calls, median of five; building the Program is not
    counted.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

from stretto.runtime.bench.harm import CAPABILITIES, Judge
from stretto.schedules import SCHEDULES, schedule_class, verify
from stretto.schedules.language import Program, StrettoError
from stretto.schedules.verifier.mutants import Mutant, mutants

__all__ = [
    "PROTOCOL",
    "WORLD_SIZES",
    "Judgement",
    "judge_mutants",
    "measure_speed",
    "measure_verifier",
    "run_for_real",
    "sampled",
    "subject",
]

PROTOCOL = (
    "mutants of every shipped variant, three rows a rank, judged by the interpreter under "
    "adversarial schedulers; speed: the ring of 8192 x 6288 x 7168, median of five"
)
WORLD_SIZES = (2, 4, 8)
SPEED_SIZES = (2, 8, 16, 72)
REPEATS = 5
SAMPLE = 20
REAL_CALLS = (1, 4)
DELAY_S, TIMEOUT_S = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """One mutant, and what became of it.

    Attributes
    ----------
    variant, world_size
        Of the Program that it was made from.
    mutant
        The mistake.
    reported
        Kinds of errors that the verifier found.
    harm, run
        What goes wrong, and in which run; None if nothing does.
    verify_s
        How long the verifier took.
    """

    variant: str
    world_size: int
    mutant: Mutant
    reported: tuple[str, ...] = ()
    harm: str | None = None
    run: str | None = None
    verify_s: float = 0.0

    @property
    def outcome(self) -> str:
        """One of ``refused``, ``shown``, ``harmless``, ``missed``, ``not shown``."""
        if self.mutant.program is None:
            return "refused"
        if self.reported:
            return "not shown" if self.harm is None else "shown"
        return "harmless" if self.harm is None else "missed"


def judge_mutants(program: Program) -> Iterator[Judgement]:
    """Yield what becomes of every mutant of a Program that computes an all-gather GEMM."""
    judge = Judge(program)
    for mutant in mutants(program):
        if mutant.program is None:
            yield Judgement(program.variant, program.world_size, mutant)
            continue
        start = time.perf_counter()
        verdict = verify(mutant.program)
        taken = time.perf_counter() - start
        harm = judge.harm(mutant.program, verdict)
        yield Judgement(
            program.variant,
            program.world_size,
            mutant,
            tuple(dict.fromkeys(finding.kind for finding in verdict.errors)),
            None if harm is None else harm.what,
            None if harm is None else harm.run,
            taken,
        )


def subject(variant: str, world_size: int, *, transport: str = "any") -> Program:
    """Return the Program that mistakes are made in: three rows a rank."""
    return schedule_class("ag-gemm", variant)(
        world_size=world_size,
        m=3 * world_size,
        n=2,
        k=2,
        dtype="fp32",
        capabilities=replace(CAPABILITIES, transport=transport),
    ).build()


def measure_verifier(
    *,
    world_sizes: Sequence[int] = WORLD_SIZES,
    real: bool = True,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Return all tables as plain values; `note` is told what is going on."""
    judgements: list[Judgement] = []
    rows = []
    for world_size in world_sizes:
        for variant in SCHEDULES["ag-gemm"]:
            note(f"mutants of {variant} at TP{world_size}")
            start = time.perf_counter()
            found = list(judge_mutants(subject(variant, world_size)))
            rows.append(_row(variant, world_size, found, time.perf_counter() - start))
            judgements += found
    note("mutants in real processes")
    return {
        "protocol": PROTOCOL,
        "date": date.today().isoformat(),
        "machine": _machine(),
        "versions": _versions(),
        "rows": rows,
        "families": _families(judgements),
        "missed": _listed(judgements, "missed"),
        "not_shown": _listed(judgements, "not shown"),
        "harmless": _listed(judgements, "harmless"),
        "real": run_for_real(sampled(SAMPLE)) if real else None,
        "speed": measure_speed(note=note),
    }


def _row(
    variant: str, world_size: int, found: Sequence[Judgement], judged_s: float
) -> dict[str, Any]:
    outcomes = Counter(one.outcome for one in found)
    harms = Counter(one.harm for one in found if one.outcome == "shown")
    return {
        "variant": variant,
        "tp": world_size,
        "mutants": len(found),
        "refused": outcomes["refused"],
        "reported": outcomes["shown"] + outcomes["not shown"],
        "wrong_numbers": harms["wrong numbers"],
        "no_progress": harms["no progress"],
        "not_shown": outcomes["not shown"],
        "missed": outcomes["missed"],
        "harmless": outcomes["harmless"],
        "verify_ms": median(one.verify_s for one in found if one.outcome != "refused") * 1e3,
        "judged_s": judged_s,
    }


def _families(judgements: Sequence[Judgement]) -> list[dict[str, Any]]:
    families: dict[str, Counter[str]] = {}
    for one in judgements:
        families.setdefault(one.mutant.family, Counter())[one.outcome] += 1
    return [
        {"family": family, **{name: counts[name] for name in _OUTCOMES}}
        for family, counts in families.items()
    ]


_OUTCOMES = ("refused", "shown", "not shown", "missed", "harmless")


def _listed(judgements: Sequence[Judgement], outcome: str) -> list[str]:
    return [
        f"{one.variant} TP{one.world_size}: {one.mutant.family}, {one.mutant.what}"
        + (f" ({one.harm}: {one.run})" if one.harm else "")
        + (f" ({', '.join(one.reported)})" if one.reported else "")
        for one in judgements
        if one.outcome == outcome
    ]


# ---- real processes ------------------------------------------------------------------------------


def sampled(count: int) -> list[Judgement]:
    """Return reported mutants of all families and variants at TP 2 that go wrong by themselves."""
    chosen: dict[tuple[str, str], Judgement] = {}
    for variant in SCHEDULES["ag-gemm"]:
        for one in judge_mutants(subject(variant, 2, transport="shared_memory")):
            if one.outcome == "shown" and one.run is not None and one.run.startswith("alone"):
                chosen.setdefault((one.mutant.family, variant), one)
    families: dict[str, list[Judgement]] = {}
    for (family, _), one in chosen.items():
        families.setdefault(family, []).append(one)
    found: list[Judgement] = []
    while len(found) < count and any(families.values()):
        found += [left.pop(0) for left in families.values() if left]
    return found[:count]


def run_for_real(sample: Sequence[Judgement]) -> list[dict[str, Any]]:
    """Run mutants in real processes over ``shared_memory``; say how each ended."""
    from stretto.runtime.launcher import launch

    programs = tuple(
        one.mutant.program.repeated(calls)
        for one in sample
        if one.mutant.program is not None
        for calls in REAL_CALLS
    )
    by_rank = launch(_run_rank, 2, programs)
    rows = []
    for place, one in enumerate(sample):
        runs = range(place * len(REAL_CALLS), (place + 1) * len(REAL_CALLS))
        failed = [end for run in runs for outcomes in by_rank if (end := outcomes[run])]
        # The rank that failed says more than the one that heard of it.
        told = sorted(failed, key=lambda end: end[0] == "PeerLost")
        rows.append(
            {
                "variant": one.variant,
                "family": one.mutant.family,
                "mutant": one.mutant.what,
                "reported": list(one.reported),
                "expected": one.harm,
                "ended": told[0][0] if told else "no harm seen",
                "message": told[0][1] if told else None,
            }
        )
    return rows


def _run_rank(rank: Any, programs: tuple[Program, ...]) -> list[tuple[str, str] | None]:
    """Do one rank's part: every Program on a transport of its own, since it may not survive."""
    from stretto.runtime.session import RunOptions, execute
    from stretto.transports.shared_memory import SharedMemoryTransport

    options = RunOptions(
        iterations=1, warmup=0, check=True, timeout_s=TIMEOUT_S, delay_s=((1, DELAY_S),)
    )
    outcomes: list[tuple[str, str] | None] = []
    for place, program in enumerate(programs):
        transport = SharedMemoryTransport(
            rank.index,
            rank.world_size,
            rank.store,
            key_prefix=f"mutant{place}",
            timeout_s=TIMEOUT_S,
        )
        try:
            execute(rank, transport, program, options, key=f"mutant/{place}")
            outcomes.append(None)
        except StrettoError as error:
            outcomes.append((type(error).__name__, str(error).partition("\n")[0]))
        finally:
            transport.close()
    return outcomes


# ---- speed ---------------------------------------------------------------------------------------


def measure_speed(
    *,
    world_sizes: Sequence[int] = SPEED_SIZES,
    note: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Time `verify` of the ring."""
    rows = []
    for world_size in world_sizes:
        note(f"speed at TP{world_size}")
        program = schedule_class("ag-gemm", "ring")(
            world_size=world_size, m=8192, n=6288, k=7168, capabilities=CAPABILITIES
        ).build()
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            verdict = verify(program)
            times.append(time.perf_counter() - start)
        rows.append(
            {
                "tp": world_size,
                "calls": verdict.calls,
                "operations": verdict.operations,
                "verify_s": median(times),
            }
        )
    return rows


def _machine() -> str:
    from stretto.sim.machine import host_fingerprint

    host = host_fingerprint()
    return f"{host.cores} cores of {host.cpu_model}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("stretto", "numpy", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
