"""What the verifier says: findings with their evidence, and the verdict that they amount to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stretto.schedules.language import Timeline

__all__ = ["Finding", "Kind", "Place", "Redundant", "Severity", "Verdict"]

Severity = Literal["error", "advice"]

Kind = Literal[
    "race",
    "reuse",
    "early_release",
    "no_credit",
    "no_turn",
    "unwritten",
    "wrong_result",
    "deadlock",
    "lost_signal",
    "ambiguous_counter",
    "ambiguous_mailbox",
    "collective_mismatch",
    "unawaited",
    "hardware_queue",
    "residency",
    "uneven_values",
    "record",
]
"""What a finding is about.

``race``: two operations of one call touch the same bytes, at least one writes, and nothing orders
them.  ``reuse``: the same of different calls: a slot is written while it is still in use.
``early_release``, ``no_credit``, ``no_turn``: a slot is given back before this rank is done with
it, written without having been given back, or given back out of turn; another schedule on the same
workspace may suffer.  ``unwritten``: bytes are read that nobody wrote.  ``wrong_result``: an output
does not hold what the Program says it computes.  ``deadlock``: operations wait for each other, or
for a signal that nobody gives.  ``lost_signal``: an epoch may be set back before a wait has seen
it.  ``ambiguous_counter``: more adds may precede a wait than its threshold counts.
``ambiguous_mailbox``: it is open which signal fills a mailbox first, or which wait empties it.
``collective_mismatch``: ranks do not issue the same collectives.  ``unawaited``: nobody waits for a
signal.  ``hardware_queue``: safe with a queue for every stream, stuck on fewer.  ``residency``: a
kernel that waits holds what its releaser needs.  ``uneven_values``: a flag's values grow unevenly,
or memory lives on, so that the proof covers the calls that were looked at.  ``record``: a Timeline
contradicts its Program.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """One operation of a finding.

    Attributes
    ----------
    rank, call, stream, operation, index
        Whose, in which use of the workspace, on which stream, its id and its place in the enqueue
        order.
    access
        ``read``, ``write``, ``add``, ``wait`` or ``signal``.
    buffer, owner, slot, rows, columns
        The rectangle that it touches, if any: rows and columns are [first, stop) in elements.
    """

    rank: int
    call: int
    stream: str
    operation: str
    index: int
    access: str | None = None
    buffer: str | None = None
    owner: int | None = None
    slot: int | None = None
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or that could be better.

    Attributes
    ----------
    kind
        See `Kind`.
    severity
        ``error`` makes a Program unsafe, ``advice`` does not.
    message
        What may happen, as a sentence.
    missing
        The edge that would prevent it, in words; None where there is no such thing.
    places
        The operations concerned; of a deadlock, the cycle.
    alike
        How many of the same kind, of the same operations on other ranks or in other calls, there
        are beside this one.
    """

    kind: Kind
    severity: Severity
    message: str
    missing: str | None = None
    places: tuple[Place, ...] = ()
    alike: int = 0


@dataclass(frozen=True, slots=True)
class Redundant:
    """Synchronisation that can go while the proof stays.

    Attributes
    ----------
    phase, body
        Where: the phase's name, the number of the body in it.
    operation
        Id of the operation that goes, or loses its signal or an edge.
    what
        ``wait``, ``signal`` (of a put, or a whole operation), or ``after``.
    edge
        For ``after``: the operation that need not be waited for.
    message
        The same as a sentence.
    """

    phase: str
    body: int
    operation: str
    what: Literal["wait", "signal", "after"]
    message: str
    edge: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What `verify` found.

    Attributes
    ----------
    name, variant, world_size, shape, dtype, transport
        Of the Program (of several, names and variants joined by ``+``, shape of the first).
    safe
        Whether there is no error.
    covers
        For how many executions, from the first one on, the proof holds; None for any number.  An
        execution is one call of `verify`'s Program (of several, of the next in the order).
    calls, operations
        How many calls were looked at, and how many operations that makes over all ranks.
    alone
        Whether nobody else was assumed to use the workspace.
    unshared
        If others were: symmetric buffers and flags that they must not use, since nobody gives them
        back.
    findings
        Errors first.
    counterexample
        A smallest run that shows the first of the errors that a run can show; None without one.
    redundant
        What can be removed, all of it together; None if it was not looked for.
    """

    name: str
    variant: str
    world_size: int
    shape: tuple[tuple[str, int], ...]
    dtype: str
    transport: str
    safe: bool
    covers: int | None
    calls: int
    operations: int
    alone: bool
    unshared: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    counterexample: Timeline | None = None
    redundant: tuple[Redundant, ...] | None = None

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that make it unsafe."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def advice(self) -> tuple[Finding, ...]:
        """Findings that do not."""
        return tuple(finding for finding in self.findings if finding.severity == "advice")
