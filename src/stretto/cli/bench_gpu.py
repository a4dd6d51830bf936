"""``stretto bench``: what needs GPUs, and the predictions made before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import options as opt
from stretto.cli.bench import bench
from stretto.cli.output import (
    check_json_file,
    print_json,
    print_pairs,
    print_table,
    progress,
    working,
    write_json,
)
from stretto.schedules.language import InvalidInput, RunFailed, Unavailable

if TYPE_CHECKING:
    from stretto.runtime.bench.ag_gemm import BenchPlan


PREDICTED = "ag-gemm, predicted"
"""What a file of predictions says that it is."""


@bench.command("ag-gemm")
def bench_ag_gemm_command(
    presets: Annotated[
        list[str] | None, typer.Option("--preset", help="Projections; several are allowed.")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option("-m", help="Global rows; several are allowed.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Number of GPUs.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds of every shape.")] = 15,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Predict every row from this profile before measuring, and report the errors.",
            autocompletion=opt.complete_machine,
        ),
    ] = None,
    widen: Annotated[
        str | None,
        typer.Option(
            help="Predict for the profile's GPUs in this other profile's domain: more ranks, and "
            "its collectives.",
            autocompletion=opt.complete_machine,
        ),
    ] = None,
    predict_only: Annotated[
        bool, typer.Option("--predict-only", help="Write the predictions and leave; needs no GPU.")
    ] = False,
    output: opt.JsonFileOption = None,
    figure: opt.FigureOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Measure ag-gemm on GPUs beside NCCL, torch's fused operator, and QuACK if installed."""
    check_json_file(output)
    from stretto.figures import CurvePoint, check_figure_path, speedup_curve
    from stretto.runtime.bench.ag_gemm import bench_ag_gemm

    if figure is not None:
        check_figure_path(figure)
    if rounds < 3:
        raise InvalidInput(f"--rounds is {rounds}; give at least 3.")
    plan = replace(_plan(tp, presets, rows, rounds), partial=output)
    if widen is not None and machine is None:
        raise InvalidInput("--widen changes a profile; name it with --machine.")
    if predict_only and figure is not None:
        raise InvalidInput("--predict-only measures nothing to draw; leave --figure out.")
    if predict_only:
        _predict_ag_gemm(plan, machine, widen, output, as_json=as_json)
        return
    _require_gpus("ag-gemm")
    if machine is not None:
        plan = _predicted(plan, machine, widen)
    with working("measuring", quiet=as_json):
        report = bench_ag_gemm(plan)
    write_json(output, report)
    if figure is not None:
        speedup_curve(
            [
                CurvePoint(f"{row['projection']}, {method}", row["m"], *_interval(ratios))
                for row in report["rows"]
                for method, ratios in row["ratio_to_nccl"].items()
                if method in ("ring", "eager", "torch fused")
            ],
            figure,
            baseline="NCCL without NVLS + GEMM",
        )
    if as_json:
        print_json(report)
        return
    print_table(
        f"{report['protocol']}; us a call, NCCL without NVLS",
        ["projection", "m", "method", "us", "vs nccl + gemm", "vs gemm"],
        [
            [
                row["projection"],
                str(row["m"]),
                method,
                f"{us:,.1f}",
                _ratio(row["ratio_to_nccl"], method),
                _ratio(row["ratio_to_gemm"], method),
            ]
            for row in report["rows"]
            for method, us in row["us"].items()
        ],
        left=3,
    )


def _plan(tp: int, presets: list[str] | None, rows: list[int] | None, rounds: int) -> BenchPlan:
    from stretto.runtime.bench.ag_gemm import BenchPlan
    from stretto.schedules.presets import projection

    if tp < 2:
        raise InvalidInput(f"--tp is {tp}; give at least 2 ranks.")
    for m in rows or ():
        if m < 1 or m % tp:
            raise InvalidInput(
                f"-m is {m}; give a multiple of --tp {tp}, since the peers' all-gather wants equal "
                "shards."
            )
    names = presets or ["kimi-k3/kda", "kimi-k3/mla", "llama-3.1-70b/qkv", "qwen3-32b/qkv"]
    return BenchPlan(
        tp,
        tuple((name, *projection(name, tp)) for name in names),
        tuple(rows or (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)),
        rounds=rounds,
    )


