"""Every error that Stretto raises on purpose, one tree.

::

    StrettoError
    |-- InvalidInput            what the caller gave cannot be used (exit code 2)
    |   |-- UnknownName         no schedule, variant, machine or transport of that name
    |   |-- Unavailable         it exists, but not here: what to install or switch on
    |   |-- ProgramError        a Program that contradicts itself (names rank, stream, operation)
    |   |-- Unsafe              a Program that may race or hang (the verifier shows how)
    |   |-- Unsupported         a schedule needs what its transport or machine does not offer
    |   `-- ProfileError        a machine profile that cannot be read or does not fit
    `-- RunFailed               the input was good, the run was not (exit code 1)
        |-- WaitTimeout         a wait saw no signal in time (names both epochs)
        |-- PeerLost            another rank died or gave up
        |-- Deadlock            no operation of the Program can make progress
        `-- CheckFailed         the numbers are not those of the reference

Foreign errors are mapped to these where a user would meet them, chained with ``from``, and
name the call that failed.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckFailed",
    "Deadlock",
    "InvalidInput",
    "PeerLost",
    "ProfileError",
    "ProgramError",
    "RunFailed",
    "StrettoError",
    "Unavailable",
    "UnknownName",
    "Unsafe",
    "Unsupported",
    "WaitTimeout",
]


class StrettoError(Exception):
    """Base of all errors that Stretto raises on purpose; they can be pickled."""

    exit_code = 1
    details: tuple[str, ...] = ()
    """Lines of evidence to show below the message."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(cls: type[StrettoError], args: tuple[Any, ...], state: dict[str, Any]) -> StrettoError:
    """Make an error again without its constructor, which may want more than the message."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidInput(StrettoError, ValueError):
    """What the caller gave cannot be used; the message says what to do instead."""

    exit_code = 2


class UnknownName(InvalidInput):
    """There is no schedule, variant, machine or transport of that name."""

    def __init__(self, what: str, name: str, known: list[str] | tuple[str, ...]) -> None:
        super().__init__(f"There is no {what} {name!r}; choose one of {', '.join(known)}.")


class Unavailable(InvalidInput):
    """The thing exists but cannot be used here; the message says what is missing."""


class ProgramError(InvalidInput):
    """A Program contradicts itself.

    Parameters
    ----------
    message
        What is wrong, as one sentence.
    rank, stream, operation
        Where, as far as it is known.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        stream: str | None = None,
        operation: str | None = None,
    ) -> None:
        named = (("rank", rank), ("stream", stream), ("operation", operation))
        where = ", ".join(f"{name} {value}" for name, value in named if value is not None)
        super().__init__(f"{where}: {message}" if where else message)
        self.rank, self.stream, self.operation = rank, stream, operation


class Unsafe(InvalidInput):
    """A Program may race, hang or read what nobody wrote; the message says where."""


class Unsupported(InvalidInput):
    """A schedule needs something that its transport or machine does not offer."""


class ProfileError(InvalidInput):
    """A machine profile cannot be read, or was made for something else."""


class RunFailed(StrettoError, RuntimeError):
    """The input was good; running it was not possible to the end."""


class WaitTimeout(RunFailed):
    """A wait saw no signal in time."""


class PeerLost(RunFailed):
    """Another rank died, or gave up and said so."""


class Deadlock(RunFailed):
    """No operation of the Program can make progress any more."""


class CheckFailed(RunFailed):
    """The numbers that came out are not those of the reference."""
