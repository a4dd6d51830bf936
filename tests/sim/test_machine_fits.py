"""Fits of the GEMM model, the importer, and the shipped profiles against their data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest

from stretto.schedules.language import InvalidInput, Unavailable
from stretto.sim.machine import Estimate, Machine, import_aiconfigurator
from stretto.sim.machine.fitting import GemmPoints, fit_gemm_model, fit_gemm_profile, spanning_m
from stretto.sim.machine.gemm import model_us
from stretto.sim.machine.loading import parse_profile
from stretto.sim.machine.schema import GemmModel, GemmTable, GemmTile

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference"
needs_reference = pytest.mark.skipif(
    not REFERENCE.is_dir(), reason="the reference figures are not beside this checkout"
)


def model_times(model: GemmModel, m: Any, n: Any, k: Any) -> Any:
    return model_us(
        model, m, n, k, peak_tflops=400.0, sm_count=100, element_bytes=2, hbm_gb_per_s=2000.0
    )


# ---------------------------------------------------------------- fitting

TRUTH = GemmModel(
    origin="assumed",
    source="a test",
    launch_us=3.0,
    read_gb_per_s=1800.0,
    write_gb_per_s=1500.0,
    tile_us=0.4,
    wave_rounding=0.7,
    overlap_exponent=3.0,
    split_k_us=4.0,
    sustained_slowdown=0.1,
    tiles=(GemmTile(m=64, n=128, efficiency=0.5), GemmTile(m=128, n=256, efficiency=0.8)),
)


def synthetic(count: int, seed: int) -> GemmPoints:
    """GEMMs that follow TRUTH, as 22 values of m at random sites."""
    random = np.random.default_rng(seed)
    sites = 2 ** random.uniform(5, 14, size=(count, 2))
    m = np.unique(np.round(2 ** np.linspace(0, 14, 22)).astype(np.int64))
    grid_m = np.tile(m, count)
    n, k = (np.repeat(np.round(sites[:, axis]).astype(np.int64), len(m)) for axis in (0, 1))
    return GemmPoints(grid_m, n, k, model_times(TRUTH, grid_m, n, k))


FIT: dict[str, Any] = {
    "dtype": "bf16",
    "peak_tflops": 400.0,
    "sm_count": 100,
    "hbm_gb_per_s": 2000.0,
    "source": "a test",
}


def test_a_fit_finds_a_model_that_predicts_other_shapes() -> None:
    model = fit_gemm_model(synthetic(80, seed=1), **FIT)
    unseen = synthetic(40, seed=2)
    errors = np.abs(model_times(model, unseen.m, unseen.n, unseen.k) / unseen.us - 1)
    assert np.median(errors) < 0.01
    assert np.percentile(errors, 90) < 0.06
    assert model.origin == "fitted"
    assert model == fit_gemm_model(synthetic(80, seed=1), **FIT)  # deterministic


def test_a_fit_reports_its_error_on_sites_it_has_not_seen() -> None:
    profile = fit_gemm_profile(synthetic(60, seed=3), **FIT, m_values=6)
    assert profile.model is not None
    whole, planning = profile.model.fit
    assert whole.sites == 12
    assert whole.points == 12 * len(np.unique(synthetic(60, seed=3).m))
    assert planning.points < whole.points
    assert whole.median_error_pct < 2
    assert all(len(site.m) == 6 for site in profile.tables[0].sites)


def test_too_few_points_to_fit() -> None:
    with pytest.raises(InvalidInput, match="at least 50 measured GEMMs, not 22"):
        fit_gemm_model(synthetic(1, seed=1), **FIT)


def test_the_kept_m_are_those_that_matter() -> None:
    m = np.tile(np.array([1, 10, 64, 100, 128, 500, 1000]), 3)
    n = np.repeat(np.array([8, 16, 32]), 7)
    points = GemmPoints(m, n, n, np.ones(21))
    bump = np.where(m == 500, 0.5, 0.0)
    assert spanning_m(points, bump, 5) == [1, 64, 128, 500, 1000]
    assert spanning_m(points, bump, 9) == [1, 10, 64, 100, 128, 500, 1000]


def test_a_table_and_its_rows() -> None:
    rows = [(4, 16, 8, 2.0), (1, 16, 8, 1.0), (1, 8, 8, 0.5)]
    table = GemmTable.from_rows(rows, origin="measured", source="a test")
    assert table.rows() == [(1, 8, 8, 0.5), (1, 16, 8, 1.0), (4, 16, 8, 2.0)]
    with pytest.raises(pydantic.ValidationError, match="must grow"):
        GemmTable.from_rows([*rows, rows[0]], origin="measured", source="a test")


# ---------------------------------------------------------------- the importer

YAML = """\
# a comment
data_dir: data/h200_sxm
gpu:
  mem_bw: 2000000000000 # 2 TB/s
  mem_bw_empirical_scaling_factor: 0.8
  mem_empirical_constant_latency: 0.000003
  bfloat16_tc_flops: 400000000000000
  sm_version: 90
