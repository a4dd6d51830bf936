"""JSON out and in, for Programs and Timelines: validated on the way in, by path."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from stretto.schedules.language.errors import InvalidInput, ProgramError

__all__ = ["digest_of", "from_json", "load_json_file", "to_json"]

T = TypeVar("T")


@cache
def _cached_adapter(cls: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(cls)


def _adapter(cls: Any) -> pydantic.TypeAdapter[Any]:
    return _cached_adapter(cls)


def to_json(value: object, *, indent: int | None = None) -> str:
    """Return the JSON form of a Program, a Timeline or any other of the language's values."""
    return _adapter(type(value)).dump_json(value, indent=indent).decode()


def digest_of(value: object) -> str:
    """Return a short digest of a value's JSON form: equal values have equal ones on all ranks."""
    return hashlib.sha256(to_json(value).encode()).hexdigest()[:16]


def from_json(cls: type[T], text: str | bytes, *, source: str = "the text") -> T:
    """Return the value that `text` is the JSON form of.

    Raises
    ------
    ProgramError
        If it is a Program that contradicts itself.
    InvalidInput
        If it is no JSON, or not that of a `cls`; the message names `source` and the first place.
    """
    try:
        value: T = _adapter(cls).validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        inner = first.get("ctx", {}).get("error")
        if isinstance(inner, ProgramError):
            raise inner from error
        _refuse_version(cls, text, source)
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInput(
            f"{source} is not a {cls.__name__} in JSON: "
            f"{'at ' + where + ': ' if where else ''}{first['msg']}"
        ) from error
    return value


def _refuse_version(cls: type[Any], text: str | bytes, source: str) -> None:
    """Raise if the text says that it is of another version; then nothing else in it matters."""
    version = next((one for one in fields(cls) if one.name.endswith("_version")), None)
    try:
        given = json.loads(text)
    except ValueError:
        return
    if version is None or not isinstance(given, dict):
        return
    found = given.get(version.name, version.default)
    if found != version.default:
        raise InvalidInput(
            f"{source} is a {cls.__name__} of {version.name} {found!r}, this Stretto reads version "
            f"{version.default}; make it again."
        )


def load_json_file(cls: type[T], path: Path) -> T:
    """Read `path` and return the value in it; errors name the file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}.") from error
    return from_json(cls, text, source=str(path))
