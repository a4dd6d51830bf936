"""``stretto bench campaign``: everything that a machine of several GPUs is measured for, in one go.

Steps, each kept when a later one fails: calibration into a profile; signals and waits; correctness
of every variant with short and empty shards; ``ag-gemm`` beside its peers, predicted before; one
call measured above its simulation.  What was predicted beforehand, in a file of ``bench ag-gemm
--predict-only``, takes the place of the fresh profile's predictions: a prediction that was written
before the machine was at hand cannot have been fitted to it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.runtime.bench.ag_gemm import BenchPlan, bench_ag_gemm
from stretto.runtime.bench.predictions import predict_rows
from stretto.runtime.bench.signals import SignalsPlan, measure_signals
from stretto.runtime.calibration import calibrate_gpus, gpu_plan
from stretto.runtime.calibration.phases import PROBE_ERRORS, reason_of
from stretto.runtime.session import RunOptions, run_programs
from stretto.schedules import SCHEDULES, schedule_class
from stretto.schedules.language import (
    Program,
    StrettoError,
    Timeline,
    compare_timelines,
    to_json,
)
from stretto.sim import Machine, simulate
from stretto.transports import load_transport

__all__ = ["Campaign", "published_form", "run_campaign"]

CHECKED_ROWS = (9, 257, 1000)
OWN_FILES = (
    "profile.json",
    "signals.json",
    "correctness.json",
    "ag_gemm.json",
    "ag_gemm.md",
    "-measured.json",
    "-simulated.json",
    "-comparison.json",
)
"""Ends of the names of what the steps write."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """What to measure, and where it goes.

    Attributes
    ----------
    plan
        Of the benchmark: ranks, shapes, rows, rounds.
    folder
        Exists; every step writes a file of its own there.
    predicted
        Rows predicted before, and the profile's name; empty to predict from the calibration.
    """

    plan: BenchPlan
    folder: Path
    predicted: tuple[dict[str, Any], ...] = ()
    profile: str = ""


def run_campaign(campaign: Campaign, note: Callable[[str], None]) -> dict[str, str]:
    """Do all steps; return, by step, ``done`` or why not.

    Parameters
    ----------
    campaign
        What and where.
    note
        Told which step comes next.
    """
    steps: dict[str, Callable[[Campaign], None]] = {
        "calibrate": _calibrate,
        "signals": _signals,
        "correctness": _correctness,
        "ag-gemm": _ag_gemm,
        "timeline": _timeline,
    }
    outcomes: dict[str, str] = {}
    for stale in campaign.folder.glob("*"):  # of an earlier campaign: it must not pass for new
        if stale.name.endswith(OWN_FILES):
            stale.unlink()
    for name, step in steps.items():
        note(name)
        start = time.monotonic()
        try:
            step(campaign)
            outcomes[name] = f"done in {time.monotonic() - start:.0f} s"
        except (StrettoError, *PROBE_ERRORS) as error:
            outcomes[name] = f"failed: {reason_of(error)}"
        _write(campaign, "steps.json", outcomes)
    return outcomes


def _calibrate(campaign: Campaign) -> None:
    ranks = campaign.plan.world_size
    plan = gpu_plan(ranks, partial=str(campaign.folder / "calibration"), progress=False)
    machine = calibrate_gpus(plan, name=f"measured-x{ranks}")
    (campaign.folder / "profile.json").write_text(machine.to_json())


def _machine(campaign: Campaign) -> Machine:
    return Machine.load(campaign.folder / "profile.json")


def _signals(campaign: Campaign) -> None:
    _write(campaign, "signals.json", measure_signals(SignalsPlan(progress=False)))


def _program(variant: str, world_size: int, m: int, n: int, k: int) -> Program:
    transport = "rccl" if variant == "unfused" else "copy_engine"
    return schedule_class("ag-gemm", variant)(
        world_size=world_size,
        m=m,
        n=n,
        k=k,
        capabilities=load_transport(transport).offered(),
    ).build()


def _correctness(campaign: Campaign) -> None:
    """Check every variant against float64; the numbers are small, the rows uneven."""
    programs = [
        _program(variant, campaign.plan.world_size, m, 256, 512)
        for variant in SCHEDULES["ag-gemm"]
        for m in CHECKED_ROWS
    ]
    results = run_programs(programs, RunOptions(iterations=2, warmup=1, check=True))
    _write(
        campaign,
        "correctness.json",
        [
            {
                "variant": program.variant,
                "m": program.sizes["m"],
                "largest_error_of_bound": max(one.largest_error for one in result.checks),
            }
            for program, result in zip(programs, results, strict=True)
        ],
    )


def _ag_gemm(campaign: Campaign) -> None:
    plan, predicted, profile = campaign.plan, campaign.predicted, campaign.profile
    if not predicted:
        machine = _machine(campaign)
        profile = machine.name
        predicted = tuple(
            predict_rows(
                machine,
                world_size=plan.world_size,
                shapes=plan.shapes,
                rows=plan.rows,
                variants=plan.variants,
            )
        )
    path = campaign.folder / "ag_gemm.json"
    report = bench_ag_gemm(replace(plan, predicted=predicted, profile=profile, partial=path))
    _write(campaign, path.name, report)
    (campaign.folder / "ag_gemm.md").write_text(published_form(report))


def _timeline(campaign: Campaign) -> None:
    """Record one call of every overlapped variant, and simulate it by the fresh profile."""
    machine = _machine(campaign)
    _, n, k = campaign.plan.shapes[0]
    m = min(campaign.plan.rows, key=lambda rows: abs(rows - 8192))
    for variant in ("ring", "eager"):
        program = _program(variant, campaign.plan.world_size, m, n, k)
        predicted = simulate(program, machine, mode="graph").timeline
        (result,) = run_programs([program], RunOptions(iterations=7))
        _save(campaign, f"{variant}-measured.json", result.timeline)
        _save(campaign, f"{variant}-simulated.json", predicted)
        comparison = compare_timelines(result.timeline, predicted)
        _write(campaign, f"{variant}-comparison.json", {"makespan_error": comparison.error})


def _save(campaign: Campaign, name: str, timeline: Timeline) -> None:
    (campaign.folder / name).write_text(to_json(timeline, indent=1))


def _write(campaign: Campaign, name: str, value: Any) -> None:
    (campaign.folder / name).write_text(json.dumps(value, indent=1) + "\n")


def published_form(report: dict[str, Any]) -> str:
    """Return the table of a report as ring AG-GEMM was published: a row a shape, in microseconds.

    Columns: GEMM only, all-gather only, all-gather + GEMM, the variant that the dispatch table
    takes, its speed-up, and the prediction of that variant with its error.
    """
    predicted = {
        (row["projection"], row["m"]): row["us"]
        for row in report.get("prediction", {}).get("rows", [])
    }
    lines = [
        "| projection | m | GEMM only | AG only | AG + GEMM | AG-GEMM | speed-up | predicted |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        us, chosen = row["us"], row["choice"]
        if chosen not in us or "gemm" not in us:
            continue
        own, baseline = us[chosen], us.get("nccl + gemm") or us.get("unfused") or us[chosen]
        guess = predicted.get((row["projection"], row["m"]), {}).get(chosen)
        error = "" if guess is None else f"{guess:.0f} ({100 * (guess / own - 1):+.1f} %)"
        gather = f"{us['all-gather']:.0f}" if "all-gather" in us else "-"
        lines.append(
            f"| {row['projection']} | {row['m']} | {us['gemm']:.0f} | {gather} | {baseline:.0f} | "
            f"{own:.0f} ({chosen}) | {baseline / own:.2f}x | {error} |"
        )
    return "\n".join(lines) + "\n"
