"""The commands as a user types them, end to end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.schedules import schedule_class
from stretto.schedules.language import Timeline, from_json, to_json
from stretto.transports import load_transport

RING = '''
from stretto.schedules import AllGatherGemm


class Mine(AllGatherGemm):
    """A ring of one's own."""

    variant = "mine"

    def enqueue(self, rank):
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        gathered = rank.workspace("gathered", rows=self.m, columns=self.k)
        compute, send, receive = rank.streams("compute", "send", "receive")
        held = x[rank]
        rank.gemm(x[rank], w, y[rank], on=compute)
        for step in rank.steps():
            source = rank - step
            rank.put(held, to=rank + 1, into=gathered[source + 1], on=send)
            arrival = rank.wait(gathered[source], on=receive)
            send.after(arrival)
            compute.after(arrival)
            rank.gemm(gathered[source], w, y[source], on=compute)
            held = gathered[source]
'''
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="real runs need torch"
)


def stretto(line: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the words of `line`, then `more` as they are."""
    return subprocess.run(
        [sys.executable, "-m", "stretto.cli", *line.split(), *more],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


def answer(line: str, *more: str) -> dict:
    done = stretto(line, *more, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_what_if_of_tp16_on_another_machine(tmp_path: Path) -> None:
    figure = tmp_path / "tp16.png"
    found = answer(
        "simulate ag-gemm --machine gb300-nvl72 --tp 16 -m 8192 -n 6288 -k 7168",
        "--figure",
        str(figure),
    )
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert len(found["ranks"]) == 16
    assert found["makespan_us"] >= found["roof_us"] * 0.9
    for rank in found["ranks"]:
        parts = rank["compute_us"] + rank["exposed_comm_us"] + rank["idle_us"]
        assert parts == pytest.approx(found["makespan_us"])
    assert found["validation"] == "not validated"


@pytest.mark.parametrize("machine", ["gb300-nvl72", "h200-sxm", "mi355x"])
@pytest.mark.parametrize("variant", ["ring", "direct", "eager", "unfused"])
def test_every_shipped_machine_simulates_every_variant(machine: str, variant: str) -> None:
    found = answer(
        f"simulate ag-gemm --machine {machine} --variant {variant} --tp 8 -m 4096 "
        "--preset kimi-k3/kda"
    )
    assert (found["n"], found["k"]) == (6288, 7168)
    assert found["makespan_us"] > 0


def test_global_sizes_are_divided() -> None:
    found = answer("simulate ag-gemm --machine h200-sxm --tp 4 -m 64 --global-n 1000 -k 64")
    assert found["n"] == 250


def test_a_traced_run_can_be_drawn_again(tmp_path: Path) -> None:
    saved = tmp_path / "timeline.json"
    answer("simulate ag-gemm --machine h200-sxm --tp 2 -m 64 -n 64 -k 64 --trace", str(saved))
    timeline = from_json(Timeline, saved.read_text())
    assert timeline.origin == "simulated"
    trace = tmp_path / "timeline.pftrace"
    answer("simulate ag-gemm --machine h200-sxm --tp 2 -m 64 -n 64 -k 64 --trace", str(trace))
    assert trace.stat().st_size > 500


@needs_torch
def test_a_schedule_of_ones_own_runs_and_simulates(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(RING)
    shape = "--tp 2 -m 33 -n 16 -k 32 --dtype fp32"
    run = answer(f"run {path}:Mine {shape} --check --iterations 1")
    assert run["variant"] == "mine"
    assert run["checked"] is True
    predicted = answer(f"simulate {path}:Mine --machine gb300-nvl72 {shape}")
    assert predicted["variant"] == "mine"


@needs_torch
def test_a_saved_program_runs(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    program = schedule_class("ag-gemm", "direct")(
        world_size=2,
        m=9,
        n=8,
        k=16,
        dtype="fp32",
        capabilities=load_transport("shared_memory").offered(),
    ).build()
    path.write_text(to_json(program))
    assert answer(f"run {path} --check --iterations 1")["m"] == 9


@needs_torch
@pytest.mark.parametrize("variant", ["ring", "unfused"])
def test_both_records_tell_the_same_story(variant: str, tmp_path: Path) -> None:
    figure = tmp_path / "both.svg"
    found = answer(
        f"compare ag-gemm --variant {variant} --tp 2 -m 256 -n 128 -k 128 --iterations 3 --calls 3",
        "--figure",
        str(figure),
    )
    assert [found[f"same_{what}"] for what in ("operations", "matching", "order")] == [True] * 3
    assert found["measured"]["checked"] is True
    assert {one["kind"] for one in found["kinds"]} >= {"gemm", "wait", "signal"}
    assert isinstance(found["makespan_error"], float)
    assert figure.exists()


def test_version_and_help() -> None:
    assert stretto("--version").stdout.strip()
    for command in ("run", "simulate", "compare", "calibrate", "machines", "figure", "doctor"):
        assert command in stretto("--help").stdout


def test_shell_completion_knows_the_schedules() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stretto.cli"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={
            **os.environ,
            "_STRETTO_COMPLETE": "complete_bash",
            "COMP_WORDS": "stretto simulate ag",
            "COMP_CWORD": "2",
        },
    )
    assert "ag-gemm" in done.stdout
