"""Runs on NVIDIA GPUs over the copy-engine transport; skipped where there are none."""

from __future__ import annotations

import os
from typing import Any

import pytest

from stretto.schedules import SCHEDULES, Program, schedule_class
from stretto.schedules.language import WaitTimeout
from stretto.schedules.verifier import check_timeline
from stretto.transports import load_transport

OVERLAPPED = [variant for variant in SCHEDULES["ag-gemm"] if variant != "unfused"]

# Ranks may share a GPU: TP4 and TP8 are checked for correctness on two.
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


def program(
    variant: str, tp: int, m: int, *, n: int = 256, k: int = 512, dtype: str = "bf16"
) -> Program:
    name = "rccl" if variant == "unfused" else "copy_engine"
    capabilities = load_transport(name).offered()
    return schedule_class("ag-gemm", variant)(
        world_size=tp,
        m=m,
        n=n,
        k=k,
        dtype=dtype,  # type: ignore[arg-type]
        capabilities=capabilities,
    ).build()


def run(*programs: Program, **changes: Any) -> list[Any]:
    from stretto.runtime.session import RunOptions, run_programs

    options = {"iterations": 2, "warmup": 1, "check": True, "timeout_s": 10.0, **changes}
    return run_programs(list(programs), RunOptions(**options))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_variant_and_size_is_right_on_two_gpus(mode: str, dtype: str) -> None:
    programs = [
        program(variant, 2, m, dtype=dtype)
        for variant in SCHEDULES["ag-gemm"]
        for m in (1, 9, 257, 1000, 4096, 8191)
    ]
    for result in run(*programs, mode=mode):
        assert len(result.checks) == 2
        assert max(check.largest_error for check in result.checks) <= 1.0


@pytest.mark.gpu(2)
@pytest.mark.parametrize("tp", [4, 8])
def test_ranks_that_share_gpus_are_right(tp: int) -> None:
    programs = [program(variant, tp, m) for variant in OVERLAPPED for m in (9, 257, 1000)]
    for result in run(*programs, timeout_s=30.0):
        assert len(result.checks) == tp


@pytest.mark.gpu(2)
@pytest.mark.parametrize("calls", [1, 2, 3, 7])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_calls_back_to_back_with_a_late_rank(calls: int, mode: str) -> None:
    one = program("ring", 2, 512).repeated(calls)
    (result,) = run(one, mode=mode, delay_s=((1, 0.05),), iterations=4)
    assert len(result.timeline.spans) == one.operations
    assert result.timeline.clock_error_us < 20.0
    assert check_timeline(result.timeline, one) == ()


@pytest.mark.gpu(2)
def test_a_signal_that_never_comes_is_named_and_the_next_run_works() -> None:
    broken = program("ring", 2, 64).without("put0")
    with pytest.raises(
        WaitTimeout, match=r"operation 'wait0'.*gathered.arrived.*expected epoch"
    ) as caught:
        run(broken, timeout_s=1.0, check=False)
    lines = caught.value.details
    assert {line.split(",")[0] for line in lines if "NOT reached" in line} == {
        "rank 0 step 1 wait0",
        "rank 1 step 1 wait0",
    }
    assert len(run(program("ring", 2, 64))[0].checks) == 2
