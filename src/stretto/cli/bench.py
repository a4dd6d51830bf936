"""``stretto bench``: measurements that claims rest on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli import options as opt
from stretto.cli.application import app
from stretto.cli.output import print_json, print_table, working

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
