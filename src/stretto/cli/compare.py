"""``stretto compare``: calibrate, predict, run, and hold one against the other."""

from __future__ import annotations

import os
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
    progress,
    save_timeline,
)
from stretto.cli.run import measured_json, program_here
from stretto.cli.simulate import prediction_json
from stretto.schedules import verified
from stretto.schedules.language import Comparison, InvalidInput, Program, compare_timelines
from stretto.sim import Machine, SimResult, simulate
from stretto.transports import load_transport


@app.command("compare")
def compare_command(
    schedule: opt.ScheduleArgument,
    variant: opt.VariantOption = None,
    machine: opt.MachineOption = None,
    tp: opt.TpOption = None,
    m: opt.RowsOption = None,
    n: opt.ColumnsOption = None,
    k: opt.InnerOption = None,
    global_n: opt.GlobalNOption = None,
    global_k: opt.GlobalKOption = None,
    preset: opt.PresetOption = None,
    dtype: opt.DTypeOption = None,
    transport: opt.TransportOption = None,
    calls: Annotated[int, typer.Option(help="Calls back to back.")] = 1,
    iterations: Annotated[int, typer.Option(help="Measured executions.")] = 11,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    verify: opt.VerifyOption = True,
    trace: opt.TraceOption = None,
    figure: opt.FigureOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Run a schedule, predict it, and report the error of the prediction.

    Without --machine this machine is calibrated first.  The prediction is made before the run.
    The figure shows the measured timeline above the simulated one.
    """
    from stretto.runtime.calibration import calibrate_gpus, calibrate_host, gpu_plan, plan_for
    from stretto.runtime.session import RunOptions, run_programs

    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise InvalidInput("compare starts its own processes; call it without torchrun.")
    check_outputs_paths(figure, trace)
    if iterations < 1:
        raise InvalidInput("--iterations must be at least 1.")
    request = opt.Request(schedule, variant, tp, m, n, k, global_n, global_k, preset, dtype, calls)
    program = program_here(request, transport)
    unfused = _baseline(request, program)
    programs = [program] if unfused in (None, program) else [program, unfused]
    for one in programs if verify else ():
        verified(one, alone=True)  # each has a workspace of its own
    with progress(quiet=as_json) as bar:
        on_gpu = _on_gpus(program)
        if on_gpu and machine is None:
            task = bar.add_task("calibrating these GPUs (--machine NAME leaves it out)", total=None)
            target = calibrate_gpus(gpu_plan(program.world_size, (program.dtype,), progress=False))
            bar.remove_task(task)
        elif on_gpu:
            target = _profile_of_gpus(str(machine))
        elif machine is None or machine == "host":
            task = bar.add_task(f"calibrating this machine for TP{program.world_size}", total=None)
            plan = plan_for(program.world_size, program.dtype, programs, grid=False)
            target = calibrate_host(plan)
            bar.remove_task(task)
        else:
            target = _own_machine(machine)
        predicted = simulate(program, target, unfused=unfused, mode="graph" if on_gpu else "eager")
        bar.add_task(f"running {program.world_size} ranks", total=None)
        results = run_programs(
            programs, RunOptions(iterations=iterations, check=_checkable(program), seed=seed)
        )
    if not results:
        return
    comparison = compare_timelines(results[0].timeline, predicted.timeline)
    timelines = [results[0].timeline, predicted.timeline]
    written = save_timeline(timelines, figure=figure, trace=trace)
    if as_json:
        print_json(_json(program, results, predicted, comparison) | written)
    else:
        _print(program, results, predicted, comparison, written)


def _baseline(request: opt.Request, program: Program) -> Program | None:
    """Return the unfused Program, on the library's collectives where the transport has none."""
    if program.world_size < 2:
        return None
    for name in (program.transport, "rccl"):
        backend = load_transport(name)
        if backend.available().usable:
            unfused = opt.build_unfused(request, backend.offered())
            if unfused is not None:
                return unfused
    return None


def _checkable(program: Program) -> bool:
    from stretto.runtime.reference import has_reference

    return has_reference(program)


def _on_gpus(program: Program) -> bool:
    """Whether a run is on GPUs; the library's collectives are where torch finds any."""
    if program.transport == "rccl":
        import torch

        if not torch.cuda.is_available():
            raise InvalidInput(
                "compare predicts collectives of GPUs; on a CPU use --transport shared_memory."
            )
        return True
    return program.transport != "shared_memory"


def _profile_of_gpus(name: str) -> Machine:
    """Load the profile that predicts a run on this machine's GPUs."""
    machine = Machine.load(name)
    if machine.kind != "gpu":
        raise InvalidInput(f"Machine {machine.name!r} has no GPUs; name a profile that has.")
    return machine


def _own_machine(name: str) -> Machine:
    """Load a profile and refuse one that was made on another machine than this."""
    from stretto.sim.machine import host_fingerprint

    machine = Machine.load(name)
    if machine.kind != "cpu":
        raise InvalidInput(
            f"Machine {machine.name!r} is not this one, so a run here cannot be compared with it; "
            "leave --machine out to calibrate this machine, or use simulate."
        )
    machine.check_host(host_fingerprint())
    return machine


def _json(
    program: Program, results: list[Any], predicted: SimResult, comparison: Comparison
) -> dict[str, Any]:
    return {
        "measured": measured_json(program, results[0]),
        "simulated": prediction_json(predicted),
        "makespan_error": comparison.error,
        "kinds": [
            {
                "kind": one.kind,
                "count": one.count,
                "measured_us": one.measured_us,
                "simulated_us": one.simulated_us,
                "error": one.error,
            }
            for one in comparison.kinds
        ],
        "same_operations": comparison.same_operations,
        "same_matching": comparison.same_matching,
        "same_order": comparison.same_order,
        "unfused": None if len(results) < 2 else measured_json(program, results[1]),
    }


def _print(
    program: Program,
    results: list[Any],
    predicted: SimResult,
    comparison: Comparison,
    written: dict[str, Any],
) -> None:
    run = results[0]
    low, high = min(run.makespans_us), max(run.makespans_us)
    agreed = all((comparison.same_operations, comparison.same_matching, comparison.same_order))
    pairs = [
        ("measured", f"{run.makespan_us:,.0f} us ({low:,.0f} to {high:,.0f} us)"),
        ("predicted", f"{predicted.makespan_us:,.0f} us before the run"),
        ("error of the prediction", f"{comparison.error:+.1%}"),
        (
            "recorded alike",
            "operations, signals and order agree" if agreed else "NO: the records differ",
        ),
    ]
    if run.checks:
        pairs.append(("numbers", f"right on all {len(run.checks)} ranks (float64 reference)"))
    if len(results) > 1:
        unfused = results[1].makespan_us
        pairs.append(
            (
                "unfused, measured",
                f"{unfused:,.0f} us ({unfused / run.makespan_us:.2f}x); predicted "
                f"{predicted.unfused_us:,.0f} us",
            )
        )
    pairs += list(written.items())
    print_pairs(heading(program), pairs)
    print_table(
        "per kind of operation",
        ["kind", "count", "measured us", "simulated us", "error"],
        [
            [
                one.kind,
                str(one.count),
                f"{one.measured_us:,.1f}",
                f"{one.simulated_us:,.1f}",
                "" if one.error is None else f"{one.error:+.0%}",
            ]
            for one in comparison.kinds
        ],
    )