def _require_gpus(what: str) -> None:
    from stretto.transports import load_transport

    state = load_transport("copy_engine").available()
    if not state.usable:
        raise Unavailable(f"bench {what} needs NVIDIA GPUs: {state.reason}.")


def _predicted(plan: BenchPlan, name: str, widen: str | None) -> BenchPlan:
    """Return the plan with what a profile predicts for it."""
    from stretto.runtime.bench.predictions import predict_rows, widened
    from stretto.sim import Machine

    machine = Machine.load(name)
    if widen is not None:
        machine = widened(machine, Machine.load(widen))
    rows = predict_rows(
        machine,
        world_size=plan.world_size,
        shapes=plan.shapes,
        rows=plan.rows,
        variants=plan.variants,
        dtype=plan.dtype,
    )
    return replace(
        plan, predicted=tuple(rows), profile=f"{machine.name} ({machine.validation_note})"
    )


def _predict_ag_gemm(
    plan: BenchPlan,
    machine: str | None,
    widen: str | None,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    from datetime import date

    if machine is None:
        raise InvalidInput("Name the profile that predicts: --machine h200-sxm-x2, say.")
    with working("predicting", quiet=as_json):
        plan = _predicted(plan, machine, widen)
    report = {
        "what": PREDICTED,
        "profile": plan.profile,
        "date": date.today().isoformat(),
        "world_size": plan.world_size,
        "dtype": plan.dtype,
        "rows": list(plan.predicted),
    }
    write_json(output, report)
    if as_json:
        print_json(report)
        return
    print_table(
        f"predicted by {plan.profile}, TP{plan.world_size}, {plan.dtype}; us a call",
        ["projection", "m", "gemm only", *plan.variants, "numbers"],
        [
            [
                row["projection"],
                str(row["m"]),
                f"{row['gemm_us']:,.1f}",
                *(f"{row['us'][variant]:,.1f}" for variant in plan.variants),
                row["numbers"],
            ]
            for row in plan.predicted
        ],
    )


def _ratio(ratios: dict[str, list[float]], method: str) -> str:
    low, middle, high = ratios.get(method, (0.0, 0.0, 0.0))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})" if middle else ""


def _interval(ratios: list[float]) -> tuple[float, float, float]:
    low, middle, high = ratios
    return middle, low, high


