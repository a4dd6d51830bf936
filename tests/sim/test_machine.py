"""Machine profiles: the format, its errors, and how profiles are described."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pydantic
import pytest

from stretto.schedules.language import ProfileError, UnknownName
from stretto.sim.machine import Machine, available_profiles, describe, worst
from stretto.sim.machine.loading import parse_profile

SHIPPED = ("gb300-nvl72", "h200-sxm", "h200-sxm-x2", "mi355x")
DELETE = object()

SMALL = json.loads((Path(__file__).parent / "small_machine.json").read_text())
"""A complete profile with easy numbers: a put is 2 us plus bytes at 100 GB/s."""


def made(profile: dict[str, Any] = SMALL) -> Machine:
    return Machine.from_profile(parse_profile(json.dumps(profile)))


def with_value(path: str, value: Any) -> dict[str, Any]:
    """Return the small profile with one place changed, or without it (DELETE)."""
    profile: dict[str, Any] = copy.deepcopy(SMALL)
    *parents, last = path.split(".")
    place: Any = profile
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    if value is DELETE:
        del place[last]
    else:
        place[last] = value
    return profile


def curve(points: list[list[float]]) -> dict[str, Any]:
    return {"points": points, "origin": "measured", "source": "a test"}


# ---------------------------------------------------------------- the format


def test_shipped_profiles_are_found_by_name() -> None:
    assert available_profiles() == SHIPPED
    for name in SHIPPED:
        assert Machine.load(name).name == name


@pytest.mark.parametrize("name", SHIPPED)
def test_json_round_trip(name: str, tmp_path: Path) -> None:
    machine = Machine.load(name)
    file = tmp_path / "copy.json"
    file.write_text(machine.to_json())
    again = Machine.load(file)
    assert again.profile == machine.profile
    assert again.to_json() == machine.to_json()
    assert Machine.load(str(file)).profile == machine.profile


def test_a_machine_survives_pickling() -> None:
    machine = made()
    again = pickle.loads(pickle.dumps(machine))
    assert again.profile == machine.profile
    assert again.gemm(100, 600, 600, "bf16") == machine.gemm(100, 600, 600, "bf16")


def test_a_profile_cannot_be_changed() -> None:
    profile = made().profile
    with pytest.raises(pydantic.ValidationError):
        profile.name = "other"
    with pytest.raises(pydantic.ValidationError):
        profile.compute.sm_count.value = 1


@pytest.mark.parametrize("name", SHIPPED)
def test_every_number_of_a_shipped_profile_has_origin_and_source(name: str) -> None:
    def numbers(value: Any, path: str, sourced: bool) -> list[str]:
        """Paths of numbers that neither have a source nor lie in something that has one."""
        if isinstance(value, dict):
            inside = sourced or ("origin" in value and len(value.get("source", "")) > 3)
            return [p for k, v in value.items() for p in numbers(v, f"{path}.{k}", inside)]
        if isinstance(value, list):
            return [p for v in value for p in numbers(v, path, sourced)]
        bare = isinstance(value, (int, float)) and not isinstance(value, bool) and not sourced
        return [path] if bare else []

    found = numbers(json.loads(Machine.load(name).to_json()), "", False)
    # A validation's numbers come from the protocol beside them.
    exempt = {p for p in found if ".capabilities." in p or p.startswith(".validation.")}
    assert set(found) - exempt == {".schema_version"}


def test_overlap_of_unrun_machines_is_not_validated() -> None:
    for name in ("gb300-nvl72", "mi355x"):
        machine = Machine.load(name)
        assert machine.validation_note == "not validated"
        transport = machine.transport("copy_engine")
        assert transport.put(1 << 20).validity == "not validated"
        slowdown = transport.profile.interference.gemm_slowdown_beside_put
        assert slowdown.origin == "assumed"


def test_validation_is_reported() -> None:
    entry = {
        "what": "ring",
        "makespan_error_pct": {"median": 3.0, "max": 9.5},
        "protocol": "bursts",
    }
    machine = made(with_value("validation", [entry]))
    assert "3 % in the median" in machine.validation_note
    assert "9.5 % at most" in machine.validation_note
    fact = next(one for one in describe(machine) if one.section == "validation")
    assert fact.value == "median 3, max 9.5"


# ---------------------------------------------------------------- errors


def refused(text: str | bytes, tmp_path: Path) -> str:
    """The message with which a file of this content is refused: one sentence, naming the file."""
    file = tmp_path / "made.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ProfileError) as caught:
        Machine.load(file)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert str(file) in message
    return message


@pytest.mark.parametrize("name", ["b200", "h200", "", "profiles/h200-sxm"])
def test_unknown_machine_lists_the_known(name: str) -> None:
    with pytest.raises(UnknownName) as caught:
        Machine.load(name)
    for known in SHIPPED:
        assert known in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"absent\.json cannot be read \(No such file"):
        Machine.load(tmp_path / "absent.json")


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder.json"
    folder.mkdir()
    with pytest.raises(ProfileError, match=r"folder\.json cannot be read \(Is a directory\)"):
        Machine.load(folder)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.33, 0.5, 0.77, 0.9, 0.99, 0.999])
def test_truncated(share: float, tmp_path: Path) -> None:
    text = made().to_json()
    assert "is truncated at line" in refused(text[: int(len(text) * share) or 1], tmp_path)


def test_every_cut_of_a_profile_is_refused() -> None:
    text = json.dumps(SMALL)
    for length in range(1, len(text)):
        with pytest.raises(ProfileError, match="truncated"):
            parse_profile(text[:length])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"name: small\n", "is not JSON (line 1, column 1"),
        (b'{"schema_version": 1,, }', "is not JSON (line 1, column 22"),
        (b"\xff\xfe\x00\x01", "is not JSON but binary"),
        (b"[1, 2]", "holds a list, not the JSON object"),
        (b"17", "holds a int, not the JSON object"),
        (b"[" * 100_000, "is not a profile's JSON"),
        (b"9" * 10_000, "is not a profile's JSON"),
    ],
)
def test_not_a_profile(content: bytes, expected: str, tmp_path: Path) -> None:
    assert expected in refused(content, tmp_path)


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_another_version(version: object, tmp_path: Path) -> None:
    message = refused(json.dumps(with_value("schema_version", version)), tmp_path)
    assert f"has schema_version {version!r}, this Stretto reads 1" in message


@pytest.mark.parametrize(
    "path",
    [
        "schema_version",
        "name",
        "compute.sm_count",
        "compute.sm_count.value",
        "compute.sm_count.origin",
        "compute.hbm_gb_per_s.source",
        "host.call_us.graph",
        "fabric.ingress_gb_per_s",
        "transports.copy_engine.interference",
        "transports.nccl.collectives.all_gather.2.points",
        "provenance.date",
    ],
)
def test_a_missing_field_is_named(path: str, tmp_path: Path) -> None:
    message = refused(json.dumps(with_value(path, DELETE)), tmp_path)
    assert f"wrong at {path}: field required" in message


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("domain_size.value", 0, "must be above zero"),
        ("domain_size.value", 7.5, "integer"),
        ("domain_size.value", "8", "integer"),
        ("compute.sm_count.value", True, "integer"),
        ("compute.hbm_gb_per_s.value", "fast", "number"),
        ("compute.hbm_gb_per_s.value", -1.0, "greater than or equal to 0"),
        ("compute.hbm_gb_per_s.value", math.nan, "finite"),
        ("compute.hbm_gb_per_s.value", math.inf, "finite"),
        ("compute.hbm_gb_per_s.origin", "guessed", "'measured', 'fitted', 'published'"),
        ("compute.hbm_gb_per_s.source", "", "at least 1 character"),
        ("compute.hbm_gb_per_s.unit", "GB/s", "extra inputs are not permitted"),
        ("compute.gemm.bf16.tables.0.sites.0.m", [1, 64, 64, 1024], "must grow"),
        ("compute.gemm.bf16.tables.0.sites.0.us", [1.0], "equal length"),
        ("compute.gemm.bf16.tables.0.sites.0.k", 2048, "every (n, k) once"),
        ("kind", "tpu", "'gpu' or 'cpu'"),
        ("kind", "cpu", "needs host.fingerprint"),
        ("fabric.topology", "point_to_point", "needs link_gb_per_s"),
        ("transports.nccl.capabilities.transport", "other", "not 'nccl'"),
        ("transports.nccl.capabilities.verb", [], "unexpected keyword"),
        ("transports.nccl.capabilities.verbs", ["put"], "needs put"),
        ("transports.nccl.capabilities.collectives", ["all_reduce"], "capabilities lack"),
        ("transports.nccl.collectives.all_gather.1", curve([[1, 1.0], [2, 2.0]]), "two or more"),
        ("transports.nccl.collectives.all_gather.x", curve([[1, 1.0], [2, 2.0]]), "integer"),
        ("transports.copy_engine.wait_us", None, "can wait needs wait_us"),
        ("transports.copy_engine.put.points", [[1, 1.0]], "at least 2 items"),
        ("transports.copy_engine.put.points", [[2, 1.0], [1, 2.0]], "must grow"),
        ("transports.copy_engine.put.points", [[1, 2.0], [2, 1.0]], "must not take less time"),
        ("transports.copy_engine.put.points", [[1, 0.0], [2, 1.0]], "greater than 0"),
        ("provenance.date", "today", "match pattern"),
    ],
)
def test_a_wrong_field_is_named(path: str, value: object, expected: str, tmp_path: Path) -> None:
    message = refused(json.dumps(with_value(path, value)), tmp_path)
    assert expected.lower() in message.lower()
    at = message.split(" wrong at ")[1].split(":")[0]
    assert path.startswith(at) or at.startswith(path) or at == "the profile"


# ---------------------------------------------------------------- facts


def test_worst() -> None:
    assert worst([]) == "measured"
    assert worst(["interpolated", "measured"]) == "interpolated"
    assert worst(["extrapolated", "not validated", "measured"]) == "not validated"
    assert worst(["extrapolated", "interpolated"]) == "extrapolated"


def test_describe_says_every_quantity_with_unit_origin_and_source() -> None:
    facts = {(one.section, one.name): one for one in describe(made())}
    assert facts["compute", "hbm_gb_per_s"][2:] == ("1000", "GB/s", "measured", "a test")
    assert facts["compute", "peak_tflops.fp32"][2:4] == ("10", "TFLOP/s")
    assert facts["host", "enqueue_us.graph"][2:4] == ("0.5", "us")
    assert facts["machine", "domain_size"].value == "8"
    assert facts["gemm bf16", "table"].value == "16 times at 4 (n, k), m 1 to 1024"
    put = facts["transport copy_engine", "put"]
    assert put.value == "2 us at 1000 B to 22 us at 1.908 MiB"
    assert facts["transport nccl", "all_gather, 4 ranks"].unit == "3 points"
    assert facts["transport nccl", "sms_held"].value == "4"
    assert facts["validation", "makespan"].value == "not validated"
    assert facts["provenance", "nccl"].value == "0"


@pytest.mark.parametrize("name", SHIPPED)
def test_facts_with_a_unit_have_a_source(name: str) -> None:
    facts = describe(Machine.load(name))
    assert all(one.origin and one.source for one in facts if one.unit)
    assert len([one for one in facts if one.unit]) > 20
