"""What ranks do in the tests of the library transport: importable by a plain name."""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stretto.schedules.language import Flag, InvalidInput, PeerLost, StrettoError, WorkspaceLayout
from stretto.transports.conformance import Member
from stretto.transports.interface import Label, Memory, Store
from stretto.transports.posix import copying
from stretto.transports.rccl import RcclTransport

ITEMS = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32, "fp64": np.float64}


def torch_store(rank: int, world_size: int, store: Store) -> Any:
    """Return a store of torch, in a file whose name goes through `store`."""
    from torch.distributed import FileStore

    if rank == 0:
        path = Path(tempfile.gettempdir()) / f"stretto-{secrets.token_hex(8)}"
        atexit.register(path.unlink, missing_ok=True)
        store.set("file", str(path))
    return FileStore(store.get("file").decode(), world_size)


@dataclass(frozen=True)
class MakeRccl:
    """Makes a transport on `device`; None is the rank's GPU."""

    device: str | None = "cpu"

    def __call__(
        self, rank: int, world_size: int, store: Store, *, timeout_s: float
    ) -> RcclTransport:
        met = torch_store(rank, world_size, store)
        return RcclTransport(rank, world_size, met, timeout_s=timeout_s, device=self.device)


def new(member: Member, **more: Any) -> RcclTransport:
    met = torch_store(member.rank, member.world_size, member.store)
    return RcclTransport(member.rank, member.world_size, met, **{"device": "cpu", **more})


def workspace_of(transport: RcclTransport, size_bytes: int = 4096) -> Any:
    return transport.allocate(WorkspaceLayout(transport.world_size, (("data", size_bytes, 1),), ()))


def said_by(member: Member, what: str) -> str:
    """Return the error that rank by rank something wrong gives."""
    transport = new(member)
    try:
        workspace = workspace_of(transport)
        here = workspace.address("data", rank=member.rank, slot=0)
        last = member.rank == member.world_size - 1
        memory = Memory(here, 1, 16, 16)
        layout = WorkspaceLayout(member.world_size, (), (Flag("arrived"),))
        huge = WorkspaceLayout(member.world_size, (("data", 1 << 50, 1),), ())
        blocks = [1] * member.world_size
        wide = Memory(here, len(blocks), 16, 16)

        def gather(**more: Any) -> None:
            arguments = {"dtype": "fp32", "blocks": blocks, **more}
            transport.collective(
                workspace, "all_gather", memory, wide, label=Label("main", "gather"), **arguments
            )

        def add(dtype: str) -> None:
            transport.collective(workspace, "all_reduce", wide, wide, dtype=dtype, blocks=blocks)

        actions: dict[str, Any] = {
            "put": lambda: transport.put(memory, memory),
            "signal": lambda: transport.signal(workspace, [], None),
            "wait": lambda: transport.wait(workspace, [], None),
            "flags": lambda: transport.allocate(layout),
            "memory": lambda: transport.allocate(huge),
            "peer": lambda: workspace.address("data", rank=1 - member.rank, slot=0),
            "kernel": workspace.device_handle,
            "one rank is wrong": lambda: gather(dtype="none" if last else "fp32"),
            "ranks differ": lambda: gather(dtype="fp16" if last else "fp32"),
            "fp8": lambda: add("fp8"),
        }
        actions[what]()
    except StrettoError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        transport.close()
    return ""


def join_with(member: Member, what: str) -> str:
    """Return the error of making a transport with something that does not fit."""
    import torch.distributed as dist

    met = torch_store(member.rank, member.world_size, member.store)
    rank, size = member.rank, member.world_size
    arguments: dict[str, Any] = {
        "store": {"store": member.store},
        "device": {"device": 3},
        "timeout": {"timeout_s": 0.0},
        "group": {"group": dist.ProcessGroup(met, rank, size + 1)},
        "empty group": {"group": dist.ProcessGroup(met, rank, size)},
    }[what]
    try:
        RcclTransport(rank, size, **{"store": met, "device": "cpu", **arguments}).close()
    except InvalidInput as error:
        return str(error)
    return ""


def with_group(member: Member) -> tuple[str, list[int]]:
    """Gather over the caller's group, which stays usable."""
    import torch
    import torch.distributed as dist

    met = torch_store(member.rank, member.world_size, member.store)
    dist.init_process_group("gloo", store=met, rank=member.rank, world_size=member.world_size)
    try:
        other = dist.PrefixStore("control", met)
        transport = RcclTransport(
            member.rank, member.world_size, other, device="cpu", group=dist.group.WORLD
        )
        given = np.full((1, 4), member.rank, np.uint8)
        out = np.zeros((member.world_size, 4), np.uint8)
        _run(transport, "all_gather", given, out, [1] * member.world_size, "fp8")
        transport.close()
        total = torch.ones(1)
        dist.all_reduce(total)
        return transport.implementation, [*out[:, 0].tolist(), int(total)]
    finally:
        dist.destroy_process_group()


def untouched_default_group(member: Member) -> bool:
    """Whether a transport leaves torch.distributed's default group alone."""
    import torch.distributed as dist

    transport = new(member)
    alone = not dist.is_initialized()
    transport.close()
    return alone


