"""``stretto verify``, and the refusal of what is unsafe by the commands that run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stretto
from stretto.schedules.language import Timeline, from_json, to_json

PUBLISHED = str(Path(stretto.__file__).parent / "schedules" / "published_ring.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stretto.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_a_safe_schedule() -> None:
    done = run("verify", "ag-gemm", "--tp", "4")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "ag-gemm ring, TP4, m=15 n=8 k=8" in text
    assert "verdict safe" in text
    assert "any number of calls, back to back, or in turn with others" in text
    assert "can be removed" in text.lower()


@pytest.mark.parametrize("options", [["--transport", "shared_memory"], ["--machine", "h200-sxm"]])
def test_json(options: list[str]) -> None:
    done = run(
        "verify", "ag-gemm", "--variant", "eager", "--tp", "8", "-m", "9", "--json", *options
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["safe"] is True
    assert answer["findings"] == []
    assert answer["calls"] == 3
    assert answer["counterexample"] is None


def test_an_unsafe_schedule_with_its_counterexample(tmp_path: Path) -> None:
    figure = tmp_path / "counterexample.svg"
    arguments = [
        "verify",
        f"{PUBLISHED}:PublishedRing",
        "--tp",
        "2",
        "-m",
        "4",
        "-n",
        "2",
        "-k",
        "2",
    ]
    done = run(*arguments, "--figure", str(figure))
    assert done.returncode == 1, done.stderr
    text = " ".join(done.stdout.split())
    assert "NOT SAFE: 1 error" in text
    assert (
        "Rank 1's put0 of call 1 may overwrite rows 2 to 3 of 'gathered' on rank 0 before rank 0's "
        "gemm1 of call 0 has read them." in text
    )
    assert "rank 0, stream compute, call 0, operation gemm1 (number" in text
    assert "reads gathered[2:4, 0:2] of rank 0, slot 0" in text
    assert text.count("this is what the figure shows") == 1
    assert figure.stat().st_size > 1000
    done = run(*arguments, "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["safe"] is False
    (finding,) = answer["findings"]
    assert finding["kind"] == "reuse"
    assert [place["operation"] for place in finding["places"]] == ["gemm1", "put0"]
    timeline = from_json(Timeline, json.dumps(answer["counterexample"]))
    assert len(timeline.spans) == 9
    assert [mark.name for mark in timeline.marks] == ["gemm1 of call 0", "put0 of call 1"]


def test_a_figure_that_is_not_drawn_is_not_passed_over(tmp_path: Path) -> None:
    figure = tmp_path / "none.png"
    done = run("verify", "ag-gemm", "--tp", "2", "--figure", str(figure))
    assert done.returncode == 0, done.stderr
    assert "not drawn: there is no error" in done.stdout
    assert not figure.exists()


def test_turns_with_other_schedules() -> None:
    done = run(
        "verify", "ag-gemm", "--tp", "3", "--then", "ag-gemm:eager", "--then", "ag-gemm:unfused"
    )
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "then ag-gemm eager, then ag-gemm unfused" in text
    assert "9 calls" in text


def test_a_recorded_run_is_held_against_its_program(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    shape = ["--tp", "2", "-m", "64", "-n", "32", "-k", "32"]
    machine = ["--machine", "h200-sxm"]
    assert run("simulate", "ag-gemm", *machine, *shape, "--trace", str(trace)).returncode == 0
    done = run("verify", "ag-gemm", *machine, *shape, "--record", str(trace))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every edge is kept in time" in done.stdout
    timeline = from_json(Timeline, trace.read_text())
    trace.write_text(to_json(Timeline(**{**vars_of(timeline), "spans": timeline.spans[1:]})))
    done = run("verify", "ag-gemm", *machine, *shape, "--record", str(trace), "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["safe"] is True
    assert "is not in the record" in answer["record"][0]["message"]


def vars_of(timeline: Timeline) -> dict[str, object]:
    from dataclasses import fields

    return {field.name: getattr(timeline, field.name) for field in fields(timeline)}


@pytest.mark.parametrize(
    ("arguments", "saying"),
    [
        (["verify", "al-gemm"], "ag-gemm"),
        (["verify", "ag-gemm", "--calls", "0"], "--calls is 0"),
        (["verify", "ag-gemm", "--sms", "0"], "--sms is 0"),
        (["verify", "ag-gemm", "--queues", "-1"], "--queues is -1"),
        (["verify", "ag-gemm", "--transport", "pigeon"], "shared_memory"),
        (["verify", "ag-gemm", "--figure", "/nowhere/at/all.png"], "directory"),
        (["verify", "ag-gemm", "--record", "/nowhere/at/all.json"], "cannot be read"),
        (
            ["run", f"{PUBLISHED}:PublishedRing", "--tp", "2", "-m", "4", "-n", "2", "-k", "2"],
            "not safe",
        ),
        (
            ["compare", f"{PUBLISHED}:PublishedRing", "--tp", "2", "-m", "4", "-n", "2", "-k", "2"],
            "not safe",
        ),
    ],
)
def test_what_is_refused(arguments: list[str], saying: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert saying in " ".join(done.stderr.split()), done.stderr


def test_no_verify_runs_it_all_the_same() -> None:
    done = run(
        *["run", f"{PUBLISHED}:PublishedRing", "--tp", "2", "-m", "4", "-n", "8", "-k", "8"],
        *["--dtype", "fp32", "--iterations", "1", "--warmup", "0", "--no-verify", "--json"],
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["variant"] == "published-ring"
