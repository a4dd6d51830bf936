"""``stretto bench signals``: what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.cli.bench_gpu import bench
from stretto.schedules.language import InvalidInput, Unavailable

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("arguments", "saying"),
    [(("--rounds", "2"), "at least 3"), (("-o", "/nowhere/at/all.json"), "/nowhere/at")],
)
def test_what_cannot_be_asked_for(arguments: tuple[str, ...], saying: str) -> None:
    done = CliRunner().invoke(bench, ["signals", *arguments])
    assert isinstance(done.exception, InvalidInput)
    assert saying in str(done.exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_without_gpus_it_says_why(tmp_path: Path) -> None:
    done = CliRunner().invoke(bench, ["signals", "-o", str(tmp_path / "found.json")])
    assert isinstance(done.exception, Unavailable)
    assert "needs two NVIDIA GPUs: PyTorch finds no CUDA device" in str(done.exception)
    assert not list(tmp_path.iterdir())
