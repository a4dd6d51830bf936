"""The conformance suite is worth something only if it fails where it should."""

from __future__ import annotations

from collections.abc import Iterator

import faulty_transports as faulty
import pytest
from transport_makers import shared_memory

from stretto.schedules.language import CheckFailed, UnknownName
from stretto.transports.conformance import CASES, Crew, Harness, check_transport, run_case
from stretto.transports.shared_memory import SharedMemoryTransport


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3, limit_s=20) as crew:
        yield crew


@pytest.mark.parametrize(
    ("backend", "case", "complaint"),
    [
        (faulty.LatePut, "data_is_there_before_its_signal", "bytes are wrong"),
        (faulty.WidePut, "rectangles_are_exact", "bytes are wrong"),
        (faulty.HastyWait, "epochs_cross_the_wrap", "passed before its signal"),
        (faulty.LosingAdd, "counters_lose_no_add", "rank"),
        (faulty.OverfullMailbox, "mailboxes_have_depth_one", "rank"),
        (faulty.HastyCollective, "collectives_follow_each_other", "went wrong"),
        (faulty.RoundingSum, "sums_are_rounded_once", "rounding"),
        (faulty.ModestClaim, "capabilities_are_honest", "claimed False"),
        (faulty.QuietAbort, "aborts_reach_everyone", "rank"),
        (faulty.MuteTimeout, "timeouts_name_everything", "not in the message"),
    ],
)
def test_a_fault_is_found(
    crew: Crew, backend: type[SharedMemoryTransport], case: str, complaint: str
) -> None:
    with pytest.raises(CheckFailed, match=complaint):
        run_case(CASES[case], Harness(make=backend, wait_limit_s=1.5), crew)


def test_whole_suite_reports_failures_and_skips() -> None:
    harness = Harness(make=faulty.WidePut)
    cases = ["death_ends_a_wait", "rectangles_are_exact", "barrier_holds"]
    with pytest.raises(CheckFailed, match=r"shared_memory, 1 ranks:\nrectangles_are_exact:"):
        check_transport(faulty.WidePut, harness, world_size=1, cases=cases)
    skipped = check_transport(faulty.WidePut, harness, world_size=1, cases=["death_ends_a_wait"])
    assert skipped == {"death_ends_a_wait": "needs 2 ranks"}


def test_unknown_case_is_named() -> None:
    with pytest.raises(UnknownName, match="no case 'none'"):
        check_transport(SharedMemoryTransport, Harness(shared_memory), world_size=1, cases=["none"])
