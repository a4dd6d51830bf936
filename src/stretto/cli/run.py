"""``stretto run``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from stretto.cli import options as opt
from stretto.cli.application import app
from stretto.cli.output import (
    check_outputs_paths,
    heading,
    print_json,
    print_pairs,
    print_table,
    save_timeline,
    working,
)
from stretto.schedules import verified
from stretto.schedules.language import InvalidInput, Program
from stretto.transports import load_transport

__all__ = ["measured_json", "program_here"]

DEFAULT_TRANSPORT = "shared_memory"


@app.command("run")
def run_command(
    schedule: opt.ScheduleArgument,
    variant: opt.VariantOption = None,
    tp: opt.TpOption = None,
    m: opt.RowsOption = None,
    n: opt.ColumnsOption = None,
    k: opt.InnerOption = None,
    global_n: opt.GlobalNOption = None,
    global_k: opt.GlobalKOption = None,
    preset: opt.PresetOption = None,
    dtype: opt.DTypeOption = None,
    transport: opt.TransportOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare every rank's output with float64.")
    ] = False,
    calls: Annotated[int, typer.Option(help="Calls back to back, with no barrier.")] = 1,
    iterations: Annotated[int, typer.Option(help="Measured executions.")] = 5,
    warmup: Annotated[int, typer.Option(help="Executions before.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a wait may take.")] = 30.0,
    mode: Annotated[
        str, typer.Option(help="On GPUs: captured in a CUDA graph, or eager.")
    ] = "graph",
    verify: opt.VerifyOption = True,
    trace: opt.TraceOption = None,
    figure: opt.FigureOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Execute a schedule with one process a rank (also under torchrun)."""
    from stretto.runtime.session import RunOptions, run_program

    check_outputs_paths(figure, trace)
    if iterations < 1 or warmup < 0 or timeout <= 0:
        raise InvalidInput("--iterations must be at least 1, --warmup at least 0, --timeout > 0.")
    if mode not in ("graph", "eager"):
        raise InvalidInput(f"--mode is {mode!r}; give graph or eager.")
    request = opt.Request(schedule, variant, tp, m, n, k, global_n, global_k, preset, dtype, calls)
    program = program_here(request, transport)
    if verify:
        verified(program, alone=True)  # a run has a workspace of its own
    settings = RunOptions(
        iterations=iterations,
        warmup=warmup,
        check=check,
        seed=seed,
        timeout_s=timeout,
        mode=mode,  # type: ignore[arg-type]
    )
    with working(f"running {program.world_size} ranks", quiet=as_json):
        result = run_program(program, settings)
    if result is None:  # under torchrun rank 0 speaks
        return
    written = save_timeline([result.timeline], figure=figure, trace=trace)
    answer = measured_json(program, result) | written
    if as_json:
        print_json(answer)
        return
    pairs = [
        ("makespan", f"{result.makespan_us:,.1f} us, median of {len(result.makespans_us)}"),
        ("spread", f"{min(result.makespans_us):,.1f} to {max(result.makespans_us):,.1f} us"),
        ("exposed communication", f"{result.timeline.exposed_comm_us:,.1f} us"),
        ("clock error", f"{result.timeline.clock_error_us:.2f} us"),
    ]
    if check:
        worst = max(result.checks, key=lambda one: one.largest_error)
        pairs.append(
            (
                "check",
                f"all {len(result.checks)} ranks right; largest error "
                f"{worst.largest_error:.0%} of its bound, relative {worst.relative_error:.1e}",
            )
        )
    pairs += list(written.items())
    print_pairs(heading(program), pairs)
    print_table(
        "per rank, us",
        ["rank", "compute", "exposed comm", "idle"],
        [
            [str(share.rank), *(f"{value:,.1f}" for value in share[1:])]
            for share in result.timeline.shares
        ],
    )


def program_here(request: opt.Request, transport: str | None) -> Program:
    """Build the Program for a transport of this machine."""
    chosen = load_transport(transport or DEFAULT_TRANSPORT)
    return opt.build_program(request, chosen.offered())


def measured_json(program: Program, result: Any) -> dict[str, Any]:
    """Return a measurement as plain values."""
    return {
        "schedule": program.name,
        "variant": program.variant,
        "tp": program.world_size,
        **program.sizes,
        "dtype": program.dtype,
        "transport": program.transport,
        "calls": program.calls,
        "makespan_us": result.makespan_us,
        "makespans_us": list(result.makespans_us),
        "exposed_comm_us": result.timeline.exposed_comm_us,
        "clock_error_us": result.timeline.clock_error_us,
        "checked": bool(result.checks),
        "largest_error_of_bound": max((one.largest_error for one in result.checks), default=None),
        "ranks": [
            {
                "rank": share.rank,
                "compute_us": share.compute_us,
                "exposed_comm_us": share.exposed_comm_us,
                "idle_us": share.idle_us,
            }
            for share in result.timeline.shares
        ],
    }
