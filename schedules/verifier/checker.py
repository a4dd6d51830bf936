"""`verify`: a verdict on a Program, with the evidence for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.schedules.language import Capabilities, InvalidInput, Program, Timeline
from stretto.schedules.verifier.redundancy import find_redundant
from stretto.schedules.verifier.sharing import unshared
from stretto.schedules.verifier.verdict import Verdict

if TYPE_CHECKING:
    from stretto.schedules.verifier.examine import Examination

__all__ = ["verify"]


def verify(
    program: Program | Sequence[Program],
    *,
    calls: int | None = None,
    alone: bool = False,
    capabilities: Capabilities | None = None,
    sms: int | None = None,
    hardware_queues: int | None = None,
    fresh_streams: bool = False,
    pushed_collectives: bool = False,
    redundant: bool = False,
) -> Verdict:
    """Prove that a Program is free of races, deadlocks and unsafe reuse, or show that it is not.

    The Program is called again and again, back to back, on one workspace; several Programs take
    turns in the order given.  See `stretto.schedules.verifier` for what is checked and why it is
    enough.

    Parameters
    ----------
    program
        One Program, or those that take turns.
    calls
        How many executions to look at, and no others; by default as many as decide over any number.
    alone
        Whether nobody else uses the workspace.  By default a Program must also keep the workspace's
        contract, by which any schedules may take turns on it
        (`stretto.schedules.verifier.contract`).
    capabilities
        Of the transport; by default of one whose signals order its puts and which needs no
        multiprocessor.
    sms
        Streaming multiprocessors of a device; by default that is not looked at.
    hardware_queues
        How many a rank's streams share.  By default one for each, with advice if one for all would
        hang.
    fresh_streams
        Whether streams of one call know nothing of those of the last, the caller's excepted.
    pushed_collectives
        Whether an all-gather into a symmetric buffer may write to every rank as soon as one rank
        has come to it, as one that is built from puts may.
    redundant
        Whether to look for synchronisation that is not needed, by many more proofs.

    Raises
    ------
    InvalidInput
        If there is nothing to verify, or the Programs cannot share a workspace.
    """
    # Here, so that whoever only builds Programs needs no numpy.
    from stretto.schedules.verifier.examine import Conditions, examine

    programs = [program] if isinstance(program, Program) else list(program)
    if not programs:
        raise InvalidInput("There is no Program to verify; give at least one.")
    if calls is not None and calls < 1:
        raise InvalidInput(f"{calls} calls cannot be verified; give at least 1.")
    conditions = Conditions(
        calls=calls,
        alone=alone,
        capabilities=capabilities,
        sms=sms,
        hardware_queues=hardware_queues,
        fresh_streams=fresh_streams,
        pushed_collectives=pushed_collectives,
    )
    examined = examine(programs, conditions)
    world, drafts = examined.world, list(examined.report.drafts.values())
    verdict = Verdict(
        name="+".join(dict.fromkeys(one.name for one in programs)),
        variant="+".join(dict.fromkeys(one.variant for one in programs)),
        world_size=programs[0].world_size,
        shape=programs[0].shape,
        dtype=programs[0].dtype,
        transport=programs[0].transport,
        safe=examined.safe,
        covers=examined.covers,
        calls=len(world.turns),
        operations=sum(site.operation is not None for site in world.sites),
        alone=alone,
        unshared=tuple(
            dict.fromkeys(name for one in programs for name in unshared(one) if not alone)
        ),
        findings=tuple(
            draft.finding
            for severity in ("error", "advice")
            for draft in drafts
            if draft.finding.severity == severity
        ),
    )
    if not verdict.safe:
        return replace(verdict, counterexample=_counterexample(examined))
    if redundant and len(programs) == 1:

        def is_safe(smaller: Program) -> bool:
            return examine([smaller], conditions, quick=True).safe

        verdict = replace(verdict, redundant=find_redundant(programs[0], is_safe))
    return verdict


def _counterexample(examined: Examination) -> Timeline | None:
    """Return a run that shows the first error, as findings are listed, that a run can show."""
    from stretto.schedules.verifier.counterexample import can_be_shown, timeline_of

    for draft in examined.report.drafts.values():
        if draft.finding.severity == "error" and can_be_shown(draft):
            return timeline_of(examined.order, draft)
    return None
