"""``stretto figure``: redraw a saved Timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli import options as opt
from stretto.cli.application import app
from stretto.cli.output import print_json, print_pairs
from stretto.schedules.language import Timeline, load_json_file


@app.command("figure")
def figure_command(
    timelines: Annotated[
        list[Path],
        typer.Argument(metavar="TIMELINE.json...", help="Saved by --trace FILE.json; top first."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help=".png, .svg or .pdf to write.")],
    as_json: opt.JsonOption = False,
) -> None:
    """Draw saved timelines one above the other, on one time axis."""
    from stretto.figures import check_figure_path, draw_timeline

    check_figure_path(output)
    loaded = [load_json_file(Timeline, path) for path in timelines]
    draw_timeline(loaded, output)
    if as_json:
        print_json({"figure": str(output)})
    else:
        print_pairs(f"drawn to {output}", [])