node:
  num_gpus_per_node: 8
  intra_node_bw: 450000000000
misc:
  nccl_mem:
    1: 0
"""


def write_table(path: Path, columns: dict[str, list[Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set in aiconfigurator's layout whose GEMMs follow TRUTH."""
    points = synthetic(20, seed=5)
    count = len(points.us)
    gemm: dict[str, list[Any]] = {
        "gemm_dtype": ["bfloat16"] * count + ["fp8_block"],
        "m": [*points.m.tolist(), 1],
        "n": [*points.n.tolist(), 1],
        "k": [*points.k.tolist(), 1],
        "latency": [*(points.us / 1e3).tolist(), 99.0],
    }
    nccl: dict[str, list[Any]] = {
        "nccl_dtype": ["half"] * 4 + ["int8"] * 2,
        "op_name": ["all_gather"] * 2 + ["alltoall"] * 2 + ["all_gather"] * 2,
        "num_gpus": [2] * 6,
        "message_size": [512, 1024] * 3,
        "latency": [0.008, 0.009, 0.5, 0.6, 0.7, 0.8],
    }
    systems = tmp_path / "set" / "systems"
    data = systems / "data" / "h200_sxm"
    for version in ("0.9.0", "0.24.0"):
        write_table(data / "gemm" / "vllm" / version / "gemm_perf.parquet", gemm)
    write_table(data / "comm" / "nccl" / "2.29.2" / "nccl_perf.parquet", nccl)
    (systems / "h200_sxm.yaml").write_text(YAML)
    return tmp_path / "set"


def test_import(folder: Path) -> None:
    machine = import_aiconfigurator(folder, name="mine")
    assert (machine.name, machine.domain_size) == ("mine", 8)
    assert machine.profile.compute.peak_tflops["bf16"].value == 400.0
    assert machine.profile.compute.hbm_gb_per_s.value == pytest.approx(1600.0)
    assert machine.profile.provenance.versions == {"vllm": "0.24.0", "nccl": "2.29.2"}
    points = synthetic(20, seed=5)
    for m, n, k, us in zip(*(column[::37].tolist() for column in points), strict=True):
        estimate = machine.gemm(m, n, k, "bf16")
        assert estimate.validity == "measured"
        assert estimate.us == pytest.approx(us, rel=1e-3)
    # two bytes an element, other dtypes and all-to-all left out
    all_gather = machine.transport("nccl").profile.collectives["all_gather"]
    assert all_gather[2].points == ((1024, 8.0), (2048, 9.0))
    assert machine.transport("nccl").capabilities.collectives == ("all_gather",)
    assert machine.transport("copy_engine").put(1 << 20).validity == "not validated"
    assert parse_profile(machine.to_json()) == machine.profile
    same = import_aiconfigurator(folder / "systems", name="mine", system="h200_sxm")
    assert same.profile == machine.profile


