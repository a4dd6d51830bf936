"""What is answered in one sentence, with exit code 2, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SIMULATE = ["simulate", "ag-gemm", "--machine", "gb300-nvl72"]
SHAPE = ["--tp", "2", "-m", "64", "-n", "64", "-k", "64"]


def stretto(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stretto.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "COLUMNS": "200", **(env or {})},
    )


def refused(*arguments: str, saying: str, env: dict[str, str] | None = None) -> None:
    done = stretto(*arguments, env=env)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert saying in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize(
    ("arguments", "saying"),
    [
        (["simulate", "al-gemm", "--machine", "gb300-nvl72", *SHAPE], "ag-gemm"),
        ([*SIMULATE, *SHAPE, "--variant", "spiral"], "ring, direct, eager, unfused"),
        (["simulate", "ag-gemm", "--machine", "abacus", *SHAPE], "gb300-nvl72"),
        ([*SIMULATE, *SHAPE, "--transport", "pigeon"], "copy_engine"),
        ([*SIMULATE, *SHAPE, "--transport", "nccl"], "has no put"),
        ([*SIMULATE, *SHAPE, "--dtype", "int4"], "bf16"),
        ([*SIMULATE, *SHAPE, "--mode", "lazy"], "eager or graph"),
        ([*SIMULATE, *SHAPE, "--jitter", "2"], "fraction"),
        ([*SIMULATE, *SHAPE, "--slow-rank", "fast"], "RANK:FACTOR"),
        ([*SIMULATE, *SHAPE, "--slow-rank", "9:1.5"], "there are 2 ranks"),
        ([*SIMULATE, *SHAPE, "--calls", "0"], "at least 1"),
        ([*SIMULATE, "--tp", "0", "-m", "64", "-n", "64", "-k", "64"], "at least one rank"),
        ([*SIMULATE, "--tp", "2", "-m", "0", "-n", "64", "-k", "64"], "m is 0"),
        ([*SIMULATE, "--tp", "2", "-m", "-5", "-n", "64", "-k", "64"], "m is -5"),
        ([*SIMULATE, "--tp", "2", "-m", "9" * 30, "-n", "64", "-k", "64"], "whole number from 1"),
        ([*SIMULATE, "--tp", "2", "-m", "many", "-n", "64", "-k", "64"], "valid integer"),
        ([*SIMULATE, "--tp", "2"], "Give -m and -n and -k"),
        ([*SIMULATE, "--tp", "73", "-m", "730", "-n", "64", "-k", "64"], "at most 72 ranks"),
        ([*SIMULATE, *SHAPE, "--global-n", "128"], "not both"),
        ([*SIMULATE, *SHAPE, "--preset", "kimi-k3/kda"], "leave -n and -k out"),
        ([*SIMULATE, "--tp", "2", "-m", "64", "--preset", "kimi-k3"], "Name a projection"),
        ([*SIMULATE, "--tp", "2", "-m", "64", "--preset", "gpt-9/x"], "kimi-k3/kda"),
        ([*SIMULATE, *SHAPE, "--figure", "/nowhere/at/all.png"], "directory"),
        ([*SIMULATE, *SHAPE, "--figure", "picture.bmp"], ".png"),
        ([*SIMULATE, *SHAPE, "--trace", "/nowhere/at/all.json"], "directory"),
        (["simulate", "mine.py", "--machine", "gb300-nvl72", *SHAPE], "Name the object"),
        (["simulate", "gone.py:Ring", "--machine", "gb300-nvl72", *SHAPE], "no file"),
        (["simulate", "gone.json", "--machine", "gb300-nvl72"], "cannot be read"),
        (["simulate", "ag-gemm", "--machine", "gone.json", *SHAPE], "gone.json"),
        (["run", "ag-gemm", *SHAPE, "--transport", "copy_engine2"], "shared_memory"),
        (["run", "ag-gemm", *SHAPE, "--iterations", "0"], "at least 1"),
        (["compare", "ag-gemm", *SHAPE, "--machine", "gb300-nvl72"], "not this one"),
        (["figure", "gone.json", "-o", "a.png"], "cannot be read"),
        (["calibrate", "-o", "/nowhere/host.json"], "existing folder"),
        (["machines", "show", "abacus"], "gb300-nvl72"),
    ],
)
def test_bad_words(arguments: list[str], saying: str, tmp_path: Path) -> None:
    refused(*arguments, saying=saying)


@pytest.mark.parametrize(
    ("text", "saying"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        ('"a profile"', "profile"),
        ('{"schema_version": 99}', "99"),
        ('{"schema_version": 1, "name": "x"}', "required"),
    ],
)
def test_bad_profiles(text: str, saying: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    refused("simulate", "ag-gemm", "--machine", str(path), *SHAPE, saying=saying)


def test_a_truncated_profile(tmp_path: Path) -> None:
    whole = stretto("machines", "show", "gb300-nvl72", "--json").stdout
    path = tmp_path / "machine.json"
    path.write_text(whole[: len(whole) // 2])
    refused("simulate", "ag-gemm", "--machine", str(path), *SHAPE, saying="machine.json")


def test_a_program_of_another_schema_version(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    path.write_text(json.dumps({"schema_version": 7}))
    refused("simulate", str(path), "--machine", "gb300-nvl72", saying="Program")


def test_a_profile_of_another_host(tmp_path: Path) -> None:
    from stretto.sim.machine import Machine

    host = tmp_path / "host.json"
    made = stretto("calibrate", "-o", str(host), "--tp", "1", "--dtype", "fp32")
    if made.returncode == 2 and "PyTorch" in made.stderr:
        pytest.skip("calibrating needs torch")
    assert made.returncode == 0, made.stderr
    profile = json.loads(host.read_text())
    profile["host"]["fingerprint"]["cpu_model"] = "Analytical Engine"
    host.write_text(json.dumps(profile))
    assert Machine.load(str(host)).kind == "cpu"
    refused("compare", "ag-gemm", *SHAPE, "--machine", str(host), saying="Analytical Engine")


def test_json_errors_are_json() -> None:
    done = stretto(*SIMULATE, "--tp", "0", "-m", "1", "-n", "1", "-k", "1", "--json")
    assert done.returncode == 2
    assert "at least one rank" in json.loads(done.stdout)["error"]


def _without_torch(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose Python cannot import torch."""
    blocked = tmp_path / "torch"
    blocked.mkdir()
    (blocked / "__init__.py").write_text("raise ImportError('blocked by a test')\n")
    return {"PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize("command", ["run", "compare"])
def test_no_torch_says_what_to_install(command: str, tmp_path: Path) -> None:
    refused(
        command,
        "ag-gemm",
        *SHAPE,
        saying="pip install 'stretto[run]'",
        env=_without_torch(tmp_path),
    )


def test_simulate_figure_and_doctor_work_without_torch(tmp_path: Path) -> None:
    env = _without_torch(tmp_path)
    saved, drawn = tmp_path / "t.json", tmp_path / "t.svg"
    done = stretto(*SIMULATE, *SHAPE, "--trace", str(saved), "--json", env=env)
    assert done.returncode == 0, done.stderr
    assert {"makespan_us", "roof_us", "exposed_comm_us", "overlap_efficiency", "ranks"} <= set(
        json.loads(done.stdout)
    )
    assert stretto("figure", str(saved), "-o", str(drawn), env=env).returncode == 0
    assert drawn.read_text().startswith("<?xml")
    assert stretto("doctor", env=env).returncode == 0
