"""The public conformance suite: what every transport must do, checked with real processes.

Run it over a backend with `check_transport`, or case by case under pytest::

    HARNESS = Harness(make=MyTransport)            # plus device= and dtypes= where they differ
                                                   # (stretto.transports.conformance.cuda_device)

    @pytest.fixture(scope="module", params=(1, 2, 4))
    def crew(request):
        with Crew(request.param) as crew:
            yield crew

    @pytest.mark.parametrize("name", CASES)
    def test_conforms(crew, name):
        skipped = CASES[name].skipped(MyTransport.offered(), crew.world_size)
        if skipped:
            pytest.skip(skipped)
        run_case(CASES[name], HARNESS, crew)

Every rank is a process of its own, started without inheriting anything (spawn): what is given in a
`Harness` must be importable.  A case that hangs is ended after the crew's limit, with the stacks of
all threads on the standard error output.
"""

from __future__ import annotations

from collections.abc import Sequence

import stretto.transports.conformance.collectives as collectives
import stretto.transports.conformance.failures as failures
import stretto.transports.conformance.flags as flags
import stretto.transports.conformance.puts as puts
import stretto.transports.conformance.workspaces as workspaces
from stretto.schedules.language import CheckFailed, UnknownName
from stretto.transports.conformance.case import (
    Case,
    Harness,
    MakeTransport,
    RankContext,
    expect,
    play,
)
from stretto.transports.conformance.crew import Crew, DirectoryStore, Member
from stretto.transports.conformance.device import Device, HostDevice, Stream
from stretto.transports.interface import Transport

__all__ = [
    "CASES",
    "Case",
    "Crew",
    "Device",
    "DirectoryStore",
    "Harness",
    "HostDevice",
    "MakeTransport",
    "Member",
    "RankContext",
    "Stream",
    "check_transport",
    "expect",
    "run_case",
]

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        *workspaces.CASES,
        *puts.CASES,
        *flags.CASES,
        *collectives.CASES,
        *failures.CASES,
    )
}
"""Every case by its name."""


def run_case(case: Case, harness: Harness, crew: Crew) -> None:
    """Run one case on all ranks of a crew.

    Raises
    ------
    CheckFailed
        If it failed on any rank; the message has all ranks' errors.
    """
    dies = {crew.world_size - 1} if case.kills else set()
    crew.run(play, harness, case.check, dies=dies)


def check_transport(
    transport: type[Transport],
    harness: Harness,
    *,
    world_size: int,
    cases: Sequence[str] | None = None,
    limit_s: float = 60.0,
) -> dict[str, str]:
    """Run the suite over a backend and return the cases that were skipped, with the reason.

    Parameters
    ----------
    transport
        The backend; it says what it offers.
    harness
        How to make one, and on which device.
    world_size
        Number of ranks.
    cases
        Names of those to run; all if left out.
    limit_s
        For one case.

    Raises
    ------
    CheckFailed
        If any case failed; the message has all of them.
    UnknownName
        If there is no case of a name.
    """
    capabilities = transport.offered()
    skipped, failed = {}, []
    with Crew(world_size, limit_s=limit_s) as crew:
        for name in CASES if cases is None else cases:
            case = CASES.get(name)
            if case is None:
                raise UnknownName("case", name, list(CASES))
            reason = case.skipped(capabilities, world_size)
            if reason is not None:
                skipped[name] = reason
                continue
            try:
                run_case(case, harness, crew)
            except CheckFailed as error:
                failed.append(f"{name}:\n{error}")
    if failed:
        raise CheckFailed(f"{capabilities.transport}, {world_size} ranks:\n" + "\n".join(failed))
    return skipped
