"""``bench signals``, without a GPU: every candidate on stand-ins, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_stand_in
import pytest

from stretto.runtime.bench import signal_candidates, signals
from stretto.runtime.bench.signal_candidates import CANDIDATES
from stretto.runtime.bench.signals import SignalsPlan, measure_rank
from stretto.runtime.calibration import bursts
from stretto.runtime.calibration.bursts import Bursts, DeviceHung

pytest.importorskip("torch")


class Library:
    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability

    def bind(self, name: str, threads: int, *arguments: Any) -> Any:
        assert name == "stretto_set"
        assert len(arguments) == 5
        return SimpleNamespace(launch=lambda stream: None)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SignalsPlan:
    import torch
    import torch.distributed._symmetric_memory as symmetric

    gpu_stand_in.install(monkeypatch, bursts, signal_candidates)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(signal_candidates, "KernelLibrary", Library)
    handle = SimpleNamespace(
        put_signal=lambda rank, channel, limit_ms: None,
        wait_signal=lambda rank, channel, limit_ms: None,
    )
    monkeypatch.setattr(symmetric, "empty", lambda size, dtype, device: torch.empty(size))
    monkeypatch.setattr(symmetric, "rendezvous", lambda tensor, group: handle)
    monkeypatch.setattr(bursts, "SENTINEL", 16)
    monkeypatch.setattr(bursts.Bursts, "warm_up", lambda self, seconds: None)
    for name, value in {"LARGE": (64, 32, 32), "TILE": (8, 16), "WAVE_K": 32}.items():
        monkeypatch.setattr(signals, name, value)
    monkeypatch.setattr(signals, "COVER_US", 50.0)
    monkeypatch.setattr(signals, "PENDING_US", 50.0)
    return SignalsPlan(3, partial=str(tmp_path / "kept"), progress=False)


def measured(plan: SignalsPlan, rank: int) -> dict[str, Any]:
    transport = gpu_stand_in.Transport(rank, 2)
    figures: dict[str, Any] = {
        "rank": rank,
        "world_size": 2,
        "date": "2027-01-02",
        "device": {"name": "NVIDIA X1", "sm_count": 12},
        "versions": {"torch": "2.11.0"},
        "phases": {},
    }
    measure_rank(transport, plan, figures)
    return figures


def test_every_candidate_gives_a_row(plan: SignalsPlan, tmp_path: Path) -> None:
    report = signals._report([measured(plan, rank) for rank in range(2)], plan)
    json.dumps(report)
    assert [row["candidate"] for row in report["rows"]] == [cls.name for cls in CANDIDATES]
    assert report["shapes"]["one wave"] == [24, 64, 32]  # 3 x 4 tiles of 8 x 16
    for row in report["rows"][:-1]:
        assert row["not_measured"] == {}, row
        assert row["idle_us"] > 0
        assert all(one == [1.0, 1.0, 1.0] for one in row["pending_ratio"].values())
        assert all(us is not None for us in row["beside_us"].values())
    # What the stand-in reads back is not what was written.
    assert "peer's memory is unchanged" in report["rows"][-1]["not_measured"]["write, driver"]
    assert (tmp_path / "kept.rank0.json").exists()


def test_a_candidate_that_cannot_be_made_is_a_row_with_its_reason(
    plan: SignalsPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed._symmetric_memory as symmetric

    def broken(tensor: Any, group: Any) -> Any:
        raise RuntimeError("no rendezvous")

    monkeypatch.setattr(symmetric, "rendezvous", broken)
    report = signals._report([measured(plan, rank) for rank in range(2)], plan)
    row = report["rows"][2]
    assert row["candidate"] == "put_signal"
    assert row["not_measured"] == {
        "put_signal": "RuntimeError: no rendezvous",
        "put_signal, pending": "Unavailable: the candidate does not work here",
    }
    assert row["idle_us"] is None
    assert report["rows"][3]["not_measured"] == {}


def test_what_hangs_is_let_go_and_ends_the_run(
    plan: SignalsPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver waits for a signal that does not come: its words are set, and all give up."""
    import torch

    transport = gpu_stand_in.Transport(0, 2)
    candidate = signal_candidates.CopiedDriver(transport)
    released: list[bool] = []

    def release(done: Any) -> None:
        candidate.release(lambda: bool(released) or released.append(True) or False)

    hanging = Bursts(transport, limit_s=0.01, release=release)
    monkeypatch.setattr(torch.cuda.Event, "query", lambda self: False)

    def cases() -> Any:
        yield "never", lambda: hanging.chain("never", lambda: None, 1)

    with pytest.raises(DeviceHung):
        hanging.gather(cases(), bursts.Phase())
    assert released
    assert "never" in transport.aborted
