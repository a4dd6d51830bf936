"""The library call, on CPU processes; tests/runtime/test_gpu_library.py has it on GPUs."""

from __future__ import annotations

import importlib.util
from typing import Any

import library_ranks as ranks
import pytest

from stretto.runtime.launcher import launch
from stretto.schedules.language import PeerLost

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the library needs torch"
)


def run(tp: int, function: Any, *arguments: Any) -> list[Any]:
    return launch(ranks.inside, tp, "cpu", function, *arguments)


@pytest.mark.parametrize(
    ("tp", "variant", "tune"),
    [(1, "auto", True), (2, "auto", True), (2, "unfused", False), (3, "ring", False)],
)
def test_layers_and_shapes_share_a_workspace(tp: int, variant: str, tune: bool) -> None:
    assert run(tp, ranks.many_shapes, variant, tune) == [[]] * tp


def test_a_workspace_grows_for_a_later_layer() -> None:
    assert run(2, ranks.grown) == [[], []]


def test_a_part_of_the_world_falls_back_and_says_why() -> None:
    for variant, transport, reason, refusal, wrong in run(2, ranks.part_of_the_world):
        assert (variant, transport, wrong) == ("unfused", "rccl", [])
        assert "part of the world" in refusal
        assert refusal in reason


def test_what_cannot_be_is_refused_with_a_sentence() -> None:
    for said in run(2, ranks.refusals):
        for name, words in {
            "before prepare": "prepare() on every rank",
            "above max_m": "takes 1 to 64",
            "no rows": "takes 1 to 64",
            "wrong k": "31 columns, the weight's k is 32",
            "wrong rows": "1 to 64",
            "wrong dtype": "torch.float64",
            "wrong out": "contiguous [64, 48]",
            "weight": "is a matrix [n, k]",
            "strided": "contiguous()",
            "variant": "choose one of auto, ring",
            "mode": "'graph' or 'eager'",
            "gradient": "no backward",
            "second thread": "take turns",
            "different operators": "have different operators",
            "no matrix": "must be a matrix",
            "m left out": "pass the same m",
            "tune of one rank": "tune and mode",
            "closed": "has been closed",
            "many rows": "most rows",
            "choice": "no call of 0 rows",
            "inference mode": "right: True",
            "timeout": "seconds above 0",
            "device": "no device 'meta'",
            "unknown transport": "choose one of copy_engine",
            "transport without put": "has no put",
        }.items():
            assert words in said[name], name


def test_a_failure_of_one_rank_while_preparing_is_told_to_all() -> None:
    other, own = run(2, ranks.failure_while_preparing)
    assert own.startswith("AttributeError True")
    assert other.startswith("RunFailed True rank 1: loading GEMMs failed")


def test_ranks_that_differ_in_rows_hear_of_it_at_once() -> None:
    one, other = run(2, ranks.rows_differ_and_so_does_the_variant)
    assert one.startswith("True Rank 0 calls with 4 rows in all, rank 1 with 6")
    assert other.startswith("True Rank 1 calls with 6 rows in all, rank 0 with 4")


def test_later_operators_add_to_what_was_measured() -> None:
    assert run(2, ranks.tables_grow) == [[64, 128, 256]] * 2


def test_a_strided_input_is_handled() -> None:
    assert run(2, ranks.not_contiguous) == [True, True]


def test_a_killed_rank_is_heard_of() -> None:
    with pytest.raises(PeerLost, match="rank 1") as caught:
        run(2, ranks.killed_peer)
    assert ranks.heard_after_s(caught.value) < 10
    assert any("rank 1 step 1" in line for line in caught.value.details)


def test_without_torch_distributed_it_says_what_to_do() -> None:
    from stretto.runtime import TensorParallel
    from stretto.schedules.language import InvalidInput

    with pytest.raises(InvalidInput, match="init_process_group"):
        TensorParallel()
