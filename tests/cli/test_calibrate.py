"""``stretto calibrate``: what it refuses, and that a profile of this host can be used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


def stretto(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stretto.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


def refused(folder: Path, *arguments: str) -> str:
    done = stretto("calibrate", "-o", str(folder / "mine.json"), *arguments)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert not list(folder.iterdir())
    return " ".join(done.stderr.split())


def test_a_transport_that_cannot_be_calibrated(tmp_path: Path) -> None:
    assert "choose one of shared_memory, copy_engine" in refused(tmp_path, "--transport", "pigeon")


def test_gpus_need_two_ranks_and_a_dtype_they_multiply(tmp_path: Path) -> None:
    gpus = ("--transport", "copy_engine")
    assert "--tp is 1" in refused(tmp_path, *gpus, "--tp", "1")
    assert "--dtype is fp8" in refused(tmp_path, *gpus, "--dtype", "fp8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_without_gpus_it_says_why(tmp_path: Path) -> None:
    said = refused(tmp_path, "--transport", "copy_engine")
    assert "Calibrating GPUs is not possible here: PyTorch finds no CUDA device" in said
