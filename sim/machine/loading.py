"""Profiles in and out: by name or from a file, with errors that say what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pydantic

from stretto.schedules.language import ProfileError, UnknownName
from stretto.sim.machine.schema import SCHEMA_VERSION, Profile

__all__ = ["available_profiles", "load_profile", "parse_profile", "profile_json"]

_SHIPPED = Path(__file__).parent.parent / "profiles"
_AGAIN = "run `stretto calibrate` or import it again"
_WIDTH = 100


def available_profiles() -> tuple[str, ...]:
    """Return the names of the shipped profiles."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.json")))


def load_profile(name: str | Path) -> Profile:
    """Return the profile of that name, or the one in that file.

    Parameters
    ----------
    name
        A shipped profile's name, or a path to a file whose name ends in ``.json``.

    Raises
    ------
    UnknownName
        If nothing has that name; the message lists the shipped ones.
    ProfileError
        If the file cannot be read or holds no profile of this version; the message names the
        first wrong field.
    """
    path = Path(name)
    if isinstance(name, str) and name in available_profiles():
        path = _SHIPPED / f"{name}.json"
    elif path.suffix != ".json":
        raise UnknownName("machine", str(name), [*available_profiles(), "PROFILE.json"])
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ProfileError(
            f"Machine profile {path} cannot be read ({error.strerror}); "
            f"check the path, or choose one of {', '.join(available_profiles())}."
        ) from error
    return parse_profile(content, source=str(path))


def parse_profile(content: str | bytes, *, source: str = "the text") -> Profile:
    """Return the profile in a JSON text; errors name `source`."""
    if isinstance(content, bytes):
        try:
            content = content.decode()
        except UnicodeDecodeError as error:
            raise ProfileError(
                f"Machine profile {source} is not JSON but binary; give a profile's .json file."
            ) from error
    found = _json(content, source)
    if not isinstance(found, dict):
        raise ProfileError(
            f"Machine profile {source} holds a {type(found).__name__}, not the JSON object of a "
            "profile; give a profile's .json file."
        )
    version = found.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ProfileError(
            f"Machine profile {source} has schema_version {version!r}, this Stretto reads "
            f"{SCHEMA_VERSION}; {_AGAIN}."
        )
    try:
        return Profile.model_validate_json(content)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the profile"
        raise ProfileError(
            f"Machine profile {source} is wrong at {where}: {_plain(first)}; "
            f"correct it there, or {_AGAIN}."
        ) from error


def _json(text: str, source: str) -> Any:
    if not text.strip():
        raise ProfileError(f"Machine profile {source} is empty; {_AGAIN}.")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if _cut_off(text, error):
            raise ProfileError(
                f"Machine profile {source} is truncated at line {error.lineno}; "
                f"copy it again, or {_AGAIN}."
            ) from error
        raise ProfileError(
            f"Machine profile {source} is not JSON (line {error.lineno}, column {error.colno}: "
            f"{error.msg}); correct it there, or {_AGAIN}."
        ) from error
    except (RecursionError, ValueError) as error:
        raise ProfileError(
            f"Machine profile {source} is not a profile's JSON ({error}); {_AGAIN}."
        ) from error


def _cut_off(text: str, error: json.JSONDecodeError) -> bool:
    """Whether the text ends where more was to come: in a string, a word or a number, or there."""
    if not text.lstrip().startswith("{"):
        return False
    rest = text[error.pos :].rstrip()
    in_word = any(word.startswith(rest) for word in ("true", "false", "null"))
    in_number = re.fullmatch(r"[-+.eE]*", rest) is not None
    return in_word or in_number or error.msg.startswith("Unterminated string")


def _plain(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def profile_json(profile: Profile) -> str:
    """Return a profile as JSON: objects indented, lists of numbers on as few lines as fit."""
    return _text(profile.model_dump(mode="json", exclude_none=True), "") + "\n"


def _text(value: Any, indent: str, *, key: str = "") -> str:
    flat = f"{key}{json.dumps(value, ensure_ascii=False)}"
    fits = len(indent) + len(flat) < _WIDTH  # with a comma
    if fits or not isinstance(value, (dict, list)) or _is_site(value):
        return flat  # a GEMM site is one line, however long
    inner = indent + " "
    if isinstance(value, dict):
        lines = [_text(item, inner, key=f"{json.dumps(name)}: ") for name, item in value.items()]
    else:
        lines = [_text(item, inner) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{key}{opening}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{closing}"


def _is_site(value: dict[str, Any] | list[Any]) -> bool:
    return isinstance(value, dict) and set(value) == {"n", "k", "m", "us"}
