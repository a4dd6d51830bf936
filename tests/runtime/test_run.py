"""Real runs: processes over shared memory, against float64, killed, delayed, under torchrun."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.schedules import SCHEDULES, Program, schedule_class
from stretto.schedules.language import CheckFailed, InvalidInput, Put, WaitTimeout
from stretto.transports import load_transport

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="real runs need torch"
)


def program(
    variant: str, tp: int, m: int, *, n: int = 32, k: int = 64, dtype: str = "fp32"
) -> Program:
    cls = schedule_class("ag-gemm", variant)
    capabilities = load_transport("shared_memory").offered()
    return cls(world_size=tp, m=m, n=n, k=k, dtype=dtype, capabilities=capabilities).build()  # type: ignore[arg-type]


def words(line: str) -> list[str]:
    return line.split()


def options(**changes: object) -> object:
    from stretto.runtime.session import RunOptions

    return RunOptions(**{"iterations": 1, "warmup": 0, "check": True, "timeout_s": 20, **changes})  # type: ignore[arg-type]


def run(*programs: Program, **changes: object) -> list:
    from stretto.runtime.session import run_programs

    return run_programs(list(programs), options(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_variant_is_right_with_short_and_empty_shards(tp: int) -> None:
    rows = (1, 2, 9, 33)
    programs = [program(variant, tp, m) for variant in SCHEDULES["ag-gemm"] for m in rows]
    results = run(*programs)
    assert len(results) == len(programs)
    for one, result in zip(programs, results, strict=True):
        assert len(result.checks) == tp, one.variant
        assert max(check.largest_error for check in result.checks) <= 1.0


def test_eight_ranks_with_empty_shards() -> None:
    (result,) = run(program("ring", 8, 9))
    assert len(result.checks) == 8


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_dtype(dtype: str) -> None:
    (result,) = run(program("ring", 2, 100, dtype=dtype))
    assert len(result.checks) == 2


def test_calls_back_to_back_with_a_late_rank() -> None:
    one = program("ring", 3, 30).repeated(5)
    (result,) = run(one, delay_s=((1, 0.2),), iterations=2)
    assert len(result.checks) == 3
    assert len(result.timeline.spans) == one.operations


def test_the_record_is_that_of_the_program() -> None:
    one = program("direct", 2, 64).repeated(3)
    (result,) = run(one)
    timeline = result.timeline
    assert timeline.origin == "measured"
    assert len(timeline.spans) == one.operations
    assert timeline.start_us == 0.0
    waits = [span for span in timeline.spans if span.kind == "wait"]
    for span in waits:
        for event in span.awaited:
            assert event.seen is not None
            assert (event.seen - event.value) & 0xFFFFFFFF < 2**31
    # a wait of the data never ends before its put began
    for key, signals in timeline.matches.items():
        for releaser in signals:
            assert timeline.by_key[releaser].start_us <= timeline.by_key[key].end_us


def test_a_signal_that_never_comes_is_named() -> None:
    one = program("ring", 2, 8).without("put0")
    with pytest.raises(WaitTimeout) as caught:
        run(one, timeout_s=1.0)
    text = str(caught.value)
    for word in ("rank", "compute", "wait0", "gathered.arrived", "expected"):
        assert word in text.lower(), text
    details = caught.value.details
    missing = [line for line in details if "NOT reached" in line]
    assert [line.split(",")[0] for line in missing] == [
        "rank 0 step 1 wait0",
        "rank 1 step 1 wait0",
    ]
    assert len(details) > len(missing)  # credits of earlier calls, which have come


def test_a_wrong_schedule_fails_the_check() -> None:
    """Without its data's put the ring multiplies rows that nobody sent."""
    one = program("ring", 2, 8)
    (put,) = [op for op in one.phases[0].bodies[0].operations if isinstance(op, Put)]
    broken = one.without(put.id, "wait0")
    with pytest.raises(CheckFailed, match="reference"):
        run(broken)


def test_check_needs_a_reference() -> None:
    from dataclasses import replace

    with pytest.raises(InvalidInput, match="without --check"):
        run(replace(program("ring", 2, 8), computes="something_else"))


def test_torchrun(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        "-m",
        "stretto.cli",
        *words("run ag-gemm --tp 2 -m 33 -n 16 -k 32 --dtype fp32 --check --iterations 1 --json"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["checked"] is True
    assert len(answer["ranks"]) == 2


def _children(pid: int) -> list[int]:
    listing = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    ).stdout
    return [
        int(line.split()[0])
        for line in listing.splitlines()
        if "multiprocessing.spawn" in line or "spawn_main" in line
    ]


def _long_run() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "stretto.cli",
            *words("run ag-gemm --tp 2 -m 512 -n 512 -k 512 --iterations 200000"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for_ranks(process: subprocess.Popen[str], count: int) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = _children(process.pid)
        if len(found) == count:
            time.sleep(6)  # imports, then the run itself
            return found
        time.sleep(0.1)
    raise AssertionError("the ranks did not start")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_rank_ends_the_run_of_all(number: int) -> None:
    before = set(Path("/dev/shm").iterdir())
    process = _long_run()
    try:
        ranks = _wait_for_ranks(process, 2)
        killed = time.monotonic()
        os.kill(ranks[1], number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert time.monotonic() - killed < 15
    assert process.returncode == 1
    assert "rank 1" in errors.lower(), errors
    assert set(Path("/dev/shm").iterdir()) <= before


def test_terminating_the_run_ends_all_ranks_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = _long_run()
    try:
        ranks = _wait_for_ranks(process, 2)
        assert list(tmp_path.glob("stretto-*"))
        process.terminate()
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 143
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert not list(tmp_path.glob("stretto-*"))


def test_ctrl_c_ends_all_ranks() -> None:
    process = _long_run()
    try:
        ranks = _wait_for_ranks(process, 2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
