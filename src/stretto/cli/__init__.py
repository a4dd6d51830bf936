"""The command line: thin, on top of everything; ``stretto --help``."""

from __future__ import annotations

from stretto.cli.application import app, main

__all__ = ["app", "main"]
