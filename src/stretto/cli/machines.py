"""``stretto machines``: list, show and import profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli import options as opt
from stretto.cli.application import app
from stretto.cli.output import print_json, print_pairs, print_table
from stretto.schedules.language import InvalidInput
from stretto.sim.machine import Machine, available_profiles, describe

machines = typer.Typer(help="List, show and import machine profiles.", no_args_is_help=False)
app.add_typer(machines, name="machines", invoke_without_command=True)


@machines.callback()
def list_machines(context: typer.Context, as_json: opt.JsonOption = False) -> None:
    """List the shipped profiles, unless a sub-command is named."""
    if context.invoked_subcommand is not None:
        return
    loaded = [Machine.load(name) for name in available_profiles()]
    if as_json:
        print_json(
            [
                {
                    "name": one.name,
                    "description": one.profile.description,
                    "domain_size": one.domain_size,
                    "transports": list(one.profile.transports),
                }
                for one in loaded
            ]
        )
        return
    print_table(
        "machine profiles",
        ["name", "what", "transports", "ranks", "validated"],
        [
            [
                one.name,
                one.profile.description,
                ", ".join(one.profile.transports),
                str(one.domain_size),
                "yes" if one.profile.validation else "no",
            ]
            for one in loaded
        ],
        left=3,
    )


@machines.command("show")
def show_machine(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME_OR_FILE", help="A profile.", autocompletion=opt.complete_machine
        ),
    ],
    as_json: opt.JsonOption = False,
) -> None:
    """Show every number of a profile and where it comes from."""
    machine = Machine.load(name)
    if as_json:
        typer.echo(machine.to_json())
        return
    print_table(
        f"{machine.name}: {machine.profile.description}",
        ["section", "number", "value", "unit", "origin", "source"],
        [[str(part) for part in row] for row in describe(machine)],
        left=6,
    )


@machines.command("import")
def import_machine(
    folder: Annotated[Path, typer.Argument(help="Folder in the aiconfigurator layout.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Profile to write (JSON).")],
    name: Annotated[str, typer.Option(help="Of the new profile.")],
    as_json: opt.JsonOption = False,
) -> None:
    """Make a profile from an aiconfigurator data folder."""
    from stretto.sim.machine.importers import import_aiconfigurator

    if output.suffix != ".json" or not output.parent.is_dir():
        raise InvalidInput(f"--output must be a .json file in an existing folder, not {output}.")
    machine = import_aiconfigurator(folder, name=name)
    output.write_text(machine.to_json())
    if as_json:
        print_json({"profile": str(output), "name": machine.name})
    else:
        print_pairs(f"{machine.name}, written to {output}", [])
