"""How commands speak: one JSON object for machines, tables for people, Timelines as files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from stretto.schedules.language import Program, Timeline, to_json

__all__ = [
    "check_outputs_paths",
    "heading",
    "print_json",
    "print_pairs",
    "print_table",
    "progress",
    "save_timeline",
    "working",
]

console = Console(highlight=False)


def print_json(value: object) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_pairs(title: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Print names and values."""
    table = Table(
        title=escape(title), show_header=False, title_justify="left", box=None, pad_edge=False
    )
    table.add_column(style="dim")
    table.add_column()
    for name, value in pairs:
        table.add_row(escape(name), escape(value))
    console.print(table)


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1
) -> None:
    """Print rows; the first `left` columns are text, the others numbers."""
    table = Table(title=escape(title), title_justify="left", pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)


def heading(program: Program) -> str:
    """Return one line that says which Program this is."""
    sizes = " ".join(f"{name}={size}" for name, size in program.shape)
    return (
        f"{program.name} {program.variant}, TP{program.world_size}, {sizes}, {program.dtype}, "
        f"{program.transport}"
    )


@contextmanager
def working(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Show on the terminal that something is going on, and for how long."""
    with progress(quiet=quiet) as bar:
        bar.add_task(what, total=None)
        yield


def progress(*, quiet: bool = False) -> Progress:
    """Return a progress display on standard error (none if `quiet` or not a terminal)."""
    target = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=target,
        transient=True,
        disable=quiet or not target.is_terminal,
    )


def check_outputs_paths(figure: Path | None, trace: Path | None) -> None:
    """Refuse, before anything runs, files that could not be written afterwards."""
    from stretto.figures import check_figure_path, check_trace_path

    if figure is not None:
        check_figure_path(figure)
    if trace is not None:
        check_trace_path(trace)


def check_json_file(path: Path | None) -> None:
    """Refuse, before anything runs, a file that could not be written afterwards."""
    from stretto.figures.files import check_path

    if path is not None:
        check_path(path)


def write_json(path: Path | None, value: object) -> None:
    """Write a report, if a file was asked for."""
    from stretto.figures.files import write_whole

    if path is not None:
        write_whole(path, (json.dumps(value, indent=1) + "\n").encode())


def save_timeline(
    timelines: Sequence[Timeline], *, figure: Path | None, trace: Path | None
) -> dict[str, Any]:
    """Write the figure and the trace that were asked for; return what was written."""
    written: dict[str, Any] = {}
    if figure is not None:
        from stretto.figures import draw_timeline

        draw_timeline(timelines, figure)
        written["figure"] = str(figure)
    if trace is not None:
        if trace.suffix == ".json":
            from stretto.figures.files import write_whole

            for timeline in timelines:
                path = trace
                if timeline is not timelines[0]:
                    path = trace.with_stem(f"{trace.stem}-{timeline.origin}")
                write_whole(path, to_json(timeline, indent=1).encode())
        else:
            from stretto.figures import write_trace

            write_trace(timelines, trace)
        written["trace"] = str(trace)
    return written
