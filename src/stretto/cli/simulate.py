"""``stretto simulate``."""

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
from stretto.schedules.language import InvalidInput, Program
from stretto.sim import Machine, SimResult, Skew, simulate

__all__ = ["predict", "prediction_json"]


@app.command("simulate")
def simulate_command(
    schedule: opt.ScheduleArgument,
    machine: Annotated[
        str,
        typer.Option(
            help="Machine profile: a shipped name (see: stretto machines) or a JSON file.",
            autocompletion=opt.complete_machine,
        ),
    ],
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
    mode: Annotated[str, typer.Option(help="Launches: eager or graph.")] = "graph",
    calls: Annotated[int, typer.Option(help="Calls back to back.")] = 1,
    slow_rank: Annotated[
        str | None, typer.Option(help="RANK:FACTOR slows one rank's compute, such as 3:1.1.")
    ] = None,
    jitter: Annotated[float, typer.Option(help="Relative deviation of every duration.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the jitter.")] = 0,
    trace: opt.TraceOption = None,
    figure: opt.FigureOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Predict what a schedule does on a machine, owned or not."""
    check_outputs_paths(figure, trace)
    request = opt.Request(schedule, variant, tp, m, n, k, global_n, global_k, preset, dtype, calls)
    target = Machine.load(machine)
    program, result = predict(
        request,
        target,
        transport=transport,
        mode=mode,
        skew=_skew(slow_rank, jitter, seed, tp),
        quiet=as_json,
    )
    written: dict[str, Any] = {}
    if figure is not None or trace is not None:
        with working("drawing", quiet=as_json):
            written = save_timeline([result.timeline], figure=figure, trace=trace)
    if as_json:
        print_json(prediction_json(result) | written)
    else:
        _print(program, result, written)


def predict(
    request: opt.Request,
    machine: Machine,
    *,
    transport: str | None,
    mode: str,
    skew: Skew,
    quiet: bool,
) -> tuple[Program, SimResult]:
    """Build the Program for the machine's transport and simulate it beside its baseline."""
    if mode not in ("eager", "graph"):
        raise InvalidInput(f"There is no mode {mode!r}; choose eager or graph.")
    model = machine.transport(transport or machine.default_transport(request.variant))
    program = opt.build_program(request, model.capabilities)
    unfused = _baseline(request, machine, program)
    with working("simulating", quiet=quiet):
        result = simulate(
            program,
            machine,
            mode="eager" if mode == "eager" else "graph",
            skew=skew,
            unfused=unfused,
        )
    return program, result


def _baseline(request: opt.Request, machine: Machine, program: Program) -> Program | None:
    """Return the unfused Program on the transport that the machine has for collectives."""
    if program.world_size == 1:
        return None
    model = machine.transport(machine.default_transport("unfused"))
    return opt.build_unfused(request, model.capabilities)


def _skew(slow_rank: str | None, jitter: float, seed: int, tp: int | None) -> Skew:
    if not 0.0 <= jitter < 1.0:
        raise InvalidInput(f"--jitter is {jitter}; give a fraction from 0 to 1.")
    slowdown = {}
    if slow_rank is not None:
        rank, separator, factor = slow_rank.partition(":")
        try:
            slowdown = {int(rank): float(factor)}
        except ValueError:
            separator = ""
        if not separator or any(value <= 0 for value in slowdown.values()):
            raise InvalidInput(f"--slow-rank is {slow_rank!r}; give RANK:FACTOR, such as 3:1.1.")
        if not 0 <= int(rank) < (tp or 2):
            raise InvalidInput(f"--slow-rank names rank {rank}, but there are {tp or 2} ranks.")
    return Skew(slowdown=slowdown, jitter=jitter, seed=seed)


def prediction_json(result: SimResult) -> dict[str, Any]:
    """Return a prediction as plain values."""
    program = result.program
    return {
        "schedule": program.name,
        "variant": program.variant,
        "tp": program.world_size,
        **program.sizes,
        "dtype": program.dtype,
        "machine": result.machine.name,
        "transport": result.transport,
        "mode": result.mode,
        "calls": program.calls,
        "makespan_us": result.makespan_us,
        "roof_us": result.roof_us,
        "regret": result.regret,
        "exposed_comm_us": result.timeline.exposed_comm_us,
        "unfused_us": result.unfused_us,
        "unfused_transport": result.unfused_transport,
        "overlap_efficiency": result.overlap_efficiency,
        "numbers": result.validity,
        "validation": result.machine.validation_note,
        "ranks": [
            {
                "rank": share.rank,
                "compute_us": share.compute_us,
                "exposed_comm_us": share.exposed_comm_us,
                "idle_us": share.idle_us,
            }
            for share in result.shares
        ],
    }


def _print(program: Program, result: SimResult, written: dict[str, Any]) -> None:
    pairs = [
        ("machine", f"{result.machine.name} ({result.mode} launches)"),
        ("makespan", f"{result.makespan_us:,.1f} us"),
        ("roof", f"{result.roof_us:,.1f} us (regret {result.regret:.1%})"),
        ("exposed communication", f"{result.timeline.exposed_comm_us:,.1f} us"),
    ]
    if result.unfused_us is not None:
        efficiency = result.overlap_efficiency
        pairs.append(
            (
                "unfused",
                f"{result.unfused_us:,.1f} us over {result.unfused_transport} "
                f"({result.unfused_us / result.makespan_us:.2f}x)",
            )
        )
        pairs.append(
            ("overlap efficiency", "nothing to save" if efficiency is None else f"{efficiency:.0%}")
        )
    pairs.append(("numbers used", result.validity))
    pairs.append(("prediction", result.machine.validation_note))
    pairs += list(written.items())
    print_pairs(heading(program), pairs)
    shares = result.shares
    if len(shares) <= 16:
        print_table(
            "per rank, us",
            ["rank", "compute", "exposed comm", "idle"],
            [
                [
                    str(share.rank),
                    f"{share.compute_us:,.1f}",
                    f"{share.exposed_comm_us:,.1f}",
                    f"{share.idle_us:,.1f}",
                ]
                for share in shares
            ],
        )