def test_import_errors(folder: Path, tmp_path: Path) -> None:
    systems = folder / "systems"
    with pytest.raises(InvalidInput, match=r"is no aiconfigurator folder.*give the folder"):
        import_aiconfigurator(tmp_path / "elsewhere", name="x")
    with pytest.raises(InvalidInput, match="no system 'b200'; choose one of h200_sxm"):
        import_aiconfigurator(folder, name="x", system="b200")
    with pytest.raises(InvalidInput, match=r"no .*gemm/trtllm/VERSION/gemm_perf.parquet"):
        import_aiconfigurator(folder, name="x", framework="trtllm")
    (systems / "other.yaml").write_text(YAML)
    with pytest.raises(InvalidInput, match="several systems; choose one of h200_sxm, other"):
        import_aiconfigurator(folder, name="x")
    (systems / "other.yaml").unlink()
    (systems / "h200_sxm.yaml").write_text(YAML.replace("sm_version: 90", "sm_version: 70"))
    with pytest.raises(InvalidInput, match="sm_version 70"):
        import_aiconfigurator(folder, name="x")
    (systems / "h200_sxm.yaml").write_text(YAML.replace("mem_bw: 2000000000000", "mem_bw: fast"))
    with pytest.raises(InvalidInput, match=r"no number for gpu\.mem_bw"):
        import_aiconfigurator(folder, name="x")


def test_import_of_broken_tables(folder: Path) -> None:
    data = folder / "systems" / "data" / "h200_sxm"
    nccl = data / "comm" / "nccl" / "2.29.2" / "nccl_perf.parquet"
    write_table(nccl, {"op_name": ["all_gather"]})
    with pytest.raises(InvalidInput, match="has no column nccl_dtype, num_gpus, message_size"):
        import_aiconfigurator(folder, name="x")
    gemm = data / "gemm" / "vllm" / "0.24.0" / "gemm_perf.parquet"
    gemm.write_bytes(gemm.read_bytes()[:200])
    with pytest.raises(InvalidInput, match="cannot be read as parquet"):
        import_aiconfigurator(folder, name="x")
    columns: dict[str, list[Any]] = {
        "gemm_dtype": ["int8"],
        "m": [1],
        "n": [1],
        "k": [1],
        "latency": [1.0],
    }
    write_table(gemm, columns)
    with pytest.raises(InvalidInput, match="has no dtype of bfloat16, float16, fp8"):
        import_aiconfigurator(folder, name="x")


def test_import_without_pyarrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Unavailable, match="pip install pyarrow"):
        import_aiconfigurator(folder, name="x")


# ---------------------------------------------------------------- against the reference figures


def reference_points(system: str, label: str) -> GemmPoints:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(REFERENCE / "public" / f"gemm_{system}.parquet")
    keep = np.array(table["dtype"].to_pylist()) == label
    m, n, k = (table[name].to_numpy().astype(np.int64)[keep] for name in ("m", "n", "k"))
    return GemmPoints(m, n, k, table["us"].to_numpy().astype(np.float64)[keep])


@needs_reference
@pytest.mark.parametrize(
    ("name", "system", "dtype", "label", "median_pct", "p90_pct"),
    [
        ("h200-sxm", "h200", "bf16", "bfloat16", 3.5, 11.0),
        ("h200-sxm", "h200", "fp8", "fp8", 2.5, 12.0),
        ("gb300-nvl72", "gb300", "bf16", "bfloat16", 4.0, 12.0),
        ("gb300-nvl72", "gb300", "fp8", "fp8", 1.5, 5.0),
    ],
)
def test_shipped_gemm_times_agree_with_the_data(
    name: str, system: str, dtype: str, label: str, median_pct: float, p90_pct: float
) -> None:
    machine, points = Machine.load(name), reference_points(system, label)
    table = machine.profile.compute.gemm[dtype].tables[-1]  # type: ignore[index]
    kept = {m for site in table.sites for m in site.m}
    rest = points.where(~np.isin(points.m, list(kept)))
    assert len(rest.us) > 0.6 * len(points.us)  # a thin table, not the data set
    shapes = zip(rest.m.tolist(), rest.n.tolist(), rest.k.tolist(), strict=True)
    predicted = np.array([machine.gemm_us(*shape, dtype) for shape in shapes])
    errors_pct = 100 * np.abs(predicted / rest.us - 1)
    assert np.median(errors_pct) < median_pct
    assert np.percentile(errors_pct, 90) < p90_pct


