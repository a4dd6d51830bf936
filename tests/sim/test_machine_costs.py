"""What a machine says things cost: GEMMs, other work, the host, transports."""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.schedules.language import InvalidInput, ProfileError, UnknownName, Unsupported
from stretto.sim.machine import Estimate, HostFingerprint, Machine, host_fingerprint
from stretto.sim.machine import fingerprint as fingerprint_module
from stretto.sim.machine.gemm import FALLBACK_MODEL, model_us
from stretto.sim.machine.loading import parse_profile
from stretto.sim.machine.schema import GemmModel, GemmTile

SHIPPED = ("gb300-nvl72", "h200-sxm", "mi355x")

SMALL = json.loads((Path(__file__).parent / "small_machine.json").read_text())
"""A complete profile with easy numbers: a put is 2 us plus bytes at 100 GB/s."""


@cache
def shipped(name: str) -> Machine:
    return Machine.load(name)


def made(profile: dict[str, Any] = SMALL) -> Machine:
    return Machine.from_profile(parse_profile(json.dumps(profile)))


def without_gemm() -> Machine:
    profile = copy.deepcopy(SMALL)
    profile["compute"]["gemm"] = {}
    return made(profile)


def with_origin(origin: str) -> Machine:
    profile = copy.deepcopy(SMALL)
    profile["compute"]["gemm"]["bf16"]["tables"][0]["origin"] = origin
    return made(profile)


# ---------------------------------------------------------------- GEMM


@pytest.mark.parametrize("name", SHIPPED)
def test_gemm_is_exact_at_every_table_point(name: str) -> None:
    machine = shipped(name)
    for dtype, profile in machine.profile.compute.gemm.items():
        said: set[tuple[int, int]] = set()
        for table in profile.tables:
            for site in table.sites:
                if (site.n, site.k) not in said:  # an earlier table goes first
                    for m, us in zip(site.m, site.us, strict=True):
                        assert machine.gemm(m, site.n, site.k, dtype) == Estimate(us, "measured")
                said.add((site.n, site.k))


def test_an_earlier_table_goes_first_inside_its_range() -> None:
    profile = copy.deepcopy(SMALL)
    tables = profile["compute"]["gemm"]["bf16"]["tables"]
    site = {"n": 512, "k": 512, "m": [64, 200, 256], "us": [30.0, 40.0, 50.0]}
    tables.insert(0, {"origin": "measured", "source": "another", "sites": [site]})
    machine = made(profile)
    assert [machine.gemm_us(m, 512, 512, "bf16") for m in (64, 200, 256)] == [30.0, 40.0, 50.0]
    assert machine.gemm_us(1, 512, 512, "bf16") == 2.0
    assert machine.gemm_us(1024, 512, 512, "bf16") == 16.0


def test_between_rows_times_grow_and_stay_between() -> None:
    machine = made()
    times = [machine.gemm(m, 2048, 512, "bf16") for m in range(64, 257)]
    assert times[0] == Estimate(5.0, "measured")
    assert times[-1] == Estimate(12.0, "measured")
    assert {one.validity for one in times[1:-1]} == {"interpolated"}
    us = [one.us for one in times]
    assert us == sorted(us)
    assert len(set(us)) > 2  # it does rise in between


def test_off_the_table() -> None:
    machine = made()
    inside = machine.gemm(256, 1024, 1024, "bf16")
    assert inside.validity == "interpolated"
    assert 5.0 < inside.us < 40.0
    for shape in ((256, 4096, 512), (256, 512, 256), (4096, 1024, 1024), (4096, 512, 512)):
        assert machine.gemm(*shape, "bf16").validity == "extrapolated"
    assert machine.gemm_us(4096, 512, 512, "bf16") > 2 * 16.0


