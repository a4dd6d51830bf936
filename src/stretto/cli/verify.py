"""``stretto verify``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from stretto.cli import options as opt
from stretto.cli.application import app
from stretto.cli.output import (
    check_outputs_paths,
    console,
    heading,
    print_json,
    print_pairs,
    save_timeline,
    working,
)
from stretto.schedules import (
    SCHEDULES,
    Program,
    Verdict,
    check_timeline,
    load_schedule,
    verify,
)
from stretto.schedules.language import (
    ALL_COLLECTIVES,
    ALL_VERBS,
    Capabilities,
    InvalidInput,
    Put,
    Signal,
    Timeline,
    Wait,
    load_json_file,
    to_json,
)
from stretto.schedules.verifier import Finding, Place

_EVERYTHING = Capabilities("any", ALL_VERBS, ALL_COLLECTIVES, signal_orders_puts=True)
"""Of no transport in particular."""

_MOST_REDUNDANT = 20_000
"""Redundancy is looked for unasked up to so many operations times candidates."""


@app.command("verify")
def verify_command(
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
    calls: Annotated[
        int | None,
        typer.Option(help="Calls to look at; by default as many as decide over any number."),
    ] = None,
    then: Annotated[
        list[str] | None,
        typer.Option(
            "--then",
            metavar="SCHEDULE[:VARIANT]",
            help="Another schedule that takes turns with it on one workspace; may be repeated.",
        ),
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Nobody else uses its workspace: no contract to keep.")
    ] = False,
    sms: Annotated[
        int | None, typer.Option(help="Multiprocessors of a device, to look for full ones.")
    ] = None,
    queues: Annotated[
        int | None, typer.Option(help="Hardware queues that a rank's streams share.")
    ] = None,
    redundant: Annotated[
        bool | None,
        typer.Option(
            "--redundant/--no-redundant",
            help="Look for synchronisation that is not needed; by default where it is quick.",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Hold a recorded timeline (--trace FILE.json of a run) against it too."),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the counterexample (.png, .svg or .pdf).")
    ] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Prove a schedule free of races, deadlocks and unsafe reuse, or show the counterexample.

    Exit code 0 if it is safe, 1 if not.
    """
    check_outputs_paths(figure, None)
    _check_numbers(calls=calls, sms=sms, queues=queues)
    request = opt.Request(schedule, variant, tp, m, n, k, global_n, global_k, preset, dtype)
    programs, capabilities = _programs(request, then or [], transport, machine)
    if redundant is None:
        redundant = len(programs) == 1 and _is_quick(programs[0])
    with working("verifying", quiet=as_json):
        verdict = verify(
            programs,
            calls=calls,
            alone=alone,
            capabilities=capabilities,
            sms=sms,
            hardware_queues=queues,
            redundant=redundant,
        )
    recorded: tuple[Finding, ...] | None = None
    if record is not None:
        recorded = check_timeline(load_json_file(Timeline, record), programs[0])
    written: dict[str, Any] = {}
    if figure is not None and verdict.counterexample is not None:
        written = save_timeline([verdict.counterexample], figure=figure, trace=None)
    drawn = verdict.counterexample.notes[:1] if verdict.counterexample and written else ()
    if as_json:
        checked = None if recorded is None else [asdict(finding) for finding in recorded]
        print_json(json.loads(to_json(verdict)) | {"record": checked} | written)
    else:
        pairs = _summary(verdict, recorded) + list(written.items())
        if figure is not None and not written:
            why = "there is no error" if verdict.safe else "no error shows in a run"
            pairs.append(("figure", f"not drawn: {why}"))
        print_pairs(_heading(programs), pairs)
        for finding in (*verdict.findings, *(recorded or ())):
            _print_finding(finding, drawn=finding.message in drawn)
        _print_redundant(verdict)
    if not verdict.safe or recorded:
        raise typer.Exit(1)


# ---- what is verified ----------------------------------------------------------------------------


def _programs(
    request: opt.Request, then: Sequence[str], transport: str | None, machine: str | None
) -> tuple[list[Program], Capabilities]:
    """Build the schedule, and those that take turns with it, for the same shape."""
    found = load_schedule(request.schedule, request.variant)
    capabilities = _capabilities(transport, machine, request.variant)
    if isinstance(found, Program):
        if transport is None and machine is None:
            capabilities = replace(_EVERYTHING, transport=found.transport)
    else:
        request = _sized(request)
    programs = [opt.build_program(request, capabilities)]
    for other in then:
        name, variant = other, None
        if not other.endswith(".json") and ".py:" not in other:
            name, _, variant = other.partition(":")
        if isinstance(found, Program) and name in SCHEDULES:
            raise InvalidInput(f"{request.schedule} has sizes of its own; --then a Program, too.")
        following = replace(request, schedule=name, variant=variant or None)
        programs.append(opt.build_program(following, capabilities))
    return programs, capabilities


