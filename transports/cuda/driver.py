"""The CUDA driver, with every return code checked and named."""

from __future__ import annotations

from typing import Any

from stretto.schedules.language import RunFailed

__all__ = ["bindings", "called", "failed"]


def bindings() -> Any:
    """Return ``cuda.bindings.driver`` (from cuda-python)."""
    from cuda.bindings import driver

    return driver


def called(what: str, answer: tuple[Any, ...]) -> Any:
    """Return what a driver or NVRTC call gave, or raise.

    Parameters
    ----------
    what
        The call and what it was for; errors name it.
    answer
        What cuda-python returned: the code, then the results.

    Raises
    ------
    RunFailed
        If the code is not success.
    """
    code, *results = answer
    if int(code):
        raise failed(what, code)
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def failed(what: str, code: Any) -> RunFailed:
    """Return the error of a call that gave `code`."""
    name = getattr(code, "name", str(code))
    return RunFailed(f"{what} failed with {name}.")
