"""What runs in other processes: it has to be importable there by a plain name."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stretto.schedules.language import (
    Epoch,
    Flag,
    InvalidInput,
    PeerLost,
    StrettoError,
    WaitTimeout,
    Word,
    WorkspaceLayout,
)
from stretto.transports import shared_memory as module
from stretto.transports.conformance import Member
from stretto.transports.interface import Launch, Memory, Store
from stretto.transports.posix import collectives, control, copying
from stretto.transports.posix import memory as supplies
from stretto.transports.shared_memory import SharedMemoryTransport

LAYOUT_FLAGS = (Flag("flag", count=2), Flag("sum", kind="counter"), Flag("box", kind="mailbox"))


def shared_memory(
    rank: int, world_size: int, store: Store, *, timeout_s: float, **more: Any
) -> SharedMemoryTransport:
    return SharedMemoryTransport(rank, world_size, store, timeout_s=timeout_s, **more)


def without_memfd(
    rank: int, world_size: int, store: Store, *, timeout_s: float
) -> SharedMemoryTransport:
    if hasattr(os, "memfd_create"):
        del os.memfd_create
    return shared_memory(rank, world_size, store, timeout_s=timeout_s)


def with_fences(
    rank: int, world_size: int, store: Store, *, timeout_s: float
) -> SharedMemoryTransport:
    """As on a processor with weakly ordered memory."""
    for one in (module, control, collectives):
        one.NEEDS_FENCE = True
    return shared_memory(rank, world_size, store, timeout_s=timeout_s)


def over_torch_tcp(
    rank: int, world_size: int, store: Store, *, timeout_s: float
) -> SharedMemoryTransport:
    from torch.distributed import TCPStore

    if rank == 0:
        met = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("port", str(met.port))
    else:
        met = TCPStore("127.0.0.1", int(store.get("port")), wait_for_workers=False)
    made = shared_memory(rank, world_size, met, timeout_s=timeout_s)
    made.barrier()  # the server may go only when everyone has asked it
    return made


@dataclass(frozen=True)
class OverTorchFile:
    folder: Path

    def __call__(
        self, rank: int, world_size: int, store: Store, *, timeout_s: float
    ) -> SharedMemoryTransport:
        from torch.distributed import FileStore

        if rank == 0:
            store.set("file", secrets.token_hex(8))
        path = self.folder / store.get("file").decode()
        met = FileStore(str(path), world_size)
        return shared_memory(rank, world_size, met, timeout_s=timeout_s)


# ---- what a rank does in the tests of this backend ----------------------------------------------


def new(member: Member, **more: Any) -> SharedMemoryTransport:
    return SharedMemoryTransport(member.rank, member.world_size, member.store, **more)


def layout(world_size: int, size_bytes: int = 4096) -> WorkspaceLayout:
    return WorkspaceLayout(world_size, (("data", size_bytes, 2),), LAYOUT_FLAGS)


def meet(member: Member, key: str) -> None:
    member.store.set(f"{key}/{member.rank}", "")
    for rank in range(member.world_size):
        member.store.get(f"{key}/{rank}")


def all_die(member: Member, *, memfd: bool) -> None:
    """Be killed in the middle of a wait, with everything mapped."""
    if not memfd:
        del os.memfd_create
    transport = new(member)
    workspace = transport.allocate(layout(member.world_size, 1 << 20))
    meet(member, "ready")
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    transport.wait(workspace, [Word("flag", member.rank, 0, 0)], Epoch())(0)


def die_while_joining(member: Member) -> str:
    """Rank 1 joins and is killed, rank 2 never comes; the others must hear of rank 1."""
    if member.rank == 2:
        member.store.get("noticed")
        return "late"
    if member.rank == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()
    try:
        new(member)
    except PeerLost as error:
        member.store.set("noticed", "")
        return f"{time.monotonic() - start:.1f} {error}"
    return "it joined"


def join_alone(member: Member) -> str:
    """Rank 0 comes, the others do not."""
    if member.rank:
        member.store.get("over")
        return ""
    try:
        new(member, join_timeout_s=0.3)
    except WaitTimeout as error:
        return str(error)
    finally:
        member.store.set("over", "")
    return "it joined"


def join_twice(member: Member) -> str:
    """A second transport under the key of the first one."""
    transport = new(member)
    meet(member, "first")
    said = ""
    if member.rank:
        try:
            new(member)
        except InvalidInput as error:
            said = str(error)
    meet(member, "second")
    time.sleep(0.2)  # long enough for a lost lock to be noticed
    transport.barrier()
    transport.close()
    return said


def misjudge_world_size(member: Member) -> str:
    try:
        SharedMemoryTransport(
            member.rank, member.world_size + member.rank, member.store, join_timeout_s=0.5
        )
    except StrettoError as error:
        return str(error)
    return ""


def run_short(member: Member, free_bytes: int, folder: str) -> list[str]:
    """Rank 0 sees too little memory: all refuse, and a smaller workspace is still possible."""
    transport = new(member)
    real = supplies._MEMINFO
    if member.rank == 0:
        supplies._MEMINFO = Path(folder) / "meminfo"
        supplies._MEMINFO.write_text(f"MemAvailable: {free_bytes // 1024} kB\n")
    said = []
    for size_bytes in (8 * free_bytes, 4096):
        try:
            transport.allocate(layout(member.world_size, size_bytes))
            said.append("")
        except InvalidInput as error:
            said.append(str(error))
    supplies._MEMINFO = real
    transport.close()
    return said


def interrupted(member: Member, what: str) -> str:
    """Rank 0 gets Ctrl-C in the middle of something collective; the others must not hang."""
    transport = new(member)
    workspace = transport.allocate(layout(member.world_size))
    here = Memory(workspace.address("data", rank=member.rank, slot=0), member.world_size, 16, 16)
    source = np.zeros((1, 16), np.uint8)
    gather = transport.collective(
        workspace,
        "all_gather",
        Memory(source.ctypes.data, 1, 16, 16),
        here,
        dtype="fp32",
        blocks=[1] * member.world_size,
    )
    actions: dict[str, Any] = {
        "barrier": transport.barrier,
        "collective": lambda: gather(0),
        "allocate": lambda: transport.allocate(layout(member.world_size)),
    }
    meet(member, "ready")
    try:
        if member.rank == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            actions[what]()
        else:
            time.sleep(0.5)
            actions[what]()
    except (KeyboardInterrupt, PeerLost) as error:
        return f"{type(error).__name__} {error}"
    finally:
        transport.close()
    return "nothing happened"


def close_while_streams_wait(member: Member) -> list[str]:
    """Ctrl-C in the main thread, and the transport is closed under waiting and copying threads."""
    transport = new(member)
    workspace = transport.allocate(layout(member.world_size, 1 << 22))
    data = np.zeros(1 << 22, np.uint8)
    target = Memory(workspace.address("data", rank=member.rank, slot=0), 1, 1 << 22, 1 << 22)
    put = transport.put(Memory(data.ctypes.data, 1, 1 << 22, 1 << 22), target)
    wait = transport.wait(workspace, [Word("flag", member.rank, 0, 0)], Epoch())
    said: list[str] = []

    def repeat(launch: Launch) -> None:
        try:
            for _ in range(10**9):
                launch(0)
        except StrettoError as error:
            said.append(str(error))

    threads = [threading.Thread(target=repeat, args=(one,)) for one in (put, put, wait)]
    try:
        for thread in threads:
            thread.start()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        transport.barrier()
        time.sleep(30)
    except KeyboardInterrupt:
        pass
    finally:
        transport.close()
    for thread in threads:
        thread.join()
    return said


def count_descriptors(member: Member) -> tuple[int, int]:
    """Return how many more files are open with a transport and workspaces, and after closing."""
    before = _open_files()
    transport = new(member)
    for _ in range(3):
        transport.allocate(layout(member.world_size))
    during = _open_files() - before
    transport.close()
    return during, _open_files() - before


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def fork_inside(member: Member) -> str:
    """A forked child that closes its copy takes nothing from its parent."""
    transport = new(member)
    child = os.fork()
    if child == 0:
        transport.close()
        os._exit(0)
    os.waitpid(child, 0)
    meet(member, "forked")
    time.sleep(0.3)
    transport.barrier()
    transport.close()
    return "fine"


def reduce_exactly(member: Member, dtype: str, local: bool, rows: int, columns: int) -> str:
    """Hold all collectives, bit by bit, against sums in rank order; several rounds of staging."""
    ranks, rank = member.world_size, member.rank
    item = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32, "fp64": np.float64}[dtype]
    pitch = columns + 3
    transport = new(member)
    size = ranks * rows * pitch * 8
    workspace = transport.allocate(WorkspaceLayout(ranks, (("data", size, 1),), ()))
    random = [np.random.default_rng(peer) for peer in range(ranks)]
    given = [one.standard_normal((ranks * rows - 1, columns)) * 100 for one in random]
    given = [_stored(one, dtype) for one in given]
    blocks = [rows] * (ranks - 1) + [rows - 1]
    begin = rank * rows
    total = _summed(given, dtype)
    wrong = []
    for kind in ("reduce_scatter", "all_reduce", "all_gather"):
        out = np.zeros((ranks * rows - 1, pitch), item)
        address = out.ctypes.data if local else workspace.address("data", rank=rank, slot=0)
        own = np.ascontiguousarray(given[rank])
        if kind == "all_gather":
            own = np.ascontiguousarray(own[begin : begin + blocks[rank]])
        count = blocks[rank] if kind == "reduce_scatter" else len(out)
        wide, narrow = pitch * out.itemsize, columns * out.itemsize
        destination = Memory(address, count, narrow, wide)
        view = copying.view(destination, item)
        copying.view(destination._replace(row_bytes=wide), item)[:, :] = 7
        launch = transport.collective(
            workspace,
            kind,
            Memory(own.ctypes.data, len(own), narrow, narrow),
            destination,
            dtype=dtype,
            blocks=blocks,
        )
        for call in range(2):
            launch(call)
        expected = {
            "reduce_scatter": total[begin : begin + blocks[rank]],
            "all_reduce": total,
            "all_gather": np.concatenate(
                [one[r * rows : r * rows + blocks[r]] for r, one in enumerate(given)]
            ),
        }[kind]
        if not np.array_equal(view.view(f"u{out.itemsize}"), expected.view(f"u{out.itemsize}")):
            wrong.append(kind)
        gaps = copying.view(destination._replace(row_bytes=wide), item)[:, columns:]
        if not (gaps == 7).all():
            wrong.append(f"{kind} beside its rectangle")
        transport.barrier()
    transport.close()
    return ", ".join(wrong)


def reduce_in_place(member: Member) -> bool:
    """Source and destination of an all_reduce are one rectangle, longer than the staging."""
    rows, columns = 600, 1000
    transport = new(member)
    size = rows * columns * 4
    workspace = transport.allocate(WorkspaceLayout(member.world_size, (("data", size, 1),), ()))
    memory = Memory(
        workspace.address("data", rank=member.rank, slot=0), rows, 4 * columns, 4 * columns
    )
    given = [np.arange(rows * columns).reshape(rows, columns) % (7 + r) for r in range(8)]
    copying.view(memory, np.float32)[:] = given[member.rank]
    blocks = [-(-rows // member.world_size)] * member.world_size
    blocks[-1] = rows - sum(blocks[:-1])
    transport.barrier()
    transport.collective(workspace, "all_reduce", memory, memory, dtype="fp32", blocks=blocks)(0)
    fine = np.array_equal(copying.view(memory, np.float32), sum(given[: member.world_size]))
    transport.barrier()
    transport.close()
    return fine


def _stored(numbers: Any, dtype: str) -> Any:
    if dtype == "bf16":
        return copying.to_bf16(numbers.astype(np.float32))
    return numbers.astype({"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}[dtype])


def _summed(given: list[Any], dtype: str) -> Any:
    wide = np.float64 if dtype == "fp64" else np.float32
    addends = [copying.from_bf16(one) if dtype == "bf16" else one.astype(wide) for one in given]
    total = addends[0].copy()
    for addend in addends[1:]:
        total += addend
    return _stored(total, dtype)


def all_die_with_memfd(member: Member) -> None:
    all_die(member, memfd=True)


def all_die_without_memfd(member: Member) -> None:
    all_die(member, memfd=False)
