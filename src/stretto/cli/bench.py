"""``stretto bench``: measurements that claims rest on; those on GPUs are in ``bench_gpu``."""

from __future__ import annotations

from typing import Annotated

import typer

from stretto.cli import options as opt
from stretto.cli.application import app
from stretto.cli.output import (
    check_json_file,
    print_json,
    print_table,
    progress,
    working,
    write_json,
)

bench = typer.Typer(
    help="Side-by-side measurements; each states its protocol.", no_args_is_help=True
)
app.add_typer(bench, name="bench")


@bench.command("simulator")
def bench_simulator(
    output: opt.JsonFileOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Time the simulator: operations per second at TP 2, 8, 16 and 72."""
    check_json_file(output)
    from stretto.runtime.bench.simulator import PROTOCOL, measure_simulator

    with working("simulating", quiet=as_json):
        report = measure_simulator()
    write_json(output, report)
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


@bench.command("verify")
def bench_verify(
    tp: Annotated[
        list[int] | None, typer.Option("--tp", help="Numbers of ranks; by default 2, 4 and 8.")
    ] = None,
    real: Annotated[
        bool, typer.Option(help="Run a sample of mutants in real processes (needs torch).")
    ] = True,
    output: opt.JsonFileOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Judge the verifier by mutants of every shipped schedule, and time it (minutes)."""
    check_json_file(output)
    from stretto.runtime.bench.verify import PROTOCOL, WORLD_SIZES, measure_verifier

    with progress(quiet=as_json) as bar:
        task = bar.add_task("mutants", total=None)
        report = measure_verifier(
            world_sizes=tp or WORLD_SIZES,
            real=real,
            note=lambda text: bar.update(task, description=text),
        )
    write_json(output, report)
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