@needs_reference
@pytest.mark.parametrize(("name", "system"), [("h200-sxm", "h200"), ("gb300-nvl72", "gb300")])
def test_the_reported_fit_error_is_found_again(name: str, system: str) -> None:
    compute = Machine.load(name).profile.compute
    own = compute.gemm["bf16"]
    assert own.model is not None
    table = own.tables[-1]
    again = fit_gemm_profile(
        reference_points(system, "bfloat16"),
        dtype="bf16",
        peak_tflops=compute.peak_tflops["bf16"].value,
        sm_count=compute.sm_count.value,
        hbm_gb_per_s=compute.hbm_gb_per_s.value,
        source=table.source,
        m_values=len(table.sites[0].m),
    )
    assert again.model is not None
    for found, reported in zip(again.model.fit, own.model.fit, strict=True):
        assert found.points == reported.points
        assert found.median_error_pct == pytest.approx(reported.median_error_pct, abs=0.5)
        assert found.p90_error_pct == pytest.approx(reported.p90_error_pct, abs=1.5)
    whole, planning = own.model.fit
    assert whole.median_error_pct < 4.5
    assert planning.p90_error_pct < 12


@needs_reference
def test_published_gemms_of_the_ring_are_in_the_profile() -> None:
    machine = Machine.load("gb300-nvl72")
    lines = (REFERENCE / "ag_gemm_gb300_tp8.csv").read_text().splitlines()
    header = lines[0].split(",")
    for line in lines[1:]:
        row = dict(zip(header, line.split(","), strict=True))
        m, n, k = (int(row[name]) for name in ("global_m", "n", "k"))
        assert machine.gemm(m, n, k, "bf16") == Estimate(float(row["gemm_only_us"]), "measured")
        gathered = machine.transport("nccl").collective("all_gather", m * k * 2, 8)
        assert gathered.us == pytest.approx(float(row["ag_only_us"]), rel=0.02)


@needs_reference
@pytest.mark.parametrize(("name", "system"), [("h200-sxm", "h200"), ("gb300-nvl72", "gb300")])
def test_nccl_curves_are_those_of_the_data(name: str, system: str) -> None:
    transport = Machine.load(name).transport("nccl")
    lines = (REFERENCE / "public" / f"nccl_{system}.csv").read_text().splitlines()
    checked = 0
    for kind, world_size, elements, us in (line.split(",") for line in lines[1:]):
        if kind != "alltoall":
            estimate = transport.collective(kind, 2 * int(elements), int(world_size))
            assert estimate.us == pytest.approx(float(us), rel=1e-4)
            assert estimate.validity == "measured"
            checked += 1
    assert checked > 100


@needs_reference
def test_h200_puts_and_interference_are_those_measured() -> None:
    transport = Machine.load("h200-sxm").transport("copy_engine")
    signals = json.loads((REFERENCE / "h200x2_signals.json").read_text())
    for size in (4096, 65536, 1 << 20, 1 << 22, 1 << 24):
        assert transport.put_us(size) == signals[f"cuMemcpyDtoDAsync {size} us eager"]
    pair_us = signals["put+wait us (torch kernels, graph)"]
    assert transport.signal_us + transport.wait_us == pytest.approx(pair_us, abs=0.02)
    probe = json.loads((REFERENCE / "h200x2_probe.json").read_text())
    beside = probe["gemm_interference"]
    slowdown = beside["with_ce_push_us"] / beside["alone_us"] - 1
    assert transport.gemm_slowdown_beside_put == pytest.approx(slowdown, abs=1e-3)
    uni_us = probe["ce_push"][str(1 << 27)]["uni_us"]
    assert transport.put_us(1 << 27) == pytest.approx(uni_us, rel=1e-3)


@needs_reference
def test_import_of_the_sample() -> None:
    pytest.importorskip("pyarrow")
    machine = import_aiconfigurator(REFERENCE / "aiconfigurator_sample", name="sample")
    assert set(machine.profile.compute.gemm) == {"bf16", "fp8"}
    own = Machine.load("h200-sxm").transport("nccl").profile.collectives
    for kind, by_size in machine.transport("nccl").profile.collectives.items():
        for world_size, one in by_size.items():
            known = dict(own[kind][world_size].points)
            common = [(size, us) for size, us in one.points if size in known]
            assert len(common) > 15
            assert all(us == pytest.approx(known[size], rel=1e-3) for size, us in common)
    imported = machine.gemm_us(8192, 6144, 6144, "bf16")
    assert imported == pytest.approx(
        Machine.load("h200-sxm").gemm_us(8192, 6144, 6144, "bf16"), rel=0.15
    )
