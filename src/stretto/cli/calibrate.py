"""``stretto calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli import options as opt
from stretto.cli.application import app
from stretto.cli.output import print_json, print_pairs, working
from stretto.schedules.language import InvalidInput, UnknownName
from stretto.sim.machine import Machine

TRANSPORTS = ("shared_memory", "copy_engine")
MIB = 1 << 20


@app.command("calibrate")
def calibrate_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Profile to write (JSON).")],
    tp: Annotated[int, typer.Option(help="Ranks that will share this machine.")] = 2,
    dtype: opt.DTypeOption = None,
    transport: Annotated[
        str | None,
        typer.Option(
            help="copy_engine measures NVIDIA GPUs, shared_memory the CPU; by default GPUs where "
            "there are any, unless --tp is 1."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the profile.")] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Measure this machine into a profile: GEMMs, pushes, signals, collectives, host costs."""
    if tp < 1:
        raise InvalidInput(f"--tp is {tp}; give at least one rank.")
    if output.suffix != ".json" or not output.parent.is_dir():
        raise InvalidInput(f"--output must be a .json file in an existing folder, not {output}.")
    chosen = transport or _default_transport(tp)
    if chosen not in TRANSPORTS:
        raise UnknownName("transport to calibrate", chosen, TRANSPORTS)
    if chosen == "copy_engine":
        machine, facts = _calibrated_gpus(output, tp, dtype, name, quiet=as_json)
    else:
        machine, facts = _calibrated_host(tp, dtype, name, quiet=as_json)
    try:
        output.write_text(machine.to_json())
    except OSError as error:
        raise InvalidInput(f"{output} cannot be written: {error.strerror}.") from error
    if as_json:
        print_json({"profile": str(output), "name": machine.name})
        return
    costs = machine.transport(chosen)
    facts += [
        ("push of 1 MiB", f"{costs.put_us(MIB):,.1f} us"),
        ("signal, wait", f"{costs.signal_us:.1f} us, {costs.wait_us:.1f} us"),
    ]
    print_pairs(f"{machine.name}, written to {output}", facts)


def _default_transport(tp: int) -> str:
    """Return ``copy_engine`` where GPUs can be used by several ranks, else ``shared_memory``."""
    from stretto.transports import load_transport

    usable = tp > 1 and load_transport("copy_engine").available().usable
    return "copy_engine" if usable else "shared_memory"


def _calibrated_host(
    tp: int, dtype: str | None, name: str | None, *, quiet: bool
) -> tuple[Machine, list[tuple[str, str]]]:
    from stretto.runtime.calibration import calibrate_host, plan_for

    plan = plan_for(tp, dtype or "bf16")
    with working(f"measuring {len(plan.gemms)} GEMMs and the transport", quiet=quiet):
        machine = calibrate_host(plan, name=name or "host")
    return machine, [("GEMM shapes", str(len(plan.gemms)))]


def _calibrated_gpus(
    output: Path, tp: int, dtype: str | None, name: str | None, *, quiet: bool
) -> tuple[Machine, list[tuple[str, str]]]:
    """Measure; the ranks say on stderr how far they are."""
    from stretto.runtime.calibration import calibrate_gpus, gpu_plan

    dtypes = (dtype,) if dtype else ("bf16", "fp16")
    plan = gpu_plan(tp, dtypes, partial=str(output.with_suffix("")), progress=not quiet)
    machine = calibrate_gpus(plan, name=name)
    profile, push = machine.profile, machine.transport("copy_engine")
    tables = [table for gemm in profile.compute.gemm.values() for table in gemm.tables]
    facts = [
        ("GEMM times", str(sum(len(site.m) for table in tables for site in table.sites))),
        *(
            (f"best GEMM, {kind}", f"{peak.value:,.0f} TFLOP/s")
            for kind, peak in profile.compute.peak_tflops.items()
        ),
        ("link", f"{profile.fabric.egress_gb_per_s.value:,.0f} GB/s"),
        ("GEMM beside pushes", f"{push.gemm_slowdown_beside_put:.1%} slower"),
        ("eager operation", f"{machine.host.enqueue_us('eager'):.1f} us"),
        ("graph launch", f"{machine.host.call_us('graph'):.1f} us"),
        ("figures", str(output.with_suffix(".figures.json"))),
        ("note", profile.provenance.note),
    ]
    return machine, facts