def test_a_foreign_source_is_carried_to_other_m_and_fades() -> None:
    """A second source that is 1.5 times slower at m = 256 is believed to be so nearby."""
    plain = made()
    profile = copy.deepcopy(SMALL)
    site = {"n": 1000, "k": 1000, "m": [256], "us": [1.5 * plain.gemm_us(256, 1000, 1000, "bf16")]}
    other = {"origin": "published", "source": "another", "sites": [site]}
    profile["compute"]["gemm"]["bf16"]["tables"].append(other)
    machine = made(profile)
    ratios = [
        machine.gemm_us(m, 1000, 1000, "bf16") / plain.gemm_us(m, 1000, 1000, "bf16")
        for m in (256, 64, 1)
    ]
    assert ratios[0] == pytest.approx(1.5)
    assert 1.5 > ratios[1] > ratios[2] > 1.0
    elsewhere = machine.gemm_us(64, 1024, 1024, "bf16")
    assert elsewhere == plain.gemm_us(64, 1024, 1024, "bf16")  # other shapes are left alone


@pytest.mark.parametrize(
    ("origin", "at_a_row", "between"),
    [
        ("published", "measured", "interpolated"),
        ("fitted", "interpolated", "interpolated"),
        ("derived", "not validated", "not validated"),
        ("assumed", "not validated", "not validated"),
    ],
)
def test_an_estimate_is_no_better_than_its_origin(origin: str, at_a_row: str, between: str) -> None:
    machine = with_origin(origin)
    assert machine.gemm(64, 512, 512, "bf16").validity == at_a_row
    assert machine.gemm(65, 512, 512, "bf16").validity == between
    assert machine.gemm(64, 1024, 1024, "bf16").validity == between


def test_without_a_table_the_model_speaks() -> None:
    machine = without_gemm()
    estimate = machine.gemm(4096, 4096, 4096, "bf16")
    assert estimate.validity == "not validated"
    floor_us = 2 * 4096**3 / 100e6
    assert floor_us < estimate.us < 2 * floor_us


def test_dtypes() -> None:
    machine = made()
    half = machine.gemm(64, 512, 512, "fp16")
    assert half == Estimate(3.0, "extrapolated")  # bf16's table, at the same rate
    assert machine.gemm(4096, 4096, 4096, "fp32").us > 5 * machine.gemm_us(4096, 4096, 4096, "bf16")
    with pytest.raises(Unsupported, match="no matrix rate for fp8; it has bf16, fp32"):
        machine.gemm(1, 1, 1, "fp8")


def test_nothing_takes_no_time_and_negative_sizes_are_refused() -> None:
    machine = made()
    for shape in ((0, 512, 512), (64, 0, 512), (64, 512, 0)):
        assert machine.gemm_us(*shape, "bf16") == 0.0
    with pytest.raises(InvalidInput, match="m=-1"):
        machine.gemm_us(-1, 512, 512, "bf16")


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(("n", "k"), [(6288, 7168), (3648, 7168), (7168, 768), (8192, 28672)])
def test_few_rows_cost_what_reading_the_weights_costs(name: str, n: int, k: int) -> None:
    machine = shipped(name)
    reading_us = 2 * n * k / machine.profile.compute.hbm_gb_per_s.value / 1e3
    times = [machine.gemm_us(m, n, k, "bf16") for m in (1, 2, 3, 5, 8, 16, 32, 64)]
    for us in times:
        assert 0.75 * reading_us < us < 2 * reading_us + 12
    assert max(times) < 1.5 * min(times)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(("n", "k"), [(6288, 7168), (3648, 7168), (1000, 3000), (5000, 20000)])
def test_more_rows_take_longer_but_for_noise(name: str, n: int, k: int) -> None:
    """Measured libraries are not monotone, powers of two run best; over an octave they are."""
    machine = shipped(name)
    m = 128
    while m < 60_000:
        more = int(m * 1.5)
        assert machine.gemm_us(more, n, k, "bf16") > 0.9 * machine.gemm_us(m, n, k, "bf16")
        assert machine.gemm_us(2 * m, n, k, "bf16") > 0.95 * machine.gemm_us(m, n, k, "bf16")
        if m >= 512:  # fewer rows of a small GEMM do not fill the machine
            assert machine.gemm_us(4 * m, n, k, "bf16") > 1.2 * machine.gemm_us(m, n, k, "bf16")
        m = more


