"""Timelines are the same to the bit, and mutants are judged as they were."""

from __future__ import annotations

import pytest
from golden import MUTANTS, TIMELINES, judged, read, timelines

TIMED, MUTATED = (2, 8), (2, 3)
"""World sizes that the tests look at; ``python tests/golden/golden.py`` makes all lines."""


@pytest.mark.parametrize("world_size", TIMED)
def test_timelines_are_the_same_to_the_bit(world_size: int) -> None:
    recorded = [row for row in read(TIMELINES) if row["world_size"] == str(world_size)]
    assert recorded
    assert list(timelines([world_size])) == recorded


@pytest.mark.parametrize("world_size", MUTATED)
def test_mutants_are_judged_as_they_were(world_size: int) -> None:
    recorded = [row for row in read(MUTANTS) if row["world_size"] == str(world_size)]
    assert recorded
    assert list(judged([world_size])) == recorded
