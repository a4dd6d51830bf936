"""Calibration of GPUs, without one: every phase on stand-ins, and profiles from made figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_stand_in
import pytest

from stretto.runtime.calibration import bursts, gpu, gpu_probes, host_costs
from stretto.runtime.calibration.bursts import calls_in
from stretto.runtime.calibration.figures import Figures, growing, spread
from stretto.runtime.calibration.gpu import COLLECTIVE_BYTES, PUSH_BYTES, ROWS, gpu_plan
from stretto.runtime.calibration.gpu_probes import GpuPlan, measure_gpu
from stretto.runtime.calibration.gpu_profile import gpu_profile, slowdown
from stretto.schedules import SCHEDULES, schedule_class
from stretto.schedules.language import InvalidInput, RunFailed, Unavailable
from stretto.sim import Machine, simulate

pytest.importorskip("torch")

GEMM_TFLOPS, PUSH_GB_PER_S, NODE_US = 600.0, 380.0, 1.25
SITES = ((6288, 7168), (3648, 7168), (4096, 4096), (2048, 2048), (5120, 8192), (7168, 1536))


# ---- the arithmetic ------------------------------------------------------------------------------


def test_a_slowdown_counts_only_while_there_was_something_beside() -> None:
    assert slowdown(100.0, 120.0, 1.5) == pytest.approx(0.2)
    # Half of 120 us beside it, the other 60 alone: 40 of 100 us of work took 60.
    assert slowdown(100.0, 120.0, 0.5) == pytest.approx(0.5)
    assert slowdown(100.0, 99.0, 2.0) == 0.0


def test_graphs_are_long_and_bursts_are_short() -> None:
    for estimate_us in (2.0, 30.0, 1000.0, 20_000.0, 90_000.0):
        calls, replays = calls_in(estimate_us)
        assert 1 <= calls <= 64
        assert 1 <= replays <= 5
        assert calls * replays * estimate_us <= 150_000.0
    assert calls_in(1000.0) == (4, 5)  # as in the benchmark


def test_the_slowest_rank_of_each_round_counts() -> None:
    ranks = [made_rank({"push": {"us": {"a": times}}}) for times in ([1.0, 5.0, 2.0], [3.0, 4.0])]
    assert Figures(ranks).times("push", "a") == [3.0, 5.0]
    assert Figures(ranks).us("push", "b") is None
    assert growing([(2, 5.0), (1, 6.0), (3, 7.0)]) == [(1, 6.0), (2, 6.0), (3, 7.0)]
    assert spread([1.0] * 9 + [2.0]) == 0.0


# ---- a profile from figures ----------------------------------------------------------------------


def test_a_profile_of_made_figures_holds_what_was_measured() -> None:
    profile = gpu_profile(made_ranks())
    machine = Machine.from_profile(profile)
    transport = machine.transport("copy_engine")
    assert machine.name == "x1-x2"
    assert machine.gemm_us(4096, 6288, 7168, "bf16") == pytest.approx(
        gemm_us(4096, 6288, 7168), rel=1e-3
    )
    assert transport.put_us(1 << 20) == pytest.approx(push_us(1 << 20), rel=1e-3)
    assert transport.signal_us == pytest.approx(2.5)
    assert transport.wait_us == pytest.approx(3.5)
    assert transport.gemm_slowdown_beside_put == pytest.approx(0.15, rel=1e-3)
    assert machine.transport("rccl").gemm_slowdown_beside_collective == pytest.approx(0.3, rel=1e-3)
    assert machine.fabric.egress_gb_per_s == pytest.approx(PUSH_GB_PER_S, rel=0.01)
    assert machine.host.enqueue_us("graph") == 0.0
    assert machine.host.enqueue_us("eager") == pytest.approx(4.0)
    assert machine.host.call_us("eager") == pytest.approx(16.0)
    assert machine.host.call_us("graph") == pytest.approx(8.75)
    assert machine.host.handover_us == pytest.approx(1.0)
    assert machine.domain_size == 2
    note = profile.provenance.note
    assert "software power cap" in note
    assert "sentinel" in note
    fitted = profile.compute.gemm["bf16"].model
    assert fitted is not None
    # Shapes that were not measured come from the fitted model.
    assert machine.gemm_us(4096, 6000, 6000, "bf16") == pytest.approx(
        gemm_us(4096, 6000, 6000), rel=0.15
    )


def test_the_profile_is_a_file_that_every_variant_can_be_simulated_on(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    path.write_text(Machine.from_profile(gpu_profile(made_ranks(), name="mine")).to_json())
    machine = Machine.load(path)
    for variant in SCHEDULES["ag-gemm"]:
        name = machine.default_transport(variant)
        program = schedule_class("ag-gemm", variant)(
            world_size=2,
            m=8192,
            n=6288,
            k=7168,
            capabilities=machine.transport(name).capabilities,
        ).build()
        for mode in ("eager", "graph"):
            result = simulate(program, machine, mode=mode)  # type: ignore[arg-type]
            assert 1.0 < result.makespan_us / gemm_us(8192, 6288, 7168) < 2.0
            assert result.validity != "not validated"


def test_what_failed_is_assumed_and_says_why() -> None:
    ranks = made_ranks(without=("signal", "host", "collective", "beside collective"))
    for rank in ranks:
        rank["phases"]["signal"] = {"failed": {"": "RuntimeError: no signal today"}}
    profile = gpu_profile(ranks)
    signal = profile.transports["copy_engine"].signal_us
    assert signal is not None
    assert signal.origin == "assumed"
    assert "no signal today" in signal.source
    assert profile.host.call_us.graph.origin == "assumed"
    assert profile.transports["nccl"].collectives == {}
    assert "no signal today" in profile.provenance.note


@pytest.mark.parametrize(
    ("without", "message"), [("push", "Pushes were not measured"), ("gemm bf16", "No GEMM was")]
)
def test_no_profile_without_pushes_or_gemms(without: str, message: str) -> None:
    with pytest.raises(RunFailed, match=message):
        gpu_profile(made_ranks(without=(without,)))


# ---- the phases, on stand-ins --------------------------------------------------------------------


@pytest.fixture
def small_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> GpuPlan:
    gpu_stand_in.install(monkeypatch, bursts, gpu_probes)
    monkeypatch.setattr(bursts, "SENTINEL", 16)
    monkeypatch.setattr(gpu_probes, "BESIDE_SHAPES", ((64, 32, 32), (32, 64, 32)))
    monkeypatch.setattr(gpu_probes, "SIGNAL_SHAPE", (64, 32, 32))
    monkeypatch.setattr(gpu_probes, "BESIDE_BYTES", 1 << 12)
    monkeypatch.setattr(gpu_probes, "BESIDE_US", 50.0)
    monkeypatch.setattr(gpu_probes, "COPY_BYTES", 1 << 12)
    monkeypatch.setattr(host_costs, "SMALL", (8, 16, 16))
    monkeypatch.setattr(bursts.Bursts, "warm_up", lambda self, seconds: None)
    monkeypatch.setattr("stretto.runtime.gpu.prepare", lambda *_: gpu_stand_in.Executor())
    return GpuPlan(
        world_size=2,
        dtypes=("bf16", "fp16"),
        sites=((32, 32), (64, 32)),
        rows=(8, 16),
        push_bytes=(4, 4096, 1 << 16),
        collective_bytes=(1 << 12, 1 << 14),
        rounds=3,
        partial=str(tmp_path / "kept"),
        progress=False,
    )


def test_every_phase_finds_its_figures(small_plan: GpuPlan, tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        transport = gpu_stand_in.Transport(rank, 2)
        ranks.append(measure_gpu(transport, small_plan))
        assert transport.launched > 100
    for phase, content in ranks[0]["phases"].items():
        assert content["failed"] == {}, phase
        assert content["sentinel_us"], phase
        assert len(content["conditions"]) == 3, phase
        assert all(len(times) == 3 for times in content["us"].values()), phase
    assert set(ranks[0]["phases"]["signal"]["us"]) >= {
        "chain/idle",
        "chain/beside/side",
        "ping_pong/idle",
        "ping_pong/beside/cover",
        "exchange/idle",
    }
    kept = json.loads((tmp_path / "kept.rank1.json").read_text())
    assert kept["phases"].keys() == ranks[1]["phases"].keys()
    profile = gpu_profile(
        [json.loads((tmp_path / f"kept.rank{rank}.json").read_text()) for rank in range(2)]
    )
    assert {*profile.compute.gemm} == {"bf16", "fp16"}
    assert {*profile.transports["nccl"].collectives} == {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
    }
    assert profile.transports["copy_engine"].signal_us.origin == "measured"  # type: ignore[union-attr]


def test_beyond_two_ranks_several_peers_are_pushed_to_at_once(
    small_plan: GpuPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_probes, "CROWD_BYTES", (4096,))
    plan = replace(small_plan, world_size=8, dtypes=("bf16",), partial=None)
    ranks = [measure_gpu(gpu_stand_in.Transport(rank, 8), plan) for rank in range(8)]
    pushes = ranks[3]["phases"]["push"]
    assert pushes["failed"] == {}
    crowds = {"to_2/4096", "to_4/4096", "to_all/4096", "incast/4096", "to_all/65536"}
    assert {*pushes["us"]} >= crowds
    assert "to_2/65536" not in pushes["us"]
    assert gpu_profile(ranks).fabric.egress_gb_per_s.origin == "measured"


def test_a_phase_that_fails_is_named_and_the_others_go_on(
    small_plan: GpuPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist

    def broken(backend: str) -> Any:
        raise RuntimeError("no NCCL here\nand more lines")

    monkeypatch.setattr(dist, "new_group", broken)
    phases = measure_gpu(gpu_stand_in.Transport(0, 2), small_plan)["phases"]
    assert phases["collective"]["failed"] == {"": "RuntimeError: no NCCL here"}
    assert phases["gemm bf16"]["failed"] == {}


def test_one_case_that_fails_is_left_out(
    small_plan: GpuPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> Any:
        raise ValueError("no verbs")

    monkeypatch.setattr(host_costs, "eager_run", broken)
    host = measure_gpu(gpu_stand_in.Transport(0, 2), small_plan)["phases"]["host"]
    assert host["failed"] == {"run/1": "ValueError: no verbs", "run/4": "ValueError: no verbs"}
    assert "node" in host["us"]


def test_a_rank_that_is_lost_ends_the_measurements(
    small_plan: GpuPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = gpu_stand_in.Transport(0, 2)

    def lost() -> None:
        raise RunFailed("rank 1 died")

    monkeypatch.setattr(transport, "raise_if_failed", lost)
    phases = measure_gpu(transport, small_plan)["phases"]
    assert list(phases) == ["push"]
    assert "rank 1 died" in phases["push"]["failed"][""]
    assert "rank 1 died" in transport.aborted  # so the others do not go on either


# ---- the plan, and where there is no GPU ---------------------------------------------------------


def test_the_plan_covers_the_presets() -> None:
    plan = gpu_plan(2)
    assert (6288, 7168) in plan.sites
    assert (5120, 8192) in plan.sites
    assert (plan.rows[0], plan.rows[-1]) == (64, 32768)


@pytest.mark.parametrize(("tp", "dtype"), [(1, "bf16"), (2, "fp8")])
def test_plans_that_cannot_be(tp: int, dtype: str) -> None:
    with pytest.raises(InvalidInput, match=r"--tp is 1|--dtype is fp8"):
        gpu_plan(tp, (dtype,))


def test_without_gpus_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    with pytest.raises(Unavailable, match="Calibrating GPUs is not possible here"):
        gpu.calibrate_gpus(gpu_plan(2))


# ---- made figures --------------------------------------------------------------------------------


def gemm_us(m: int, n: int, k: int) -> float:
    return 4.0 + 2.0 * m * n * k / GEMM_TFLOPS / 1e6


def push_us(size: int) -> float:
    return 2.5 + size / PUSH_GB_PER_S / 1e3


def made_ranks(without: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return what two ranks of a simple machine would have found."""
    shape = "4096/6288/7168"
    phases: dict[str, dict[str, float]] = {
        "push": {
            f"{way}/{size}": push_us(size)
            for way in ("one_way/0", "one_way/1", "both_ways")
            for size in PUSH_BYTES
        },
        "signal": {
            "chain/idle": 2.5,
            "chain/beside/side": 2.75,
            "ping_pong/idle": 6.0,
            "ping_pong/beside/side": 9.0,
            "exchange/idle": 6.5,
        },
        "host": {
            "node": NODE_US,
            "ladder": NODE_US + 1.0,
            "copy": 500.0,
            "call": 10.0,
            "run/1": 16.0 + 8 * 4.0,
            "run/1/operations": 8.0,
            "run/4": 16.0 + 32 * 4.0,
            "run/4/operations": 32.0,
        },
        "gemm bf16": {
            f"{m}/{n}/{k}": gemm_us(m, n, k) for n, k in SITES for m in (8, *ROWS, 65536)
        },
        "collective": {
            f"{kind}/{size}": 8.0 + size / 240e3
            for kind in ("all_gather", "reduce_scatter", "all_reduce")
            for size in COLLECTIVE_BYTES
        },
    }
    for what, share in (("push", 0.15), ("collective", 0.3)):
        phases[f"beside {what}"] = {
            f"alone/{shape}/main": 100.0,
            f"{what}/{shape}/main": 100.0 * (1 + share),
            f"{what}/{shape}/side": 350.0,
            f"{what}/{shape}/cover": 1.4,
        }
    return [
        made_rank(
            {
                name: {
                    "us": {key: [us, us * 0.99, us * 1.01] for key, us in cases.items()},
                    "sentinel_us": [200.0, 201.0, 202.0],
                    "conditions": [
                        {"sm_mhz": 1700, "celsius": 60, "watts": 690.0,
                         "throttled_by": ["software power cap"]}
                    ],
                    "failed": {},
                }
                for name, cases in phases.items()
                if name not in without
            },
            rank,
        )
        for rank in range(2)
    ]  # fmt: skip


def made_rank(phases: dict[str, Any], rank: int = 0) -> dict[str, Any]:
    return {
        "rank": rank,
        "world_size": 2,
        "date": "2027-01-02",
        "device": {"name": "NVIDIA X1", "count": 2, "sm_count": 132, "copy_engines": 3},
        "versions": {"torch": "2.11.0", "nccl": "2.28.9", "driver": "580"},
        "phases": phases,
    }