@bench.command("host")
def bench_host(
    tp: Annotated[int, typer.Option(help="Number of GPUs.")] = 2,
    output: opt.JsonFileOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Measure what a call costs the host, by operation, on GPUs."""
    check_json_file(output)
    _require_gpus("host")
    from stretto.runtime.bench.host import measure_host

    with working("measuring", quiet=as_json):
        report = measure_host(tp)
    write_json(output, report)
    if as_json:
        print_json(report)
        return
    print_table(
        report["protocol"],
        ["variant", "us a call", "operations", "us an operation", "us in a graph", "by kind"],
        [
            [
                row["variant"],
                f"{row['call_us']:.1f}",
                str(row["operations"]),
                f"{row['operation_us']:.2f}",
                f"{row['graph_call_us']:.2f}",
                ", ".join(f"{kind} {us:.1f}" for kind, us in row["by_kind_us"].items()),
            ]
            for row in report["rows"]
        ],
    )
    print_table(
        "a library call of the variant eager",
        ["tensors", "us"],
        [[name.removesuffix("_us"), f"{us:.1f}"] for name, us in report["library"].items()],
    )


@bench.command("signals")
def bench_signals(
    rounds: Annotated[int, typer.Option(help="Rounds of every case.")] = 9,
    output: opt.JsonFileOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Measure ways to signal and to wait between two GPUs, idle and beside GEMMs."""
    check_json_file(output)
    from stretto.runtime.bench.signals import SignalsPlan, measure_signals

    if rounds < 3:
        raise InvalidInput(f"--rounds is {rounds}; give at least 3.")
    kept = None if output is None else str(output.with_suffix(""))
    report = measure_signals(SignalsPlan(rounds, partial=kept, progress=not as_json))
    write_json(output, report)
    if as_json:
        print_json(report)
        return
    shapes = list(report["shapes"])
    print_table(
        f"{report['protocol']}; us",
        [
            "candidate",
            "idle",
            *(f"beside {name}" for name in shapes),
            "eager",
            "host",
            *(f"GEMM {name}, wait pending" for name in shapes),
        ],
        [
            [
                row["candidate"],
                _decimal(row["idle_us"]),
                *(_decimal(row["beside_us"][name]) for name in shapes),
                _decimal(row["eager_us"]),
                _decimal(row["host_us"]),
                *(_ratio(_known(row["pending_ratio"]), name) for name in shapes),
            ]
            for row in report["rows"]
        ],
    )
    skipped = [
        [row["candidate"], what, reason]
        for row in report["rows"]
        for what, reason in row["not_measured"].items()
    ]
    if skipped:
        print_table("not measured", ["candidate", "what", "reason"], skipped, left=3)


def _known(ratios: dict[str, list[float] | None]) -> dict[str, list[float]]:
    return {name: found for name, found in ratios.items() if found is not None}


def _decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


@bench.command("campaign")
def bench_campaign(
    folder: Annotated[Path, typer.Option("--output", "-o", help="Folder for all results.")],
    tp: Annotated[int, typer.Option(help="Number of GPUs.")] = 8,
    presets: Annotated[
        list[str] | None, typer.Option("--preset", help="Projections; several are allowed.")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option("-m", help="Global rows; several are allowed.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of every shape of ag-gemm.")] = 9,
    predicted: Annotated[
        Path | None,
        typer.Option(help="What bench ag-gemm --predict-only wrote before, to be judged now."),
    ] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Measure a machine of several GPUs in one go: profile, signals, checks, ag-gemm, timelines."""
    from stretto.runtime.bench.campaign import Campaign, run_campaign

    if rounds < 3:
        raise InvalidInput(f"--rounds is {rounds}; give at least 3.")
    plan = _plan(tp, presets, rows, rounds)
    forecast = {} if predicted is None else _forecast(predicted, plan)
    _require_gpus("campaign")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be made: {error.strerror}.") from error
    campaign = Campaign(plan, folder, tuple(forecast.get("rows", ())), forecast.get("profile", ""))
    with progress(quiet=as_json) as bar:
        task = bar.add_task("campaign", total=None)
        outcomes = run_campaign(campaign, lambda step: bar.update(task, description=step))
    _draw(folder)
    if as_json:
        print_json({"folder": str(folder), "steps": outcomes})
    else:
        print_pairs(f"campaign at TP{tp}, in {folder}", list(outcomes.items()))
    failed = [step for step, outcome in outcomes.items() if not outcome.startswith("done")]
    if failed:
        raise RunFailed(f"Of the campaign's steps {', '.join(failed)} failed; the rest is kept.")


def _forecast(path: Path, plan: BenchPlan) -> dict[str, Any]:
    """Return what was predicted before, for these ranks and shapes."""
    import json

    try:
        forecast: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read as JSON.") from error
    if not isinstance(forecast, dict) or forecast.get("what") != PREDICTED:
        raise InvalidInput(f"{path} is not what bench ag-gemm --predict-only writes.")
    world_size = forecast["world_size"]
    if world_size != plan.world_size:
        raise InvalidInput(f"{path} predicts TP{world_size}, --tp is {plan.world_size}.")
    missing = [
        f"{name} at m = {m}"
        for name, _, _ in plan.shapes
        for m in plan.rows
        if (name, m) not in {(row.get("projection"), row.get("m")) for row in forecast["rows"]}
    ]
    if missing:
        raise InvalidInput(
            f"{path} does not predict {missing[0]}; choose --preset and -m among what it has."
        )
    return forecast


def _draw(folder: Path) -> None:
    """Draw the timelines of a campaign, measured above simulated."""
    from stretto.figures import draw_timeline
    from stretto.schedules.language import Timeline, load_json_file

    for measured in sorted(folder.glob("*-measured.json")):
        name = measured.stem.removesuffix("-measured")
        pair = [measured, folder / f"{name}-simulated.json"]
        draw_timeline([load_json_file(Timeline, one) for one in pair], folder / f"{name}.png")
