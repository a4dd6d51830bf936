"""The library call, slots and epochs on GPUs; skipped where there are none."""

from __future__ import annotations

from functools import cache
from typing import Any

import gpu_cases
import library_ranks as ranks
import pytest

from stretto.runtime.launcher import launch
from stretto.schedules.language import PeerLost


@cache
def outcomes(tp: int) -> list[dict[str, Any]]:
    names = list(gpu_cases.CASES if tp == 2 else gpu_cases.SHARED)
    found: list[dict[str, Any]] = launch(ranks.inside, tp, "cuda", gpu_cases.run_all, names)
    return found


@pytest.mark.gpu(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", gpu_cases.CASES)
def test_two_gpus(name: str) -> None:
    assert [one[name] for one in outcomes(2)] == [[], []]


@pytest.mark.gpu(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", gpu_cases.SHARED)
def test_four_ranks_on_two_gpus(name: str) -> None:
    assert [one[name] for one in outcomes(4)] == [[]] * 4


@pytest.mark.gpu(2)
def test_a_killed_rank_ends_the_run_of_all_and_the_next_run_works() -> None:
    with pytest.raises(PeerLost) as caught:
        launch(ranks.inside, 2, "cuda", ranks.killed_peer)
    assert ranks.heard_after_s(caught.value) < 10
    assert any("rank 1 step 1" in line for line in caught.value.details), caught.value.details
    assert launch(ranks.inside, 2, "cuda", ranks.many_shapes, "ring", False) == [[], []]