@pytest.mark.parametrize("name", SHIPPED)
@given(
    m=st.integers(1, 200_000),
    n=st.integers(1, 200_000),
    k=st.integers(1, 200_000),
    dtype=st.sampled_from(["bf16", "fp8", "fp32"]),
)
def test_no_gemm_beats_the_peak(name: str, m: int, n: int, k: int, dtype: str) -> None:
    machine = shipped(name)
    peak = machine.profile.compute.peak_tflops[dtype].value  # type: ignore[index]
    assert 2.0 * m * n * k / machine.gemm_us(m, n, k, dtype) / 1e6 < peak


@given(
    shape=st.tuples(*[st.integers(1, 20_000)] * 3),
    axis=st.integers(0, 2),
    more=st.integers(1, 5000),
)
def test_the_model_grows_with_every_axis(shape: tuple[int, int, int], axis: int, more: int) -> None:
    larger = list(shape)
    larger[axis] += more
    small, large = (model_times(FALLBACK_MODEL, *map(np.atleast_1d, s)) for s in (shape, larger))
    assert large[0] >= small[0] * (1 - 1e-12)


def model_times(model: GemmModel, m: Any, n: Any, k: Any) -> Any:
    return model_us(
        model, m, n, k, peak_tflops=400.0, sm_count=100, element_bytes=2, hbm_gb_per_s=2000.0
    )


def test_the_model_has_waves() -> None:
    one_tile = GemmModel.model_validate(
        FALLBACK_MODEL.model_dump()
        | {
            "wave_rounding": 1.0,
            "overlap_exponent": 100.0,  # compute alone counts
            "split_k_us": 100.0,  # never pays
            "tiles": (GemmTile(m=128, n=128, efficiency=0.5),),
        }
    )
    k = 1024
    full = model_times(one_tile, 128, 128 * 100, k)[0]
    spilled = model_times(one_tile, 128, 128 * 101, k)[0]
    wave_us = 2 * 128 * 128 * k / (400e6 / 100 * 0.5) + one_tile.tile_us
    assert spilled - full == pytest.approx(wave_us, rel=1e-3)


# ---------------------------------------------------------------- other work, the host, the fabric


def test_moved_and_flops() -> None:
    machine = made()
    assert machine.moved_us(0) == 0.0
    assert machine.moved_us(1_000_000) == pytest.approx(1.5 + 1.0)
    assert machine.flops_us(1e9, "bf16") == pytest.approx(1e9 / 100e6 / 0.7)
    big = shipped("h200-sxm")
    flops = 2 * 8192**3
    assert big.flops_us(flops, "bf16") == pytest.approx(
        big.gemm_us(8192, 8192, 8192, "bf16"), rel=0.2
    )


def test_host_and_fabric() -> None:
    machine = made()
    assert machine.host.enqueue_us("eager") == 2.0
    assert machine.host.enqueue_us("graph") == 0.5
    assert machine.host.call_us("eager") == 10.0
    assert machine.host.call_us("graph") == 7.0
    with pytest.raises(UnknownName, match="choose one of eager, graph"):
        machine.host.call_us("lazy")
    fabric = machine.fabric
    assert (fabric.topology, fabric.egress_gb_per_s, fabric.ingress_gb_per_s) == (
        "switch",
        120.0,
        110.0,
    )
    assert fabric.link_gb_per_s is None
    assert fabric.hbm_gb_per_s == 1000.0
    assert (machine.kind, machine.domain_size, machine.cores) == ("gpu", 8, None)
    mesh = shipped("mi355x").fabric
    assert mesh.topology == "point_to_point"
    assert mesh.link_gb_per_s == pytest.approx(61.8)


def cpu_machine(cpu_model: str = "A CPU", cores: int = 8) -> Machine:
    profile = copy.deepcopy(SMALL)
    profile["kind"] = "cpu"
    profile["host"]["fingerprint"] = {"cpu_model": cpu_model, "cores": cores}
    return made(profile)


