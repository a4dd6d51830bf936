"""Transport between NVIDIA GPUs of one host: pushes by the copy engines, over NVLink or PCIe P2P.

A put is one ``cuMemcpyDtoDAsync`` into the peer's symmetric buffer; no streaming multiprocessor
takes part.  A signal is a second copy on the same stream, of four bytes: the epoch's value, which
is device memory, so that a graph may be replayed any number of times.  A wait is a kernel of one
thread a word that polls with acquire semantics.

Why this signal and this wait
-----------------------------
Measured on two H200 (figures/data/signals_h200_x2.json), one way, idle: 7.2 us for the copy and the
polling kernel, 3.1 us where a kernel stores to the peer or torch's put_signal does, 7.1 us for the
copy with the driver's wait.  The store needs a multiprocessor, for which it waits beside a GEMM;
the copy needs none.  The driver's wait disturbs no GEMM, whereas a kernel that polls beside one
costs it about a wave (a GEMM of one wave takes 1.97 times as long); but it compares with a value
that a graph bakes in.  So waits are kernels, and schedules let none poll beside a GEMM where they
can.

Memory model
------------
*Release.*  Data and word are written by two copies that one stream orders.  The second begins when
the first has completed, and a completed copy has been performed at the peer's memory: that is what
stream order promises to any other work that is ordered after the copy, on that device or, with an
event, on another.  So the word is performed after the data.  The width of the word's copy is four
bytes at an aligned address, one transaction.
*Acquire.*  ``ld.acquire.sys`` of the waiting kernel observes the word at system scope; accesses of
that thread that follow are performed after it (PTX ISA, memory consistency model).  The kernels
that read the data start after the waiting kernel has ended, on its stream or behind an event, and
a kernel boundary orders and makes visible what came before it; no L1 line of theirs can be older,
and the copy wrote to this device's own L2 and memory, the point of coherence of its kernels.
*Proxy.*  Kernels that read the data through the asynchronous proxy (TMA) are likewise separated
from it by a kernel boundary.  A kernel that waits for a word itself, and then reads by TMA, needs
``fence.proxy.async`` in between; there is none such here.

Multicast
---------
Nothing here uses it, and it is switched off for this process and its children before torch is
imported (`stretto.transports.multicast`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from stretto.schedules.language import (
    Capabilities,
    CollectiveKind,
    Epoch,
    InvalidInput,
    PeerLost,
    RunFailed,
    Unsupported,
    Word,
    WorkspaceLayout,
)
from stretto.transports.cuda.driver import bindings, called, failed
from stretto.transports.cuda.kernels import Kernel, KernelLibrary
from stretto.transports.cuda.stream import CudaStream, stream_of
from stretto.transports.cuda.tables import DeviceTables
from stretto.transports.cuda.watch import Watch
from stretto.transports.cuda.workspace import CreditTable, CudaWorkspace
from stretto.transports.interface import (
    NO_LABEL,
    Availability,
    Label,
    Launch,
    Memory,
    Store,
    Transport,
    Workspace,
)
from stretto.transports.multicast import switch_multicast_off
from stretto.transports.posix import segment
from stretto.transports.posix.control import Control

__all__ = ["CopyEngineTransport"]


class CopyEngineTransport(Transport):
    """Puts by copy engines, signals by copies, waits by small kernels.

    Making one is collective.

    Parameters
    ----------
    rank, world_size
        Of this process; every rank is a process of its own.
    store
        Where the ranks meet.
    key_prefix
        Begins the keys that are used of the store; every transport on a store needs its own.
    timeout_s
        How long a wait may take.
    join_timeout_s
        How long the ranks wait for each other here and in `allocate`.
    device
        Index of this rank's GPU; by default the rank, modulo the number of GPUs.

    Raises
    ------
    Unsupported
        If a peer's GPU cannot be reached.
    InvalidInput
        If the ranks contradict each other.
    PeerLost, WaitTimeout
        If a rank ended, or did not come.
    """

    name = "copy_engine"

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        *,
        key_prefix: str = "stretto",
        timeout_s: float = 30.0,
        join_timeout_s: float = 120.0,
        device: int | None = None,
    ) -> None:
        switch_multicast_off()
        import torch

        self.rank, self.world_size = rank, world_size
        self.device_index = rank % torch.cuda.device_count() if device is None else device
        torch.cuda.set_device(self.device_index)
        self.device = torch.device("cuda", self.device_index)
        self._keep: list[Any] = []
        self._tables = DeviceTables(self.device)
        self._workspaces: list[CudaWorkspace] = []
        self._closed = False
        self._watch: Any = None
        self._control = Control(
            rank,
            world_size,
            store,
            key=f"{key_prefix}/copy_engine",
            timeout_s=timeout_s,
            join_timeout_s=join_timeout_s,
            directory=segment.SHARED_DIRECTORY,
        )
        try:
            self._group = _group(rank, world_size, store, key_prefix)
            self._check_peers()
            self._kernels = KernelLibrary(torch.cuda.get_device_capability(self.device))
            self._watch = Watch(self._control, timeout_s)
        except BaseException:
            self.close()
            raise

    @classmethod
    def available(cls) -> Availability:
        try:
            switch_multicast_off()
            import torch
        except ImportError:
            return Availability(False, "PyTorch is not installed: pip install 'stretto[cuda]'")
        if not torch.cuda.is_available():
            return Availability(False, "PyTorch finds no CUDA device")
        if torch.version.hip:
            return Availability(False, "this PyTorch is built for ROCm; use rccl")
        try:
            from cuda.bindings import driver, nvrtc
        except ImportError:
            return Availability(False, "cuda-python is not installed: pip install 'stretto[cuda]'")
        del driver, nvrtc
        count = torch.cuda.device_count()
        pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
        if pairs and not any(torch.cuda.can_device_access_peer(*pair) for pair in pairs):
            return Availability(False, "no GPU has peer access to another; use --transport rccl")
        # Whether the ranks' own GPUs reach each other is asked when a transport is made.
        return Availability(True, f"{count} GPU(s), peer access")

    @classmethod
    def offered(cls) -> Capabilities:
        return Capabilities(
            transport=cls.name,
            verbs=("put", "signal", "wait"),
            signal_orders_puts=True,
            verbs_on_sm=("wait",),
            verbs_that_block=("wait",),
            kernel_access=("load", "store"),
        )

    def allocate(self, layout: WorkspaceLayout) -> CudaWorkspace:
        import torch
        import torch.distributed._symmetric_memory as symmetric

        if torch.cuda.is_current_stream_capturing():
            raise RunFailed("A workspace cannot be made while a graph is captured; make it before.")
        size_bytes = CudaWorkspace.size_bytes(layout)
        free, _ = torch.cuda.mem_get_info(self.device)
        problem = None
        if size_bytes > free:
            problem = InvalidInput(
                f"The workspace needs {size_bytes / 2**20:,.0f} MiB on GPU {self.device_index}, "
                f"which has {free / 2**20:,.0f} MiB free; lower -m or free memory."
            )
        # Ranks that differ in size would map each other's memory wrongly.
        self._control.agree(repr(layout), "asks for a workspace of different layout", problem)
        tensor = None
        try:
            tensor = symmetric.empty(size_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            problem = InvalidInput(
                f"The workspace's {size_bytes / 2**20:,.0f} MiB cannot be had on GPU "
                f"{self.device_index}: {first}"
            )
        self._control.agree("memory", "has no memory", problem)
        handle = symmetric.rendezvous(tensor, self._group)
        workspace = CudaWorkspace(
            layout,
            self.rank,
            tensor,
            self._peers(tensor, handle),
            kernels=self._kernels,
            abort=self._watch.abort_address,
        )
        self._keep.append(handle)
        workspace.initialise()
        self._warm(workspace)
        self._workspaces.append(workspace)
        self.barrier()
        return workspace

    def _peers(self, tensor: Any, handle: Any) -> tuple[int, ...]:
        """Return where every rank's memory is mapped here.

        Allocations may share a block.  The handle gives the blocks, and each rank knows how far
        into its own block its tensor begins.
        """
        offset = tensor.data_ptr() - int(handle.buffer_ptrs[self.rank])
        offsets = [one["offset"] for one in self._control.exchange({"offset": offset})]
        return tuple(
            int(block) + one for block, one in zip(handle.buffer_ptrs, offsets, strict=True)
        )

    # ---- the verbs ---------------------------------------------------------------------------

    def put(
        self,
        source: Memory,
        destination: Memory,
        *,
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        if (source.rows, source.row_bytes) != (destination.rows, destination.row_bytes):
            raise InvalidInput(f"A put of {source} into {destination} differs in shape.")
        where = stream_of(stream)
        own = self._holder(destination)
        if not source.total_bytes:
            return _nothing
        driver = bindings()
        what = f"rank {self.rank}, stream {label.stream!r}, operation {label.operation!r}: the push"
        contiguous = source.rows == 1 or (
            source.pitch_bytes == destination.pitch_bytes == source.row_bytes
        )
        if not contiguous:
            return self._put_rectangle(source, destination, own, where, what)
        copy = driver.cuMemcpyDtoDAsync
        to, of = driver.CUdeviceptr(destination.address), driver.CUdeviceptr(source.address)
        size_bytes = source.total_bytes

        def launch(call: int) -> Sequence[int]:
            if own.closed:
                own.check_open()
            (code,) = copy(to, of, size_bytes, where.handle)
            if int(code):
                raise failed(what, code)
            return ()

        return launch

    def _put_rectangle(
        self,
        source: Memory,
        destination: Memory,
        own: CudaWorkspace,
        where: CudaStream,
        what: str,
    ) -> Launch:
        driver = bindings()
        shape = driver.CUDA_MEMCPY2D()
        shape.srcMemoryType = shape.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        shape.srcDevice, shape.srcPitch = source.address, source.pitch_bytes
        shape.dstDevice, shape.dstPitch = destination.address, destination.pitch_bytes
        shape.WidthInBytes, shape.Height = source.row_bytes, source.rows

        def launch(call: int) -> Sequence[int]:
            own.check_open()
            called(what, driver.cuMemcpy2DAsync(shape, where.handle))
            return ()

        return launch

    def signal(
        self,
        workspace: Workspace,
        words: Sequence[Word],
        value: Epoch,
        *,
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        own = self._own(workspace)
        kinds = {own.layout.flag(word.flag).kind for word in words}
        where = stream_of(stream)
        if kinds != {"epoch"}:
            if len(kinds) > 1:
                raise InvalidInput(f"operation {label.operation}: its words differ in kind.")
            return self._signal_kernel(own, words, value, kinds.pop(), where, label)
        driver = bindings()
        copy = driver.cuMemcpyDtoDAsync
        far = [word for word in words if word.home != self.rank]
        targets = [driver.CUdeviceptr(own.word_address(word)) for word in far]
        sources = [
            driver.CUdeviceptr(own.value_address(residue, value)) for residue in range(own.period)
        ]
        # A copy within a device is a kernel, which may have to wait for a GEMM to end.  So the own
        # word is fetched back from a peer's that has just been written, by a copy engine again.
        near = [driver.CUdeviceptr(own.word_address(word)) for word in words if word not in far]
        period = own.period
        what = f"rank {self.rank}, stream {label.stream!r}, operation {label.operation!r}: a signal"

        def launch(call: int) -> Sequence[int]:
            if own.closed:
                own.check_open()
            source = sources[call % period]
            handle = where.handle
            for target in targets:
                (code,) = copy(target, source, 4, handle)
                if int(code):
                    raise failed(what, code)
            for target in near:
                (code,) = copy(target, targets[-1] if targets else source, 4, handle)
                if int(code):
                    raise failed(what, code)
            return ()

        return launch

    def _signal_kernel(
        self,
        workspace: CudaWorkspace,
        words: Sequence[Word],
        value: Epoch,
        kind: str,
        where: CudaStream,
        label: Label,
    ) -> Launch:
        number = self._watch.labelled(label, words)
        table = self._tables.addresses(workspace.word_address(word) for word in words)
        head = (ctypes.c_uint64(table), ctypes.c_uint32(len(words)))
        kernels = []
        for residue in range(workspace.period):
            call = ctypes.c_uint64(workspace.call_address(residue))
            if kind == "counter":
                tail = (_u32(value.stride), _u32(value.offset))
                kernels.append(self._kernels.bind("stretto_add", len(words), *head, call, *tail))
            else:
                kernels.append(
                    self._kernels.bind(
                        "stretto_post", len(words), *head, call, *self._watch.giving_up(number)
                    )
                )
        return _by_residue(kernels, workspace, where)

    def wait(
        self,
        workspace: Workspace,
        words: Sequence[Word],
        value: Epoch,
        *,
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        own = self._own(workspace)
        for word in words:
            if word.home != self.rank:
                raise InvalidInput(
                    f"rank {self.rank} cannot wait for flag {word.flag!r} of rank {word.home}; "
                    "a wait is for words of its own."
                )
        mailboxes = {own.layout.flag(word.flag).kind == "mailbox" for word in words}
        if len(mailboxes) > 1:
            raise InvalidInput(f"operation {label.operation}: its words differ in kind.")
        takes = ctypes.c_uint32(int(mailboxes.pop()))
        number = self._watch.labelled(label, words)
        table = self._tables.addresses(own.word_address(word) for word in words)
        kernels = []
        for residue in range(own.period):
            abort, record, name, limit = self._watch.giving_up(number)
            kernels.append(
                self._kernels.bind(
                    "stretto_wait",
                    len(words),
                    ctypes.c_uint64(table),
                    ctypes.c_uint32(len(words)),
                    ctypes.c_uint64(own.call_address(residue)),
                    _u32(value.stride),
                    _u32(value.offset),
                    abort,
                    record,
                    name,
                    limit,
                    takes,
                )
            )
        return _by_residue(kernels, own, stream_of(stream))

    def begin(
        self,
        workspace: Workspace,
        due: Sequence[Sequence[tuple[Word, Epoch]]],
        *,
        stream: Any = None,
    ) -> Launch:
        # One kernel counts the use on the device, then waits for the credits.
        own = self._own(workspace)
        kernels = []
        for residue, awaited in enumerate(due):
            words = [word for word, _ in awaited]
            number = self._watch.labelled(Label("caller", "begin"), words)
            table = CreditTable(
                self._tables.addresses(own.word_address(word) for word in words),
                self._tables.numbers([value.stride for _, value in awaited]),
                self._tables.numbers([value.offset for _, value in awaited]),
                len(words),
            )
            kernels.append(own.begin_kernel(residue, table, self._watch.giving_up(number)))
        return _by_residue(kernels, own, stream_of(stream))

    def collective(
        self,
        workspace: Workspace,
        kind: CollectiveKind,
        source: Memory,
        destination: Memory,
        *,
        dtype: str,
        blocks: Sequence[int],
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        raise Unsupported(
            f"Transport 'copy_engine' has no {kind}; use a push variant, or --transport rccl."
        )

    # ---- failures ----------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        self._watch.let_go()
        try:
            self._control.abort(reason)
        except RunFailed:
            return

    def raise_if_failed(self) -> None:
        # The device does not stop for it; waits are let go, and rows are wrong from there on.
        self._watch.raise_if_failed()

    def raise_if_noted(self) -> None:
        self._watch.raise_if_noted()

    # ---- the end -----------------------------------------------------------------------------

    def barrier(self) -> None:
        try:
            self._control.barrier()
        except PeerLost:
            self.raise_if_failed()  # what this rank knows itself says more
            raise

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return self._control.exchange(message)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        self._control.say_closed()
        for workspace in self._workspaces:
            workspace.close()
        self._keep.clear()
        self._tables.clear()
        if self._control.gate.shut(5.0):
            self._control.release()

    # ---- helpers -----------------------------------------------------------------------------

    def _check_peers(self) -> None:
        import torch

        devices = [one["device"] for one in self._control.exchange({"device": self.device_index})]
        for peer, device in enumerate(devices):
            same = device == self.device_index
            if not same and not torch.cuda.can_device_access_peer(self.device_index, device):
                raise Unsupported(
                    f"GPU {self.device_index} (rank {self.rank}) has no peer access to GPU "
                    f"{device} (rank {peer}); use --transport rccl."
                )

    def _warm(self, workspace: CudaWorkspace) -> None:
        """Run every kernel that may start beside one that spins, on words that nobody uses."""
        import torch

        scratch = torch.zeros(4, dtype=torch.int32, device=self.device)
        table = torch.tensor([scratch.data_ptr()], dtype=torch.int64, device=self.device)
        head = (ctypes.c_uint64(table.data_ptr()), ctypes.c_uint32(1))
        call = ctypes.c_uint64(scratch.data_ptr() + 4)
        zero = _u32(0)
        giving_up = self._watch.giving_up(0)
        for kernel in (
            self._kernels.bind("stretto_set", 1, *head, call, zero, zero),
            self._kernels.bind("stretto_add", 1, *head, call, zero, zero),
            self._kernels.bind("stretto_wait", 1, *head, call, zero, zero, *giving_up, zero),
            self._kernels.bind("stretto_post", 1, *head, call, *giving_up),
        ):
            kernel.launch(0)
        torch.cuda.synchronize()

    def _holder(self, destination: Memory) -> CudaWorkspace:
        """Return the workspace that a put's destination is in."""
        size = 0
        if destination.total_bytes:
            size = (destination.rows - 1) * destination.pitch_bytes + destination.row_bytes
        for workspace in self._workspaces:
            if not workspace.closed and workspace.holds(destination.address, size):
                return workspace
        raise InvalidInput(
            f"A put must go into one slot of a symmetric buffer; {destination} is not in one."
        )

    def _own(self, workspace: Workspace) -> CudaWorkspace:
        if isinstance(workspace, CudaWorkspace) and workspace in self._workspaces:
            return workspace
        raise InvalidInput("The workspace was not allocated by this transport.")


def _group(rank: int, world_size: int, store: Store, prefix: str) -> Any:
    """Return the process group that symmetric memory meets through."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"{prefix}/group", store),
            rank=rank,
            world_size=world_size,
        )
    if dist.get_world_size() != world_size:
        raise InvalidInput(
            f"The transport has {world_size} ranks, torch.distributed has "
            f"{dist.get_world_size()}; symmetric memory needs the whole world."
        )
    if dist.get_rank() != rank:
        raise InvalidInput(
            f"The transport's rank {rank} is torch.distributed's {dist.get_rank()}; symmetric "
            "memory needs one order of ranks."
        )
    return dist.group.WORLD


def _u32(value: int) -> ctypes.c_uint32:
    return ctypes.c_uint32(value & 0xFFFFFFFF)


def _by_residue(kernels: list[Kernel], workspace: CudaWorkspace, where: CudaStream) -> Launch:
    period = len(kernels)

    def launch(call: int) -> Sequence[int]:
        if workspace.closed:
            workspace.check_open()
        kernels[call % period].launch(where.handle)
        return ()

    return launch


def _nothing(call: int) -> Sequence[int]:
    return ()
