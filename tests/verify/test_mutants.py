"""Mutants of what is shipped: all harm is reported, all that is reported does harm.

TP 2 and 3 in full, and the ring at TP 4; ``stretto bench verify`` does TP 2, 4 and 8.
"""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest
from hand_made import VARIANTS, build

from stretto.runtime.bench.verify import (
    Judgement,
    judge_mutants,
    measure_speed,
    run_for_real,
    sampled,
    subject,
)
from stretto.schedules.published_ring import PublishedRing, PublishedRingThenAllReduce
from stretto.schedules.verifier import verify
from stretto.schedules.verifier.mutants import mutants


def listed(found: list[Judgement], outcome: str) -> list[str]:
    return [
        f"{one.mutant.family}: {one.mutant.what} {one.reported} {one.run}"
        for one in found
        if one.outcome == outcome
    ]


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_harm_is_reported_and_all_reports_are_harm(variant: str, tp: int) -> None:
    found = list(judge_mutants(subject(variant, tp)))
    assert listed(found, "missed") == []
    assert listed(found, "not shown") == []
    outcomes = Counter(one.outcome for one in found)
    assert outcomes["shown"] > 0.8 * (len(found) - outcomes["refused"])
    harms = Counter(one.harm for one in found if one.outcome == "shown")
    assert harms["wrong numbers"] >= 5
    assert harms["no progress"] >= 5


def test_the_ring_at_four() -> None:
    found = list(judge_mutants(subject("ring", 4)))
    assert listed(found, "missed") == []
    assert listed(found, "not shown") == []
    harmless = Counter(one.mutant.family for one in found if one.outcome == "harmless")
    # An arrival or a release that is one too high still lies below the slot's next one.
    assert harmless["epoch off by one"] == 4
    assert set(harmless) <= {"epoch off by one", "event"}


def test_every_family_occurs_and_every_mutant_differs() -> None:
    program = build("direct", 3)
    found = list(mutants(program))
    assert Counter(one.family for one in found).keys() == {
        "barrier",
        "credit",
        "epoch off by one",
        "epochs swapped",
        "event",
        "flags swapped",
        "release",
        "rows",
        "signal",
        "slots",
        "wait",
        "word",
    }
    made = [one.program for one in found if one.program is not None]
    assert len(set(made)) == len(made)
    assert program not in made


def test_what_contradicts_itself_is_refused() -> None:
    """With one row a rank, nothing can be cut off on the short shard's rank alone."""
    found = list(mutants(build("ring", 3, 7)))
    refused = [one for one in found if one.program is None]
    assert {one.family for one in refused} == {"rows", "slots"}
    assert all(one.refusal and "rank" in one.refusal for one in refused if one.family == "rows")
    assert all(
        one.refusal and "slots, the workspace has" in one.refusal
        for one in refused
        if one.family == "slots"
    )


def test_mutants_of_the_published_ring() -> None:
    """With the all-reduce in between every wait, signal and event counts."""
    safe = build(PublishedRingThenAllReduce, 2)
    assert verify(safe).safe
    for mutant in mutants(safe):
        if mutant.program is not None and mutant.family in ("wait", "signal", "event", "barrier"):
            assert not verify(mutant.program).safe, mutant.what
    assert not verify(build(PublishedRing, 2)).safe


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="real runs need torch")
def test_a_sample_in_real_processes() -> None:
    sample = [
        one for one in sampled(11) if one.mutant.family in ("wait", "signal", "rows", "release")
    ]
    rows = run_for_real(sample)
    assert len(rows) == len(sample) >= 4
    for row in rows:
        expected = {"no progress": "WaitTimeout", "wrong numbers": "CheckFailed"}[row["expected"]]
        assert row["ended"] == expected, row


def test_speed_is_measured() -> None:
    (row,) = measure_speed(world_sizes=(2,))
    assert (row["tp"], row["calls"], row["operations"]) == (2, 3, 36)
    assert 0 < row["verify_s"] < 5