def test_a_cpu_profile_is_bound_to_its_host() -> None:
    machine = cpu_machine()
    assert machine.cores == 8
    machine.check_host(HostFingerprint(cpu_model="A CPU", cores=8))
    for other in (("A CPU", 4), ("Another", 8)):
        with pytest.raises(ProfileError, match=r"measured on A CPU with 8 cores.*calibrate"):
            machine.check_host(HostFingerprint(cpu_model=other[0], cores=other[1]))
    made().check_host(HostFingerprint(cpu_model="any", cores=1))  # a gpu profile is not


def test_the_fingerprint_of_this_host(tmp_path: Path) -> None:
    found = host_fingerprint()
    assert found == host_fingerprint()
    cpu_machine(found.cpu_model, found.cores).check_host(found)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some: CPU\n")
    assert fingerprint_module._cpu_model(cpuinfo) == "Some: CPU"
    assert fingerprint_module._cpu_model(tmp_path / "absent") != ""


# ---------------------------------------------------------------- transports


def test_an_unknown_transport_lists_the_known() -> None:
    with pytest.raises(UnknownName, match="choose one of copy_engine, nccl"):
        made().transport("nvls")


def test_nccl_and_rccl_are_one_transport() -> None:
    machine = made()
    assert machine.transport("rccl") is machine.transport("nccl")
    assert shipped("mi355x").transport("nccl").name == "rccl"


def test_transport_numbers() -> None:
    transport = made().transport("copy_engine")
    assert transport.capabilities.transport == "copy_engine"
    assert transport.capabilities.verbs == ("put", "signal", "wait")
    assert transport.capabilities.signal_orders_puts
    assert (transport.signal_us, transport.wait_us, transport.copy_queues) == (2.5, 3.5, 3)
    assert transport.gemm_slowdown_beside_put == 0.2
    assert transport.gemm_slowdown_beside_collective == 0.3
    assert transport.sms_held == 4


def test_put() -> None:
    transport = made().transport("copy_engine")
    assert transport.put_us(0) == 0.0
    assert transport.put_us(1) == transport.put_us(1000) == transport.put_latency_us == 2.0
    assert transport.put_us(501_000) == pytest.approx(7.0)
    assert transport.put_us(1_001_000) == 12.0
    assert transport.put_us(4_001_000) == pytest.approx(42.0)
    assert transport.put_rate_gb_per_s(1000) == 120.0  # all latency: the link's
    assert transport.put_rate_gb_per_s(1_001_000) == pytest.approx(100.1)
    validities = [transport.put(size).validity for size in (1000, 5000, 1_001_000, 10, 10**7)]
    assert validities == ["measured", "interpolated", "measured", "extrapolated", "extrapolated"]


@pytest.mark.parametrize("name", SHIPPED)
def test_put_is_exact_at_its_points(name: str) -> None:
    transport = shipped(name).transport("copy_engine")
    assert transport.profile.put is not None
    for size_bytes, us in transport.profile.put.points:
        assert transport.put_us(size_bytes) == pytest.approx(us, rel=1e-12)
        parts = (
            transport.put_latency_us + size_bytes / transport.put_rate_gb_per_s(size_bytes) / 1e3
        )
        assert parts == pytest.approx(us, rel=0.02)


@pytest.mark.parametrize("name", SHIPPED)
@given(size=st.integers(1, 1 << 32), more=st.integers(0, 1 << 32))
def test_more_bytes_never_take_less_time(name: str, size: int, more: int) -> None:
    transport = shipped(name).transport("copy_engine")
    assert transport.put_us(size + more) >= transport.put_us(size) * (1 - 1e-12)
    assert 0 < transport.put_rate_gb_per_s(size) <= transport.link_gb_per_s


def test_a_transport_without_put_refuses() -> None:
    transport = made().transport("nccl")
    for call in (transport.put_us, transport.put, transport.put_rate_gb_per_s):
        with pytest.raises(Unsupported, match="'nccl' of machine 'small' has no put"):
            call(1024)
    assert (transport.copy_queues, transport.signal_us, transport.wait_us) == (0, 0.0, 0.0)


