"""Options that several commands share, and the Program that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import typer

from stretto.schedules import SCHEDULES, Program, Schedule, load_schedule
from stretto.schedules.language import (
    Capabilities,
    DType,
    InvalidInput,
    ceil_div,
)
from stretto.schedules.presets import projection

__all__ = [
    "ColumnsOption",
    "DTypeOption",
    "FigureOption",
    "GlobalKOption",
    "GlobalNOption",
    "InnerOption",
    "JsonOption",
    "MachineOption",
    "PresetOption",
    "Request",
    "RowsOption",
    "ScheduleArgument",
    "TpOption",
    "TraceOption",
    "TransportOption",
    "VariantOption",
    "VerifyOption",
    "build_program",
    "build_unfused",
]

DTYPES = ("bf16", "fp16", "fp32", "fp8")


def _complete_schedule(incomplete: str) -> list[str]:
    return [name for name in SCHEDULES if name.startswith(incomplete)]


def _complete_variant(incomplete: str) -> list[str]:
    names = dict.fromkeys(variant for variants in SCHEDULES.values() for variant in variants)
    return [name for name in names if name.startswith(incomplete)]


def complete_machine(incomplete: str) -> list[str]:
    from stretto.sim.machine import available_profiles

    return [name for name in available_profiles() if name.startswith(incomplete)]


def _complete_preset(incomplete: str) -> list[str]:
    from stretto.schedules.presets import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


ScheduleArgument = Annotated[
    str,
    typer.Argument(
        metavar="SCHEDULE",
        help="ag-gemm, your own FILE.py:OBJECT, or a saved PROGRAM.json.",
        autocompletion=_complete_schedule,
    ),
]
VariantOption = Annotated[
    str | None,
    typer.Option(
        help="Form of the schedule: ring, direct, eager or unfused.",
        autocompletion=_complete_variant,
    ),
]
TpOption = Annotated[int | None, typer.Option("--tp", help="Number of ranks.")]
RowsOption = Annotated[int | None, typer.Option("-m", help="Global rows (tokens of all ranks).")]
ColumnsOption = Annotated[
    int | None, typer.Option("-n", help="Output columns of one rank's weight.")
]
InnerOption = Annotated[int | None, typer.Option("-k", help="Input columns of one rank's weight.")]
GlobalNOption = Annotated[
    int | None, typer.Option("--global-n", help="Output columns of all ranks; divided by --tp.")
]
GlobalKOption = Annotated[
    int | None, typer.Option("--global-k", help="Input columns of all ranks; divided by --tp.")
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        help="n and k of a model's projection, such as kimi-k3/kda.",
        autocompletion=_complete_preset,
    ),
]
DTypeOption = Annotated[str | None, typer.Option("--dtype", help=f"One of {', '.join(DTYPES)}.")]
TransportOption = Annotated[str | None, typer.Option(help="Backend that carries the schedule.")]
MachineOption = Annotated[
    str | None,
    typer.Option(
        help="Machine profile: a shipped name (see: stretto machines) or a JSON file.",
        autocompletion=complete_machine,
    ),
]
JsonFileOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the report as JSON too.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]
TraceOption = Annotated[
    Path | None,
    typer.Option(help="Write the timeline: a Perfetto trace, or JSON if FILE ends in .json."),
]
VerifyOption = Annotated[
    bool,
    typer.Option("--verify/--no-verify", help="Refuse a schedule that may race or hang."),
]
FigureOption = Annotated[Path | None, typer.Option(help="Draw the timeline (.png, .svg or .pdf).")]


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for, before it is a Program."""

    schedule: str
    variant: str | None = None
    tp: int | None = None
    m: int | None = None
    n: int | None = None
    k: int | None = None
    global_n: int | None = None
    global_k: int | None = None
    preset: str | None = None
    dtype: str | None = None
    calls: int = 1

    @property
    def shapeless(self) -> bool:
        """Whether nothing was said about sizes."""
        said = (self.tp, self.m, self.n, self.k, self.global_n, self.global_k, self.preset)
        return all(value is None for value in said) and self.dtype is None


def build_program(request: Request, capabilities: Capabilities) -> Program:
    """Return the Program that the command line stands for, built for a transport.

    Raises
    ------
    InvalidInput
        If a size is missing, contradictory or impossible.
    Unsupported
        If the transport cannot carry the schedule.
    """
    found = load_schedule(request.schedule, request.variant)
    if isinstance(found, Program):
        return _given_program(found, request, capabilities)
    return _repeated(_build(found, request, capabilities), request.calls)


def build_unfused(request: Request, capabilities: Capabilities) -> Program | None:
    """Return the unfused baseline of the same schedule and shape, None where there is none."""
    variants = SCHEDULES.get(request.schedule, {})
    unfused = variants.get("unfused")
    if unfused is None or capabilities.lacks("collective", "all_gather") is not None:
        return None
    return _repeated(_build(unfused, request, capabilities), request.calls)


def _repeated(program: Program, calls: int) -> Program:
    if calls < 1:
        raise InvalidInput(f"--calls is {calls}; give at least 1.")
    return program if calls == 1 else program.repeated(calls)


def _given_program(program: Program, request: Request, capabilities: Capabilities) -> Program:
    if not request.shapeless:
        raise InvalidInput(
            f"{request.schedule} is a Program with sizes of its own; leave --tp, -m, -n, -k, "
            "--preset and --dtype out."
        )
    if program.transport != capabilities.transport:
        raise InvalidInput(
            f"{request.schedule} was built for transport {program.transport!r}, not "
            f"{capabilities.transport!r}; give --transport {program.transport}."
        )
    return _repeated(program, request.calls)


def _build(cls: type[Schedule], request: Request, capabilities: Capabilities) -> Program:
    tp = 2 if request.tp is None else request.tp
    if tp < 1:
        raise InvalidInput(f"--tp is {tp}; give at least one rank.")
    n, k = _sizes(request, tp)
    if request.m is None or n is None or k is None:
        missing = [
            name for name, value in (("-m", request.m), ("-n", n), ("-k", k)) if value is None
        ]
        raise InvalidInput(f"Give {' and '.join(missing)}, or n and k by --preset.")
    return cls(
        world_size=tp,
        m=request.m,
        n=n,
        k=k,
        dtype=_dtype(request.dtype),
        capabilities=capabilities,
    ).build()


def _sizes(request: Request, tp: int) -> tuple[int | None, int | None]:
    """Return n and k of one rank, from whichever of the options was given."""
    n, k = request.n, request.k
    if request.preset is not None:
        if any(value is not None for value in (n, k, request.global_n, request.global_k)):
            raise InvalidInput("--preset stands for n and k; leave -n and -k out.")
        return projection(request.preset, tp)
    for local, whole, name in ((n, request.global_n, "n"), (k, request.global_k, "k")):
        if local is not None and whole is not None:
            raise InvalidInput(f"Give either -{name} or --global-{name}, not both.")
        if whole is not None and whole < 1:
            raise InvalidInput(f"--global-{name} is {whole}; give a whole number from 1.")
    if request.global_n is not None:
        n = ceil_div(request.global_n, tp)
    if request.global_k is not None:
        k = ceil_div(request.global_k, tp)
    return n, k


def _dtype(name: str | None) -> DType:
    chosen = name or "bf16"
    if chosen not in DTYPES or chosen not in get_args(DType):
        raise InvalidInput(f"There is no dtype {chosen!r}; choose one of {', '.join(DTYPES)}.")
    return chosen  # type: ignore[return-value]
