"""The application: its sub-commands, and what every error ends in."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Annotated

import typer
from rich.console import Console

import stretto
from stretto.schedules.language import StrettoError

__all__ = ["app", "main"]

COMMANDS = (
    "doctor",
    "run",
    "simulate",
    "compare",
    "verify",
    "calibrate",
    "machines",
    "figure",
    "bench",
    "bench_gpu",
)

app = typer.Typer(
    name="stretto",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Overlap communication with compute in tensor-parallel layers: run it, simulate it, "
    "compare the two.",
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(stretto.__version__)
        raise typer.Exit


@app.callback()
def _application(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and leave.", is_eager=True, callback=_show_version
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; errors are one sentence, exit code 2 for bad input, 1 for a failure."""
    for name in COMMANDS:  # each module adds its commands to `app`
        importlib.import_module(f"stretto.cli.{name}")
    for_machines = "--json" in sys.argv[1:]
    try:
        code = app(prog_name="stretto", standalone_mode=not for_machines)
        sys.exit(code if isinstance(code, int) else 0)
    except StrettoError as error:
        _say(str(error), error.details)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _say("Interrupted; all ranks have been stopped.")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "format_message"):  # of typer: how the command line was used
            raise
        _say(error.format_message())
        sys.exit(getattr(error, "exit_code", 2))


def _say(message: str, details: tuple[str, ...] = ()) -> None:
    if "--json" in sys.argv[1:]:
        typer.echo(json.dumps({"error": message} | ({"details": details} if details else {})))
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]stretto:[/] {_escaped(message)}")
    for line in details:
        console.print(f"  {_escaped(line)}")


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