def _capabilities(transport: str | None, machine: str | None, variant: str | None) -> Capabilities:
    if machine is not None:
        from stretto.sim import Machine

        target = Machine.load(machine)
        return target.transport(transport or target.default_transport(variant)).capabilities
    if transport is not None:
        from stretto.transports import load_transport

        return load_transport(transport).offered()
    return _EVERYTHING


def _sized(request: opt.Request) -> opt.Request:
    """Give small sizes where none are given; one shard is short."""
    tp = request.tp or 2
    columns = request.preset is None
    return replace(
        request,
        m=max(1, 4 * tp - 1) if request.m is None else request.m,
        n=8 if columns and request.n is request.global_n is None else request.n,
        k=8 if columns and request.k is request.global_k is None else request.k,
    )


def _check_numbers(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise InvalidInput(f"--{name} is {value}; give at least 1.")


def _is_quick(program: Program) -> bool:
    """Whether looking for redundant synchronisation takes no more than seconds."""
    candidates = sum(
        len(operation.after) + isinstance(operation, (Wait, Signal, Put))
        for phase in program.phases
        for body in phase.bodies
        for operation in body.operations
    )
    return program.operations * candidates <= _MOST_REDUNDANT


# ---- how it is said ------------------------------------------------------------------------------


def _heading(programs: Sequence[Program]) -> str:
    first, *others = programs
    turns = "".join(f", then {other.name} {other.variant}" for other in others)
    return heading(first) + turns


def _summary(verdict: Verdict, recorded: tuple[Finding, ...] | None) -> list[tuple[str, str]]:
    errors = len(verdict.errors)
    kept = "back to back, by itself" if verdict.alone else "back to back, or in turn with others"
    if verdict.unshared:
        kept += f" that do not use {', '.join(map(repr, verdict.unshared))}"
    pairs = [
        ("verdict", "safe" if verdict.safe else f"NOT SAFE: {errors} error{'s' * (errors > 1)}"),
        ("holds for", f"any number of calls, {kept}" if verdict.safe else "-"),
        (
            "looked at",
            f"{verdict.calls} call{'s' * (verdict.calls > 1)}, {verdict.operations:,} operations",
        ),
    ]
    if not verdict.safe:
        del pairs[1]
    if recorded is not None:
        kept = "every edge is kept in time" if not recorded else f"{len(recorded)} contradictions"
        pairs.append(("record", kept))
    return pairs


def _print_finding(finding: Finding, *, drawn: bool = False) -> None:
    colour = "bold red" if finding.severity == "error" else "yellow"
    name = finding.kind.replace("_", " ")
    console.print(f"\n[{colour}]{finding.severity}, {name}:[/] {escape(finding.message)}")
    if finding.missing is not None:
        console.print(f"  [dim]missing:[/] {escape(finding.missing)}")
    for place in finding.places:
        console.print(f"  [dim]{escape(_evidence(place))}[/]")
    if finding.alike:
        console.print(f"  [dim]and {finding.alike} alike, of other ranks or calls[/]")
    if drawn:
        console.print("  [dim]this is what the figure shows[/]")


def _evidence(place: Place) -> str:
    what = f"operation {place.operation} (number {place.index})"
    if place.operation.startswith("("):
        what = f"the caller's work {place.operation.strip('()')} it"
    text = f"rank {place.rank}, stream {place.stream}, call {place.call}, {what}"
    if place.buffer is not None and place.rows is not None and place.columns is not None:
        text += (
            f": {place.access}s {place.buffer}[{place.rows[0]}:{place.rows[1]}, "
            f"{place.columns[0]}:{place.columns[1]}] of rank {place.owner}, slot {place.slot}"
        )
    return text


def _print_redundant(verdict: Verdict) -> None:
    if verdict.redundant is None:
        return
    if not verdict.redundant:
        console.print("\nNo wait, signal or edge can be removed.")
        return
    console.print("\nCan be removed, all together, with the proof intact:")
    for one in verdict.redundant:
        console.print(f"  {escape(one.message)}")
