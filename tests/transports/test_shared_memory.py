"""What is particular to shared_memory: where its memory comes from, and that none is left."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transport_makers as makers

from stretto.schedules.language import Epoch, InvalidInput, PeerLost, WaitTimeout, Word
from stretto.transports.conformance import CASES, Crew, DirectoryStore, Harness, run_case
from stretto.transports.interface import Label
from stretto.transports.posix import memory, segment
from stretto.transports.shared_memory import SharedMemoryTransport

SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3) as crew:
        yield crew


@pytest.fixture
def own_crew() -> Iterator[Crew]:
    """A crew that may be spoilt."""
    with Crew(2) as crew:
        yield crew


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[SharedMemoryTransport]:
    transport = SharedMemoryTransport(0, 1, DirectoryStore(tmp_path))
    yield transport
    transport.close()


# ---- nothing is left ----------------------------------------------------------------------------


@pytest.mark.parametrize("memfd", [True, False])
def test_nothing_is_left_when_all_ranks_are_killed(own_crew: Crew, memfd: bool) -> None:
    before = set(SHM.iterdir())
    own_crew.run(makers.all_die_with_memfd if memfd else makers.all_die_without_memfd, dies={0, 1})
    assert set(SHM.iterdir()) == before


def test_only_one_file_stays_open_and_none_after_close(crew: Crew) -> None:
    assert crew.run(makers.count_descriptors) == [(1, 0)] * 3


# ---- memory that is not there -------------------------------------------------------------------


def test_shortage_is_refused_before_anything_is_mapped(
    alone: SharedMemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = memory.Supply(3 << 20, "limit /sys/fs/cgroup/memory.max", "raise that limit")
    monkeypatch.setattr(segment, "memory_supply", lambda: [few])
    monkeypatch.setattr(segment, "Mapping", _no_mapping)
    with pytest.raises(InvalidInput) as caught:
        alone.allocate(makers.layout(1, 64 << 20))
    message = str(caught.value)
    assert re.search(r"needs 129\.\d MiB of shared memory, but only 3\.0 MiB is free", message)
    assert "limit /sys/fs/cgroup/memory.max" in message
    assert "use smaller buffers, fewer slots or fewer ranks, or raise that limit" in message


def test_shortage_on_one_rank_is_an_error_on_all_and_not_the_end(
    crew: Crew, tmp_path: Path
) -> None:
    for first, second in crew.run(makers.run_short, 8 << 20, str(tmp_path)):
        assert "393.0 MiB of shared memory, but only 8.0 MiB" in first
        assert "MemAvailable" in first
        assert second == ""


def test_directory_that_is_too_small_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    transport = SharedMemoryTransport(0, 1, DirectoryStore(tmp_path), directory=tmp_path)
    few = memory.Supply(1 << 20, f"{tmp_path}, used because", "enlarge it")
    monkeypatch.setattr(segment, "directory_supply", lambda directory: few)
    monkeypatch.setattr(segment, "Mapping", _no_mapping)
    with pytest.raises(InvalidInput, match=r"only 1\.0 MiB is free .*; use .* or enlarge it"):
        transport.allocate(makers.layout(1, 16 << 20))
    assert [path for path in tmp_path.iterdir() if "stretto-" in path.name] == []
    transport.close()


def test_directory_supply_asks_the_file_system(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    supply = memory.directory_supply(tmp_path)
    assert abs(supply.free_bytes - status.f_bavail * status.f_frsize) < 1 << 30
    assert "--shm-size" in supply.remedy


def test_failing_reservation_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    descriptor = os.open(path, os.O_RDONLY)
    with pytest.raises(InvalidInput, match="posix_fallocate"):
        segment.reserve(descriptor, 0, 4096)
    os.close(descriptor)


def test_file_without_o_tmpfile_has_no_name_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_EXCL)
    descriptor = segment.create("A test", 4096, directory=tmp_path)
    assert os.fstat(descriptor).st_size == 4096
    assert list(tmp_path.iterdir()) == []
    os.close(descriptor)


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_control_groups_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    top = tmp_path if version == 2 else tmp_path / "memory"
    limit, usage, cached = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    for folder, size in ((top / "a", "1000000"), (top / "a" / "b", "5000000")):
        folder.mkdir(parents=True)
        (folder / limit).write_text(size)
        (folder / usage).write_text("400000")
        (folder / "memory.stat").write_text(f"anon 5\n{cached} 100000\n")
    own = tmp_path / "own"
    own.write_text("0::/a/b\n" if version == 2 else "7:cpu:/x\n4:memory:/a/b\n0::/\n")
    monkeypatch.setattr(memory, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(memory, "_OWN_CGROUPS", own)
    supplies = memory.memory_supply()
    assert sorted(one.free_bytes for one in supplies[1:]) == [700_000, 4_700_000]
    with pytest.raises(InvalidInput, match=re.escape(str(top / "a" / limit))):
        memory.require(800_000, "A test", supplies)


def test_group_without_a_limit_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    own = tmp_path / "own"
    own.write_text("0::/\n")
    monkeypatch.setattr(memory, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(memory, "_OWN_CGROUPS", own)
    assert [one.source for one in memory.memory_supply()] == ["MemAvailable of the machine"]


# ---- ranks that do not come, or come wrong ------------------------------------------------------


def test_death_while_joining_is_noticed(crew: Crew) -> None:
    said = crew.run(makers.die_while_joining, dies={1})
    waited, message = said[0].split(" ", 1)
    assert float(waited) < 3
    assert "rank 1 died" in message


def test_rank_that_does_not_come_is_named(crew: Crew) -> None:
    assert "rank 1 did not come within 0.3 s" in crew.run(makers.join_alone)[0]


def test_second_transport_on_a_key_is_refused_and_harms_nobody(crew: Crew) -> None:
    said = crew.run(makers.join_twice)
    assert all("give every transport on a store a key_prefix of its own" in one for one in said[1:])


def test_world_sizes_must_agree(crew: Crew) -> None:
    said = crew.run(makers.misjudge_world_size)
    assert "rank 1 was started for 4 ranks, rank 0 for 3" in said[1]


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (1, 1), (0, 0)])
def test_impossible_rank_is_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no rank"):
        SharedMemoryTransport(rank, world_size, DirectoryStore(tmp_path))


def test_impossible_timeout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="timeout"):
        SharedMemoryTransport(0, 1, DirectoryStore(tmp_path), timeout_s=0)


def test_store_without_rank_0_is_a_lost_peer(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="rank 0 did not come") as caught:
        SharedMemoryTransport(1, 2, DirectoryStore(tmp_path, timeout_s=0.1))
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_full_mailbox_is_a_timeout_that_says_so(tmp_path: Path) -> None:
    transport = SharedMemoryTransport(0, 1, DirectoryStore(tmp_path), timeout_s=0.1)
    workspace = transport.allocate(makers.layout(1))
    word = Word("box", 0, 0, 0)
    fill = transport.signal(workspace, [word], Epoch(0, 1), label=Label("send", "fill3"))
    fill(0)
    with pytest.raises(WaitTimeout) as caught:
        fill(1)
    assert str(caught.value) == (
        "rank 0, stream 'send', operation 'fill3', call 1: waited 0.1 s to be emptied: "
        "flag 'box'[0], slot 0, home rank 0: expected epoch 0, seen 1."
    )
    with pytest.raises(PeerLost, match="this rank gave up: rank 0, stream 'send'"):
        transport.barrier()
    transport.close()


# ---- interrupts, closing, forks -----------------------------------------------------------------


@pytest.mark.parametrize("what", ["barrier", "collective", "allocate"])
def test_interrupt_in_the_middle_ends_everyone(crew: Crew, what: str) -> None:
    said = crew.run(makers.interrupted, what)
    assert said[0].startswith("KeyboardInterrupt")
    assert all("interrupted" in one and "rank 0" in one for one in said[1:])


def test_closing_under_running_streams_is_safe(crew: Crew) -> None:
    for said in crew.run(makers.close_while_streams_wait):
        assert len(said) == 3
        assert all("has closed the workspace" in one for one in said)


def test_forked_child_takes_nothing_away(crew: Crew) -> None:
    assert crew.run(makers.fork_inside) == ["fine"] * 3


# ---- sums ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [True, False], ids=["local", "symmetric"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_sums_are_those_of_rank_order(crew: Crew, dtype: str, local: bool) -> None:
    # Rounds of many rows of a cell, the last one short.
    assert crew.run(makers.reduce_exactly, dtype, local, 150, 1001) == [""] * 3


def test_rows_longer_than_a_cell_are_cut(crew: Crew) -> None:
    assert crew.run(makers.reduce_exactly, "fp32", True, 2, 300_001) == [""] * 3


def test_all_reduce_in_place(crew: Crew) -> None:
    assert crew.run(makers.reduce_in_place) == [True] * 3


# ---- other ways to the same end -----------------------------------------------------------------


@pytest.fixture(scope="module", params=[makers.without_memfd, makers.with_fences])
def way(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Crew]]:
    with Crew(2) as crew:
        yield request.param, crew


@pytest.mark.parametrize(
    "name",
    [
        "data_is_there_before_its_signal",
        "mailboxes_have_depth_one",
        "counters_lose_no_add",
        "collectives_follow_each_other",
    ],
)
def test_every_way_conforms(way: tuple[Any, Crew], name: str) -> None:
    make, crew = way
    run_case(CASES[name], Harness(make=make), crew)


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_ranks_meet_in_the_stores_of_torch(own_crew: Crew, tmp_path: Path) -> None:
    for make in (makers.OverTorchFile(tmp_path), makers.over_torch_tcp):
        run_case(CASES["transports_are_apart"], Harness(make=make), own_crew)


def _no_mapping(*arguments: object) -> None:
    raise AssertionError("something was mapped")