@pytest.mark.parametrize("name", SHIPPED)
def test_collectives_are_exact_at_their_points(name: str) -> None:
    machine = shipped(name)
    seen = 0
    for transport_name, profile in machine.profile.transports.items():
        transport = machine.transport(transport_name)
        for kind, by_size in profile.collectives.items():
            for world_size, one in by_size.items():
                for size_bytes, us in one.points:
                    estimate = transport.collective(kind, size_bytes, world_size)
                    assert estimate.us == us
                    good = one.origin in ("measured", "published")
                    assert estimate.validity == ("measured" if good else "not validated")
                    seen += 1
    assert seen > 50


def test_collectives_between_and_beyond() -> None:
    transport = made().transport("nccl")
    middle = transport.collective("all_gather", 1 << 22, 2)
    assert middle.validity == "interpolated"
    assert middle.us == pytest.approx(math.sqrt(16.0 * 128.0))
    assert transport.collective("all_gather", 100, 2) == Estimate(8.0, "extrapolated")
    beyond = transport.collective("all_gather", 1 << 25, 2)
    assert beyond.validity == "extrapolated"
    fabric_us = (1 << 24) / 2 / 120e3  # faster than between the last two points: the fabric limits
    assert beyond.us == pytest.approx(128.0 + max(112.0 * (1 << 24) / 15 / (1 << 20), fabric_us))


def test_unmeasured_world_sizes_are_scaled() -> None:
    transport = made().transport("nccl")
    eight = transport.collective("all_gather", 1 << 24, 8)
    assert eight.validity == "extrapolated"
    assert eight.us == pytest.approx(12.0 * math.sqrt(2) + 188.0 * (7 / 8) / (3 / 4))
    small = [transport.collective("all_gather", 1024, p).us for p in (2, 3, 4, 6, 8)]
    assert small == sorted(small)
    assert small[-1] == pytest.approx(12.0 * math.sqrt(2))


def test_a_curve_that_lacks_the_small_end_borrows_it() -> None:
    """The eight-rank all-gather of gb300 is published for large tensors only."""
    machine = shipped("gb300-nvl72")
    transport = machine.transport("nccl")
    first_bytes, first_us = transport.profile.collectives["all_gather"][8].points[0]
    times = [transport.collective("all_gather", 1 << e, 8) for e in range(9, 25)]
    assert first_bytes > 1 << 24
    assert all(one.validity == "extrapolated" for one in times)
    assert times[0].us < 0.4 * first_us
    assert all(one.us <= first_us for one in times)
    sixteen = transport.collective("all_gather", 1 << 29, 16)
    assert sixteen.us == pytest.approx(transport.collective("all_gather", 1 << 29, 8).us, rel=0.15)


def test_without_a_curve_the_fabric_speaks() -> None:
    transport = made().transport("nccl")
    estimate = transport.collective("all_reduce", 120_000_000, 2)
    assert estimate.us == pytest.approx(10.0 + 1000.0)
    assert estimate.validity == "not validated"
    mesh = shipped("mi355x").transport("copy_engine")
    two, eight = (mesh.collective("all_gather", 1 << 28, p).us for p in (2, 8))
    assert two > 2.5 * eight  # two ranks have one link, eight have seven each


def test_collectives_refuse_nonsense() -> None:
    transport = made().transport("nccl")
    assert transport.collective("all_gather", 1 << 20, 1).us == 0.0
    assert transport.collective("all_gather", 0, 4).us == 0.0
    with pytest.raises(Unsupported, match="has no reduce_scatter"):
        transport.collective("reduce_scatter", 1024, 2)
    with pytest.raises(Unsupported, match="has no collective"):
        made().transport("copy_engine").collective("all_gather", 1024, 2)
    for size, world_size in ((-1, 2), (1024, 0)):
        with pytest.raises(InvalidInput, match="makes no sense"):
            transport.collective("all_gather", size, world_size)
