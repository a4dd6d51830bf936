"""Names of schedules, resolved once, at the command line."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from stretto.schedules.ag_gemm import (
    DirectAllGatherGemm,
    EagerAllGatherGemm,
    RingAllGatherGemm,
    UnfusedAllGatherGemm,
)
from stretto.schedules.language import (
    InvalidInput,
    Program,
    Schedule,
    UnknownName,
    load_json_file,
)

__all__ = ["DEFAULT_VARIANT", "SCHEDULES", "load_schedule", "schedule_class"]

SCHEDULES: dict[str, dict[str, type[Schedule]]] = {
    "ag-gemm": {
        cls.variant: cls
        for cls in (
            RingAllGatherGemm,
            DirectAllGatherGemm,
            EagerAllGatherGemm,
            UnfusedAllGatherGemm,
        )
    },
}
"""Shipped schedules: name, then variant."""

DEFAULT_VARIANT = {"ag-gemm": "ring"}

ScheduleFactory = Callable[..., Schedule]


def schedule_class(name: str, variant: str | None = None) -> type[Schedule]:
    """Return the shipped schedule of this name and variant.

    Raises
    ------
    UnknownName
        If there is none; the message lists those there are.
    """
    variants = SCHEDULES.get(name)
    if variants is None:
        known = [*SCHEDULES, "FILE.py:OBJECT", "PROGRAM.json"]
        raise UnknownName("schedule", name, known)
    chosen = variants.get(variant or DEFAULT_VARIANT[name])
    if chosen is None:
        raise UnknownName(f"variant of {name}", str(variant), list(variants))
    return chosen


def load_schedule(name: str, variant: str | None = None) -> type[Schedule] | Program:
    """Return what SCHEDULE on the command line stands for.

    Parameters
    ----------
    name
        A shipped schedule's name, ``file.py:object`` (a `Schedule` subclass, or a `Program`), or a
        path to a ``program.json``.
    variant
        Of a shipped schedule.

    Raises
    ------
    UnknownName
        If nothing has that name.
    InvalidInput
        If the file does not hold what it should.
    """
    if name.endswith(".json"):
        _refuse_variant(name, variant)
        return load_json_file(Program, Path(name))
    path, separator, attribute = name.rpartition(":")
    if separator and path.endswith(".py"):
        _refuse_variant(name, variant)
        return _load_object(Path(path), attribute)
    if name.endswith(".py"):
        raise InvalidInput(f"Name the object in {name} too, as {name}:OBJECT.")
    return schedule_class(name, variant)


def _refuse_variant(name: str, variant: str | None) -> None:
    if variant is not None:
        raise InvalidInput(f"--variant chooses among shipped schedules; {name} is one already.")


def _load_object(path: Path, attribute: str) -> type[Schedule] | Program:
    if not path.is_file():
        raise InvalidInput(f"{path} is no file; give FILE.py:OBJECT of an existing file.")
    spec = importlib.util.spec_from_file_location(f"_stretto_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{path} cannot be loaded as a Python module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise InvalidInput(f"{path} raised {type(error).__name__} when loaded: {first}") from error
    found = getattr(module, attribute, None)
    if isinstance(found, Program) or (isinstance(found, type) and issubclass(found, Schedule)):
        return found
    raise InvalidInput(f"{path} has no Schedule class or Program called {attribute!r}.")
