"""``stretto bench``: measurements that claims rest on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli import options as opt
from stretto.cli.application import app
from stretto.cli.output import print_json, print_table, progress, working
from stretto.schedules.language import InvalidInput, Unavailable

if TYPE_CHECKING:
    from stretto.runtime.bench.ag_gemm import BenchPlan

bench = typer.Typer(
    help="Side-by-side measurements; each states its protocol.", no_args_is_help=True
)
app.add_typer(bench, name="bench")


@bench.command("simulator")
def bench_simulator(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSON too.")] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Time the simulator: operations per second at TP 2, 8, 16 and 72."""
    from stretto.runtime.bench.simulator import PROTOCOL, measure_simulator

    with working("simulating", quiet=as_json):
        report = measure_simulator()
    if output is not None:
        import json

        output.write_text(json.dumps(report, indent=1) + "\n")
    if as_json:
        print_json(report)
        return
    print_table(
        PROTOCOL,
        ["case", "TP", "operations", "build ms", "simulate ms", "operations/s"],
        [
            [
                row["case"],
                str(row["tp"]),
                f"{row['operations']:,}",
                f"{row['build_ms']:.1f}",
                f"{row['simulate_ms']:.1f}",
                f"{row['operations_per_s']:,.0f}",
            ]
            for row in report["rows"]
        ],
    )


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
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSON too.")] = None,
    figure: opt.FigureOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Measure ag-gemm on GPUs beside NCCL, torch's fused operator, and QuACK if installed."""
    import json

    from stretto.figures import CurvePoint, check_figure_path, speedup_curve
    from stretto.runtime.bench.ag_gemm import BenchPlan, bench_ag_gemm
    from stretto.schedules.presets import projection

    if figure is not None:
        check_figure_path(figure)
    if rounds < 3:
        raise InvalidInput(f"--rounds is {rounds}; give at least 3.")
    if any(m < 1 for m in rows or ()):
        raise InvalidInput(f"-m is {min(rows or [1])}; give at least 1 row.")
    names = presets or ["kimi-k3/kda", "kimi-k3/mla", "llama-3.1-70b/qkv", "qwen3-32b/qkv"]
    plan = BenchPlan(
        tp,
        tuple((name, *projection(name, tp)) for name in names),
        tuple(rows or (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)),
        rounds=rounds,
        partial=output,
    )
    if predict_only:
        _predict_ag_gemm(plan, machine, widen, output, as_json=as_json)
        return
    _require_gpus("ag-gemm")
    if machine is not None:
        plan = _predicted(plan, machine, widen)
    with working("measuring", quiet=as_json):
        report = bench_ag_gemm(plan)
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")
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
    return replace(plan, predicted=tuple(rows), profile=machine.name)


def _predict_ag_gemm(
    plan: BenchPlan,
    machine: str | None,
    widen: str | None,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    import json
    from datetime import date

    if machine is None:
        raise InvalidInput("Name the profile that predicts: --machine h200-sxm-x2, say.")
    with working("predicting", quiet=as_json):
        plan = _predicted(plan, machine, widen)
    report = {
        "what": "ag-gemm, predicted",
        "profile": plan.profile,
        "date": date.today().isoformat(),
        "world_size": plan.world_size,
        "dtype": plan.dtype,
        "rows": list(plan.predicted),
    }
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")
    if as_json:
        print_json(report)
        return
    print_table(
        f"predicted by {plan.profile}, TP{plan.world_size}, {plan.dtype}; us a call",
        ["projection", "m", "gemm only", *plan.variants],
        [
            [
                row["projection"],
                str(row["m"]),
                f"{row['gemm_us']:,.1f}",
                *(f"{row['us'][variant]:,.1f}" for variant in plan.variants),
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
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSON too.")] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Measure what a call costs the host, by operation, on GPUs."""
    _require_gpus("host")
    from stretto.runtime.bench.host import measure_host

    with working("measuring", quiet=as_json):
        report = measure_host(tp)
    if output is not None:
        import json

        output.write_text(json.dumps(report, indent=1) + "\n")
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
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSON too.")] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Measure ways to signal and to wait between two GPUs, idle and beside GEMMs."""
    import json

    from stretto.runtime.bench.signals import SignalsPlan, measure_signals

    if rounds < 3:
        raise InvalidInput(f"--rounds is {rounds}; give at least 3.")
    if output is not None and not output.parent.is_dir():
        raise InvalidInput(f"--output must be in an existing folder, not {output}.")
    kept = None if output is None else str(output.with_suffix(""))
    report = measure_signals(SignalsPlan(rounds, partial=kept, progress=not as_json))
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")
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


@bench.command("verify")
def bench_verify(
    tp: Annotated[
        list[int] | None, typer.Option("--tp", help="Numbers of ranks; by default 2, 4 and 8.")
    ] = None,
    real: Annotated[
        bool, typer.Option(help="Run a sample of mutants in real processes (needs torch).")
    ] = True,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSON too.")] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Judge the verifier by mutants of every shipped schedule, and time it (minutes)."""
    from stretto.runtime.bench.verify import PROTOCOL, WORLD_SIZES, measure_verifier

    with progress(quiet=as_json) as bar:
        task = bar.add_task("mutants", total=None)
        report = measure_verifier(
            world_sizes=tp or WORLD_SIZES,
            real=real,
            note=lambda text: bar.update(task, description=text),
        )
    if output is not None:
        import json

        output.write_text(json.dumps(report, indent=1) + "\n")
    if as_json:
        print_json(report)
        return
    print_table(
        PROTOCOL,
        ["schedule", "mutants", "refused", "reported", "shown", "missed", "harmless", "verify ms"],
        [
            [
                f"{row['variant']} TP{row['tp']}",
                str(row["mutants"]),
                str(row["refused"]),
                str(row["reported"]),
                str(row["reported"] - row["not_shown"]),
                str(row["missed"]),
                str(row["harmless"]),
                f"{row['verify_ms']:.1f}",
            ]
            for row in report["rows"]
        ],
    )
    print_table(
        "by mistake",
        ["mistake", "refused", "shown", "not shown", "missed", "harmless"],
        [[str(value) for value in row.values()] for row in report["families"]],
    )
    for name in ("missed", "not_shown", "harmless"):
        if report[name]:
            print_table(
                f"{name.replace('_', ' ')} mutants", ["mutant"], [[one] for one in report[name]]
            )
    if report["real"] is not None:
        print_table(
            "a sample in real processes over shared_memory, TP2",
            ["variant", "mistake", "mutant", "reported", "ended"],
            [
                [
                    row["variant"],
                    row["family"],
                    row["mutant"],
                    ", ".join(row["reported"]),
                    row["ended"],
                ]
                for row in report["real"]
            ],
            left=5,
        )
    print_table(
        "speed: ring, median of five",
        ["TP", "calls", "operations", "s"],
        [
            [str(row["tp"]), str(row["calls"]), f"{row['operations']:,}", f"{row['verify_s']:.3f}"]
            for row in report["speed"]
        ],
        left=0,
    )
