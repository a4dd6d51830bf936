"""The conformance suite on GPUs: the copy engines, and the library transport over NCCL.

Ranks share the GPUs where there are fewer of them.  Processes are kept from case to case; after a
case in which one died or failed, all are started anew, since those of a crew must be of one age.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import cuda_makers as makers
import pytest
from library_makers import MakeRccl

from stretto.schedules.language import RunFailed, WaitTimeout
from stretto.transports.conformance import CASES, Crew, Harness, run_case
from stretto.transports.conformance.cuda_device import CountingStream, CudaDevice, QueuedStream
from stretto.transports.copy_engine import CopyEngineTransport
from stretto.transports.rccl import RcclTransport

os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")

WAIT_LIMIT_S = 15.0
COPY_ENGINE = Harness(makers.copy_engine, device=CudaDevice, wait_limit_s=WAIT_LIMIT_S)
NCCL = Harness(MakeRccl(device=None), device=CudaDevice, wait_limit_s=WAIT_LIMIT_S)


class Crews:
    """One crew at a time; it goes when its number of ranks, or what they run, is another."""

    def __init__(self) -> None:
        self._crew: Crew | None = None
        self._kind: Any = None

    def run(self, name: str, harness: Harness, world_size: int) -> None:
        kind = (harness, world_size)
        if kind != self._kind:
            self.close()
        if self._crew is None:
            self._crew, self._kind = Crew(world_size, limit_s=90), kind
        fine = False
        try:
            run_case(CASES[name], harness, self._crew)
            fine = not CASES[name].kills
        finally:
            if not fine:
                self.close()

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()
        self._crew = None


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    crews = Crews()
    yield crews
    crews.close()


def cases_of(transport: Any) -> list[str]:
    """Return the cases that apply at all, those that kill at the end."""
    names = [name for name, case in CASES.items() if not case.skipped(transport.offered(), 9)]
    return sorted(names, key=lambda name: CASES[name].kills)


@pytest.mark.gpu(2)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", cases_of(CopyEngineTransport))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_copy_engine_conforms(crews: Crews, world_size: int, name: str) -> None:
    if CASES[name].least_ranks > world_size:
        pytest.skip(f"needs {CASES[name].least_ranks} ranks")
    crews.run(name, COPY_ENGINE, world_size)


@pytest.mark.gpu(2)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", cases_of(RcclTransport))
@pytest.mark.parametrize("world_size", [1, 2])
def test_nccl_conforms(crews: Crews, world_size: int, name: str) -> None:
    if CASES[name].least_ranks > world_size:
        pytest.skip(f"needs {CASES[name].least_ranks} ranks")
    crews.run(name, NCCL, world_size)


@pytest.mark.gpu(2)
def test_nccl_in_graphs() -> None:
    with Crew(2) as crew:
        assert crew.run(makers.gathers_in_graphs) == [[], []]


@pytest.mark.gpu(1)
def test_two_ranks_on_one_gpu_are_told() -> None:
    with Crew(2) as crew:
        for said in crew.run(makers.share_a_gpu):
            assert "Ranks 0 and 1 share a GPU" in said
            assert "to use gloo on the CPU" in said


# ---- without a GPU ------------------------------------------------------------------------------


class Event:
    def __init__(self, polls: int) -> None:
        self.polls = polls

    def query(self) -> bool:
        self.polls -= 1
        return self.polls < 0


class StandIn:
    """A device whose stream ends after some polls, and whose transport may fail before."""

    def __init__(self, polls: int = 0, error: RunFailed | None = None) -> None:
        self.polls, self.error = polls, error
        self.asked = 0

    def event(self, stream: Any) -> Event:
        return Event(self.polls)

    def raise_failures(self) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error


def stream_on(device: StandIn) -> tuple[QueuedStream, list[str]]:
    done: list[str] = []
    holder = CountingStream(7)

    def begin(call: int) -> Sequence[int]:
        done.append(f"begin {call}")
        return ()

    holder.begins.append(begin)
    return QueuedStream(holder, device, None), done


def test_a_call_begins_before_its_launch() -> None:
    device = StandIn(polls=3)
    stream, done = stream_on(device)

    def launch(call: int) -> Sequence[int]:
        done.append(f"launch {call}")
        return (call,)

    stream.run(launch, 4)
    stream.run(launch, 2**32)
    assert done == ["begin 4", "launch 4", "begin 4294967296", "launch 4294967296"]
    assert stream.synchronise() == [(4,), (2**32,)]
    assert device.asked == 4
    assert stream.synchronise() == []


def test_failures_of_the_transport_come_out_while_the_stream_hangs() -> None:
    stream, _ = stream_on(StandIn(polls=10**9, error=WaitTimeout("late")))
    stream.run(lambda call: (), 0)
    with pytest.raises(WaitTimeout, match="late"):
        stream.synchronise()


def test_an_error_of_a_launch_comes_out_later() -> None:
    stream, _ = stream_on(StandIn())

    def launch(call: int) -> Sequence[int]:
        raise RunFailed("closed")

    stream.run(launch, 0)
    with pytest.raises(RunFailed, match="closed"):
        stream.synchronise()


def test_the_uses_before_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins call c finds, for its slot residue, c // period uses: its number is c again."""

    class View:
        period, uses = 2, -1

        def set_uses(self, uses: int) -> None:
            self.uses = uses

    view = View()
    numbers = []

    def begin(call: int) -> Sequence[int]:
        numbers.append(view.uses * view.period + call % view.period)  # as stretto_begin does
        return ()

    monkeypatch.setattr(makers, "_on", lambda stream: nullcontext())
    at = makers.counting(view, begin, CountingStream(0))
    for call in (0, 1, 2, 7, 99):
        at(call)
    assert numbers == [0, 1, 2, 7, 99]


def test_every_case_of_the_copy_engines_is_in_the_list() -> None:
    names = cases_of(CopyEngineTransport)
    assert "timeouts_name_everything" in names
    assert "all_gathers_are_right" not in names
    assert names[-1].startswith("death_ends")
    assert set(cases_of(RcclTransport)) >= {"all_gathers_are_right", "transports_are_apart"}
