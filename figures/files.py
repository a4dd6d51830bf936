"""Files that figures and traces are written to: refused early, written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Literal

from stretto.schedules.language import InvalidInput

__all__ = ["FIGURE_FORMATS", "FigureFormat", "check_figure_path", "check_path", "write_whole"]

FigureFormat = Literal["png", "svg", "pdf"]
FIGURE_FORMATS: dict[str, FigureFormat] = {".png": "png", ".svg": "svg", ".pdf": "pdf"}
"""Formats of a figure, by the ending of its file's name."""


def check_figure_path(path: Path) -> FigureFormat:
    """Return the format that `path` asks for; call it before a long run, not after.

    Raises
    ------
    InvalidInput
        If the ending is none of ``.png``, ``.svg`` and ``.pdf``, or nothing can be written there.
    """
    suffix = path.suffix.lower()
    if suffix not in FIGURE_FORMATS:
        raise InvalidInput(
            f"A figure is written as .png, .svg or .pdf; give {str(path)!r} one of these endings."
        )
    check_path(path)
    return FIGURE_FORMATS[suffix]


def check_path(path: Path) -> None:
    """Raise `InvalidInput` if no file can be written at `path`, as far as can be seen now."""
    try:
        target = path.resolve()
        if target.is_dir():
            raise InvalidInput(f"{str(path)!r} is a directory; name a file in it.")
        if not target.parent.is_dir():
            raise InvalidInput(
                f"There is no directory {str(path.parent)!r} to write {path.name!r} into; "
                f"create it first."
            )
        if target.exists() and not target.is_file():
            raise InvalidInput(f"{str(path)!r} is no regular file; name another one.")
        exists = target.exists()
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, InvalidInput):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InvalidInput(f"{str(path)!r} cannot name a file: {reason}.") from error
    if not os.access(target.parent, os.W_OK | os.X_OK) or (
        exists and not os.access(target, os.W_OK)
    ):
        raise InvalidInput(f"There is no permission to write {str(path)!r}; choose another place.")


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` by way of a temporary file beside it, so that no half is ever seen.

    Raises
    ------
    InvalidInput
        If that is not possible; what was at `path` before is still there.
    """
    check_path(path)
    target = path.resolve()
    # Not tempfile: its files are for the owner's eyes only, and a rename would keep that.
    temporary = target.parent / f".stretto-{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(target)
    except OSError as error:
        raise InvalidInput(
            f"{str(path)!r} could not be written: {error.strerror or error}."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
