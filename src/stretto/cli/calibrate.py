"""``stretto calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli import options as opt
from stretto.cli.application import app
from stretto.cli.output import print_json, print_pairs, working
from stretto.schedules.language import InvalidInput


@app.command("calibrate")
def calibrate_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Profile to write (JSON).")],
    tp: Annotated[int, typer.Option(help="Ranks that will share this machine.")] = 2,
    dtype: opt.DTypeOption = None,
    name: Annotated[str, typer.Option(help="Of the profile.")] = "host",
    as_json: opt.JsonOption = False,
) -> None:
    """Measure this machine into a profile: GEMMs, pushes, signals, collectives, host costs."""
    from stretto.runtime.calibration import calibrate_host, plan_for

    if tp < 1:
        raise InvalidInput(f"--tp is {tp}; give at least one rank.")
    if output.suffix != ".json" or not output.parent.is_dir():
        raise InvalidInput(f"--output must be a .json file in an existing folder, not {output}.")
    plan = plan_for(tp, dtype or "bf16")
    with working(f"measuring {len(plan.gemms)} GEMMs and the transport", quiet=as_json):
        machine = calibrate_host(plan, name=name)
    try:
        output.write_text(machine.to_json())
    except OSError as error:
        raise InvalidInput(f"{output} cannot be written: {error.strerror}.") from error
    if as_json:
        print_json({"profile": str(output), "name": machine.name})
        return
    transport = machine.transport("shared_memory")
    print_pairs(
        f"{machine.name}, written to {output}",
        [
            ("GEMM shapes", str(len(plan.gemms))),
            ("push of 1 MiB", f"{transport.put_us(1 << 20):,.1f} us"),
            ("signal, wait", f"{transport.signal_us:.1f} us, {transport.wait_us:.1f} us"),
        ],
    )