def collectives_on(
    member: Member, kind: str, dtype: str, rows: int, padded: bool, pitch: int
) -> str:
    """Hold a collective against numpy, in memory of the caller with gaps; say what is wrong.

    `rows` are split as a Program splits them; `padded` gives every side room for full blocks.
    """
    ranks, rank, columns = member.world_size, member.rank, 6
    full = -(-rows // ranks)
    blocks = [min(max(rows - peer * full, 0), full) for peer in range(ranks)]
    transport = new(member)
    given = [np.random.default_rng(peer).integers(-9, 9, (rows, columns)) for peer in range(ranks)]
    begin = rank * full
    whole, part = (full * ranks, full) if padded else (rows, blocks[rank])
    taken, expected = given[rank], sum(given)
    if kind == "all_gather":
        taken = given[rank][begin : begin + blocks[rank]]
        expected = np.concatenate(
            [one[peer * full : peer * full + blocks[peer]] for peer, one in enumerate(given)]
        )
    if kind == "reduce_scatter":
        expected = expected[begin : begin + blocks[rank]]
    source = _filled(part if kind == "all_gather" else whole, columns, pitch, dtype, taken)
    out = _filled(part if kind == "reduce_scatter" else whole, columns, pitch, dtype, None)
    before = out.copy()
    _run(transport, kind, source[:, :columns], out[:, :columns], blocks, dtype)
    transport.barrier()
    transport.close()
    found = _numbers(out[: len(expected), :columns], dtype)
    if not np.array_equal(found, expected):
        return f"{found} is not {expected}"
    if not np.array_equal(out[:, columns:], before[:, columns:]):
        return "written beside the rectangle"
    return ""


def reduce_in_place(member: Member) -> bool:
    """Source and destination of an all_reduce are one rectangle of the workspace."""
    transport = new(member)
    workspace = workspace_of(transport)
    here = Memory(workspace.address("data", rank=member.rank, slot=0), 4, 16, 16)
    copying.view(here, np.float32)[:] = member.rank + 1
    blocks = [4 - 2 * (member.world_size - 1), *[2] * (member.world_size - 1)]
    transport.collective(workspace, "all_reduce", here, here, dtype="fp32", blocks=blocks)(0)
    fine = bool((copying.view(here, np.float32) == sum(range(member.world_size + 1))).all())
    transport.close()
    return fine


def late(member: Member) -> tuple[str, float]:
    """Rank 1 does not do its part in time."""
    transport = new(member, timeout_s=0.5 if member.rank == 0 else 20.0)
    launch = _gather(transport)
    start = time.monotonic()
    try:
        if member.rank:
            member.store.get("over")
        launch(7)
    except StrettoError as error:
        member.store.set("over", "")
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    finally:
        transport.close()
    return "", 0.0


def given_up(member: Member) -> tuple[str, float]:
    """Rank 1 gives up instead of doing its part."""
    transport = new(member)
    launch = _gather(transport)
    transport.barrier()
    start = time.monotonic()
    try:
        if member.rank:
            time.sleep(0.2)
            transport.abort("the soup is too hot")
        else:
            launch(0)
        transport.raise_if_failed()
    except PeerLost as error:
        return str(error), time.monotonic() - start
    finally:
        transport.close()
    return "", 0.0


def interrupted(member: Member) -> str:
    """Rank 0 gets Ctrl-C in the middle of a collective; the others must not hang."""
    transport = new(member)
    launch = _gather(transport)
    transport.barrier()
    try:
        if member.rank == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            launch(0)
        else:
            time.sleep(0.6)
            launch(0)
    except (KeyboardInterrupt, PeerLost) as error:
        return f"{type(error).__name__} {error}"
    finally:
        transport.close()
    return ""


def close_in_a_collective(member: Member) -> str:
    """Rank 0 closes under its own stream, which waits for rank 1."""
    transport = new(member, timeout_s=5.0)
    launch = _gather(transport)
    said: list[str] = []
    if member.rank:
        member.store.get("closed")
        transport.close()
        return ""

    def stream() -> None:
        try:
            launch(0)
        except StrettoError as error:
            said.append(str(error))

    thread = threading.Thread(target=stream)
    thread.start()
    time.sleep(0.2)
    start = time.monotonic()
    transport.close()
    thread.join()
    took_s = time.monotonic() - start
    member.store.set("closed", "")
    return said[0] if took_s < 2 else f"closing took {took_s:.1f} s"


def _gather(transport: RcclTransport) -> Any:
    ranks = transport.world_size
    workspace = workspace_of(transport)
    here = workspace.address("data", rank=transport.rank, slot=0)
    return transport.collective(
        workspace,
        "all_gather",
        Memory(here + 2048, 1, 64, 64),
        Memory(here, ranks, 64, 64),
        dtype="fp32",
        blocks=[1] * ranks,
        label=Label("compute", "gather3"),
    )


def _run(
    transport: RcclTransport, kind: Any, source: Any, out: Any, blocks: list[int], dtype: str
) -> None:
    launch = transport.collective(
        workspace_of(transport), kind, _memory(source), _memory(out), dtype=dtype, blocks=blocks
    )
    for call in range(2):
        launch(call)


def _memory(array: Any) -> Memory:
    row_bytes = array.shape[1] * array.itemsize
    return Memory(array.ctypes.data, array.shape[0], row_bytes, array.strides[0])


def memory_of(tensor: Any) -> Memory:
    row_bytes = tensor.shape[1] * tensor.element_size()
    return Memory(tensor.data_ptr(), tensor.shape[0], row_bytes, row_bytes)


def _filled(rows: int, columns: int, pitch: int, dtype: str, numbers: Any) -> Any:
    """Return a matrix [rows, pitch] of rubbish, with `numbers` in its corner."""
    made = np.full((rows, pitch), 77, ITEMS[dtype])
    if numbers is not None:
        wide = numbers.astype(np.float32)
        stored = copying.to_bf16(wide) if dtype == "bf16" else wide.astype(ITEMS[dtype])
        made[: len(numbers), :columns] = stored
    return made


def _numbers(array: Any, dtype: str) -> Any:
    return copying.from_bf16(array) if dtype == "bf16" else array
