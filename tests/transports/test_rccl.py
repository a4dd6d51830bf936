"""The library transport over gloo, and what it would say of builds that are not at hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import library_makers as makers
import pytest

from stretto.schedules.language import InvalidInput, Unsupported
from stretto.transports import load_transport
from stretto.transports.conformance import CASES, Crew, Harness, run_case
from stretto.transports.distributed.found import (
    availability,
    device_index,
    identity,
    library,
    refuse_shared,
)
from stretto.transports.distributed.group import private_backend
from stretto.transports.rccl import RcclTransport

torch = pytest.importorskip("torch", reason="the library transport needs torch")


class Crews:
    """Crews by their number of ranks, each started once."""

    def __init__(self) -> None:
        self._made: dict[int, Crew] = {}

    def __getitem__(self, world_size: int) -> Crew:
        if world_size not in self._made:
            self._made[world_size] = Crew(world_size)
        return self._made[world_size]

    def close(self) -> None:
        for crew in self._made.values():
            crew.close()


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    crews = Crews()
    yield crews
    crews.close()


@pytest.fixture
def pair(crews: Crews) -> Crew:
    return crews[2]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if not case.skipped(RcclTransport.offered(), 9)]
)
def test_gloo_conforms(crews: Crews, world_size: int, name: str) -> None:
    skipped = CASES[name].skipped(RcclTransport.offered(), world_size)
    if skipped:
        pytest.skip(skipped)
    run_case(CASES[name], Harness(make=makers.MakeRccl()), crews[world_size])


@pytest.mark.parametrize(
    ("what", "saying"),
    [
        ("put", "Unsupported: Transport 'rccl' has no put; use --variant unfused"),
        ("signal", "has no signal; use"),
        ("wait", "has no wait; use"),
        ("flags", "Unsupported: Transport 'rccl' has no flags (here 'arrived')"),
        ("memory", "free; lower -m or free memory"),
        ("peer", "does not map rank"),
        ("kernel", "No kernel can reach other ranks' memory over 'rccl'"),
        ("ranks differ", "prepares another collective than rank"),
        ("fp8", "rccl cannot add numbers of type fp8; it adds bf16, fp16, fp32, fp64, int32"),
    ],
)
def test_what_it_cannot_do_is_said(pair: Crew, what: str, saying: str) -> None:
    for answer in pair.run(makers.said_by, what):
        assert saying in answer


def test_a_refusal_of_one_rank_reaches_all(pair: Crew) -> None:
    first, last = pair.run(makers.said_by, "one rank is wrong")
    assert last == "InvalidInput: all_gather: there is no type 'none'."
    assert first == "InvalidInput: rank 1 refuses: all_gather: there is no type 'none'."


@pytest.mark.parametrize(
    ("what", "saying"),
    [
        ("store", "needs a torch.distributed store, TCPStore or FileStore, not DirectoryStore"),
        ("device", "There is no device 3: give 'cpu' or the number of one of 0 GPU(s)."),
        ("timeout", "above 0"),
        ("group", "The group given has 3 ranks"),
        ("empty group", "The group given has nothing for cpu; make it with backend='gloo'."),
    ],
)
def test_what_does_not_fit_is_refused(pair: Crew, what: str, saying: str) -> None:
    if what == "device" and torch.cuda.is_available():
        pytest.skip("there are GPUs")
    for answer in pair.run(makers.join_with, what):
        assert saying in answer


def test_the_callers_group_is_used_and_kept(pair: Crew) -> None:
    for library_name, numbers in pair.run(makers.with_group):
        assert library_name.startswith("gloo of torch ")
        assert numbers == [0, 1, 2]


def test_the_default_group_is_left_alone(pair: Crew) -> None:
    assert pair.run(makers.untouched_default_group) == [True, True]


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "exact"])
@pytest.mark.parametrize("rows", [1, 5, 7, 8])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_short_and_empty_shards(crews: Crews, kind: str, rows: int, padded: bool) -> None:
    """1, 0, 0, 0 rows; 2, 2, 1, 0; 2, 2, 2, 1 and 2, 2, 2, 2, with gaps and without."""
    for dtype, pitch in (("bf16", 9), ("fp32", 6)):
        found = crews[4].run(makers.collectives_on, kind, dtype, rows, padded, pitch)
        assert found == [""] * 4


def test_in_place(pair: Crew) -> None:
    assert pair.run(makers.reduce_in_place) == [True, True]


def test_a_late_rank_ends_everyone(pair: Crew) -> None:
    (first, took_s), (second, _) = pair.run(makers.late)
    assert first.startswith("WaitTimeout: ")
    for part in ("rank 0", "'compute'", "'gather3'", "call 7", "waited 0.5 s"):
        assert part in first
    assert 0.5 <= took_s < 3
    assert second.startswith("PeerLost: ")
    assert "'gather3'" in second


def test_an_abort_ends_a_collective(pair: Crew) -> None:
    for said, took_s in pair.run(makers.given_up):
        assert "the soup is too hot" in said
        assert took_s < 2


def test_ctrl_c_in_a_collective_ends_everyone(pair: Crew) -> None:
    first, second = pair.run(makers.interrupted)
    assert first.startswith("KeyboardInterrupt")
    assert "was interrupted (KeyboardInterrupt)" in second


def test_closing_ends_an_own_collective(pair: Crew) -> None:
    assert "has closed the workspace" in pair.run(makers.close_in_a_collective)[0]


# ---- which library ------------------------------------------------------------------------------


def build(*, gpus: int = 2, hip: str | None = None, nccl: bool = True, uuid: str = "aa-1") -> Any:
    """Return a stand-in of torch."""
    return SimpleNamespace(
        __version__="2.13.0+cpu",
        version=SimpleNamespace(hip=hip, cuda=None if hip else "13.0"),
        device=lambda *name: name,
        cuda=SimpleNamespace(
            is_available=lambda: gpus > 0,
            device_count=lambda: gpus,
            nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
            get_device_properties=lambda index: SimpleNamespace(uuid=uuid, name=""),
        ),
        distributed=SimpleNamespace(
            is_available=lambda: True,
            is_nccl_available=lambda: nccl,
            is_gloo_available=lambda: True,
        ),
    )


def test_it_names_what_it_found() -> None:
    assert library(build(), "cuda") == "NCCL 2.28.9"
    assert library(build(hip="6.4.1"), "cuda") == "RCCL 2.28.9 (HIP 6.4.1)"
    assert library(build(), None) == "gloo of torch 2.13.0"
    assert availability(build()) == (True, "NCCL 2.28.9 without NVLS, 2 GPU(s)")
    assert availability(build(hip="6.4.1")) == (
        True,
        "RCCL 2.28.9 (HIP 6.4.1), 2 GPU(s); not run on hardware",
    )
    assert "gloo of torch 2.13.0, on the CPU" in availability(build(gpus=0)).reason
    assert availability(build(nccl=False)) == (False, "this PyTorch is built without NCCL")
    assert "RCCL" in availability(build(nccl=False, hip="6.4.1")).reason


def test_which_device_a_rank_gets() -> None:
    assert [device_index(build(), None, rank) for rank in range(3)] == [0, 1, 0]
    assert device_index(build(), 1, 0) == 1
    assert device_index(build(), "cpu", 0) is None
    assert device_index(build(gpus=0), None, 0) is None
    for wrong in (2, -1, "cuda:0"):
        with pytest.raises(InvalidInput, match=r"give 'cpu' or the number of one of 2 GPU\(s\)"):
            device_index(build(), wrong, 0)


def test_ranks_on_one_gpu_are_refused() -> None:
    refuse_shared(["a", "b"], "NCCL 2.28.9")
    refuse_shared([None, None], "gloo")
    with pytest.raises(Unsupported, match=r"Ranks 0 and 2 share a GPU, which NCCL .* refuses"):
        refuse_shared(["a", "b", "a"], "NCCL 2.28.9")
    with pytest.raises(InvalidInput, match="rank 1 is on the CPU"):
        refuse_shared(["a", None], "NCCL 2.28.9")


def test_a_gpu_without_a_uuid_is_known_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity(build(), 0) == "aa-1"
    nameless = build(hip="6.4.1", uuid="00000000-0000-0000-0000-000000000000")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,3")
    one, other = identity(nameless, 0), identity(nameless, 1)
    assert one != other
    assert one == identity(nameless, 0)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5")
    assert identity(nameless, 0) != one


def test_nccl_is_another_name_of_it() -> None:
    assert load_transport("nccl") is load_transport("rccl") is RcclTransport


def test_torch_is_told_to_leave_lost_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    seen: list[str | None] = []

    def made(*given: Any) -> str:
        seen.append(os.environ.get(name))
        return "backend"

    made.Options = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", made, raising=False)
    for before in (None, "3"):
        if before is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, before)
        store = torch.distributed.HashStore()
        found = private_backend(store, "key", 0, 2, "cuda", timeout_s=1.0, join_timeout_s=1.0)
        assert found == "backend"
        assert os.environ.get(name) == before
    assert seen == ["0", "0"]
