"""Transport by a collective library: NCCL, RCCL or gloo, the one that torch.distributed brings.

One file serves all three.  A CUDA build of torch has NCCL, a ROCm build has RCCL under the same
name, and where there is no GPU there is gloo.  `RcclTransport.implementation` says which one it is.

The group is private: a backend object over the ranks' store.  It neither needs nor touches
``torch.distributed``'s default group, which may be the caller's, or be there already for another
transport.

What holds on all of them
-------------------------
*Sums* are taken in fp32 (fp64 for fp64) and rounded once: bf16 and fp16 are widened, summed, and
narrowed again.  NCCL and RCCL add bf16 in fp32 but round after every hop, and gloo adds in the type
itself, so neither would do what the interface promises.  That costs twice the bytes on the links;
it is the price of a baseline that can be compared bit by bit, and not how the library is fastest.
*Rows.*  Libraries want equal blocks, Programs may have short and empty ones.  Where all blocks are
full and both sides are contiguous, the library works on the given memory; otherwise blocks go
through buffers that are made when the collective is prepared and live as long as the workspace.
Nothing outside the given rectangles is written.
*Preparing is collective*, the first time for an operation and its sizes: ranks compare them, since
sizes that differ would end a process of gloo and hang or overrun one of NCCL.  After that each rank
prepares the same over other addresses by itself.
*One order.*  All ranks issue the collectives of a transport in one order, over all streams.

What differs
------------
On a CPU a launch blocks until the collective is done, and ends at an abort, a death or a timeout.
On a GPU it enqueues on its stream, in a captured graph too; a thread looks for ranks that died or
gave up, and lets the library's kernels go.  `raise_if_failed` says so, and also finds collectives
that were launched eagerly and do not end in time; those in a replayed graph have no clock.

Of ROCm the following is known from its documents and has not been run on hardware: devices are
called cuda; the version is that of the NCCL interface which RCCL implements; a device may have an
empty name and a UUID of zeros; there is nothing like NVLS to be switched off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from stretto.schedules.language import (
    ALL_COLLECTIVES,
    Capabilities,
    CollectiveKind,
    Epoch,
    InvalidInput,
    PeerLost,
    RunFailed,
    StrettoError,
    Unsupported,
    WaitTimeout,
    Word,
    WorkspaceLayout,
)
from stretto.transports.cuda.stream import CudaStream, stream_of
from stretto.transports.distributed.enqueued import Enqueued
from stretto.transports.distributed.found import (
    availability,
    device_index,
    identity,
    lacking,
    library,
    refuse_shared,
)
from stretto.transports.distributed.group import given_backend, private_backend, warm
from stretto.transports.distributed.shape import Shape
from stretto.transports.distributed.steps import Steps, on_stream, prepare
from stretto.transports.distributed.workspace import LocalWorkspace
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
from stretto.transports.posix.control import SLICE_S, Control
from stretto.transports.posix.gate import Gate
from stretto.transports.posix.memory import memory_supply

__all__ = ["RcclTransport"]

CLOSE_LIMIT_S = 5.0
GRACE_S = 1.0
"""How long after the library's own error its reason may take to be seen."""


class RcclTransport(Transport):
    """The library's collectives; no put, no signal, no wait.

    Making one is collective.

    Parameters
    ----------
    rank, world_size
        Of this process; every rank is a process of its own, on one host.
    store
        Where the ranks meet, a ``torch.distributed`` store.
    key_prefix
        Begins the keys that are used of the store; every transport on a store needs its own.
    timeout_s
        How long a collective may take.
    join_timeout_s
        How long the ranks wait for each other here, in `allocate` and when they prepare.
    device
        Index of this rank's GPU, or "cpu"; by default the rank, modulo the number of GPUs, and the
        CPU where there is none.
    group
        A ``torch.distributed`` process group of the same ranks, to use instead of a private one.
        It is aborted if a rank is lost while it is in use on a GPU, and never closed.

    Raises
    ------
    InvalidInput
        If the ranks contradict each other, or `group` or `device` does not fit.
    Unsupported
        If ranks share a GPU.
    PeerLost, WaitTimeout
        If a rank ended, or did not come.
    """

    name = "rccl"

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        *,
        key_prefix: str = "stretto",
        timeout_s: float = 30.0,
        join_timeout_s: float = 120.0,
        device: int | str | None = None,
        group: Any = None,
    ) -> None:
        switch_multicast_off()
        import torch

        if timeout_s <= 0 or join_timeout_s <= 0:
            raise InvalidInput("A timeout is a number of seconds above 0.")
        self.rank, self.world_size = rank, world_size
        self._timeout_s = timeout_s
        index = device_index(torch, device, rank)
        self.device = None if index is None else torch.device("cuda", index)
        self.implementation = library(torch, self.device)
        self._backend: Any = None
        if group is not None:
            self._backend = given_backend(group, rank, world_size, self.device)
        self._private = group is None
        self._issuing, self._noting = threading.Lock(), threading.Lock()
        self._error: StrettoError | None = None
        self._enqueued: dict[str, Enqueued] = {}
        self._running: dict[int, Enqueued] = {}
        self._left_behind = False
        self._workspaces: list[LocalWorkspace] = []
        self._agreed: set[tuple[str, str]] = set()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        self._control = Control(
            rank,
            world_size,
            store,
            key=f"{key_prefix}/rccl",
            timeout_s=timeout_s,
            join_timeout_s=join_timeout_s,
            directory=segment.SHARED_DIRECTORY,
        )
        try:
            self._check_devices(torch, index)
            if self._private:
                self._backend = private_backend(
                    store,
                    f"{key_prefix}/rccl/group",
                    rank,
                    world_size,
                    self.device,
                    timeout_s=timeout_s,
                    join_timeout_s=join_timeout_s,
                )
            if self.device is not None:
                self._watch()
                with self._told(f"rank {rank}, the first collectives"):
                    warm(self._backend, world_size, self.device)
        except BaseException:
            self.close()
            raise

    @classmethod
    def available(cls) -> Availability:
        try:
            switch_multicast_off()
            import torch
        except ImportError:
            return Availability(False, "PyTorch is not installed: pip install 'stretto[run]'")
        return availability(torch)

    @classmethod
    def offered(cls) -> Capabilities:
        return Capabilities(
            transport=cls.name,
            verbs=("collective",),
            collectives=ALL_COLLECTIVES,
            verbs_on_sm=("collective",),
            verbs_that_block=("collective",),
        )

    def allocate(self, layout: WorkspaceLayout) -> LocalWorkspace:
        workspace, problem = None, None
        try:
            workspace = self._allocated(layout)
        except InvalidInput as error:
            problem = error
        self._control.agree(repr(layout), "asks for a workspace of another layout", problem)
        if workspace is None:
            raise RunFailed("The workspace was not made.")
        self._workspaces = [one for one in self._workspaces if not one.gate.closed]
        self._workspaces.append(workspace)
        return workspace

    def _allocated(self, layout: WorkspaceLayout) -> LocalWorkspace:
        import torch

        if layout.flags:
            raise Unsupported(
                f"Transport 'rccl' has no flags (here {layout.flags[0].name!r}); a Program that "
                "signals or waits needs --transport copy_engine or shared_memory."
            )
        size_bytes = LocalWorkspace.size_bytes(layout)
        if self.device is not None:
            free, where = torch.cuda.mem_get_info(self.device)[0], f"GPU {self.device.index}"
        else:
            supplies = [one.free_bytes // self.world_size for one in memory_supply()]
            free, where = min(supplies, default=size_bytes), "this host for each rank"
        short = (
            f"The workspace needs {size_bytes / 2**20:,.0f} MiB on {where}, which has "
            f"{free / 2**20:,.0f} MiB free; lower -m or free memory."
        )
        if size_bytes > free:
            raise InvalidInput(short)
        try:
            tensor = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            raise InvalidInput(short) from error
        return LocalWorkspace(layout, self.rank, tensor)

    # ---- the verbs ---------------------------------------------------------------------------

    def put(
        self,
        source: Memory,
        destination: Memory,
        *,
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        raise lacking("put")

    def signal(
        self,
        workspace: Workspace,
        words: Sequence[Word],
        value: Epoch,
        *,
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        raise lacking("signal")

    def wait(
        self,
        workspace: Workspace,
        words: Sequence[Word],
        value: Epoch,
        *,
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        raise lacking("wait")

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
        own = self._own(workspace)
        shape = Shape(kind, source, destination, dtype, tuple(blocks), self.rank)
        where = f"rank {self.rank}, stream {label.stream!r}, operation {label.operation!r}"
        self._agree_on(shape, where)
        if not shape.valid or not source.row_bytes:
            return own.gate.guarded(_nothing)
        steps = prepare(
            shape,
            own,
            [one for one in self._workspaces if not one.gate.closed],
            backend=lambda: self._backend,
            device=self.device,
            key=label if label != NO_LABEL else object(),
        )
        if self.device is None:
            return own.gate.guarded(self._blocking(steps, where, own.gate))
        return own.gate.guarded(self._enqueuing(steps, where, stream_of(stream)))

    def _blocking(self, steps: Steps, where: str, gate: Gate) -> Launch:
        """Return the launch of a CPU."""

        def launch(call: int) -> Sequence[int]:
            here = f"{where}, call {call}"
            with self._issuing, self._told(here):
                for action in steps.before:
                    action()
                self._finish(steps.issue(), here, gate)
                for action in steps.after:
                    action()
            return ()

        return launch

    def _enqueuing(self, steps: Steps, where: str, holder: CudaStream) -> Launch:
        """Return the launch of a GPU."""
        import torch

        # One an operation, however often it is prepared again over other addresses.
        enqueued = self._enqueued.get(where)
        if enqueued is None:
            enqueued = Enqueued(torch.cuda.Event(), torch.cuda.Event(), where)
            self._enqueued[where] = enqueued

        def launch(call: int) -> Sequence[int]:
            with self._told(f"{where}, call {call}"), on_stream(holder, self.device):
                capturing = torch.cuda.is_current_stream_capturing()
                if not capturing:
                    enqueued.begin(call)
                for action in steps.before:
                    action()
                work = steps.issue()
                if work is not None:
                    work.wait()
                for action in steps.after:
                    action()
                if not capturing:
                    enqueued.end()
                    self._running[id(enqueued)] = enqueued
            return ()

        return launch

    @contextmanager
    def _told(self, where: str) -> Iterator[None]:
        """Give every error of the body the name of the operation, and tell the other ranks."""
        if self._error is not None:
            raise self._error
        if self.device is None:
            self._control.raise_if_aborted()
        try:
            yield
        except StrettoError as error:
            self._note(error)
            raise
        except RuntimeError as error:
            found = self._reason(where, error)
            self._note(found)
            raise found from error
        except BaseException as error:
            self.abort(f"{where} was interrupted ({type(error).__name__})")
            raise

    # ---- failures ----------------------------------------------------------------------------

    def _finish(self, work: Any, where: str, gate: Gate) -> None:
        """Block until a CPU's collective is done, or a reason to give up is found."""
        start = time.monotonic()
        try:
            while not work.is_completed():
                with suppress(RuntimeError):  # the slice is over, or it failed: looked at below
                    work.wait(timedelta(seconds=SLICE_S))
                if not work.is_completed():
                    gate.check()
                    self._look(where)
                    self._check_time(where, time.monotonic() - start)
            work.wait()
        finally:
            self._left_behind |= not work.is_completed()
            work = None  # an error's traceback must not keep the library's connections open

    def _look(self, where: str) -> None:
        """Raise if a rank has given up or died."""
        self._control.raise_if_aborted()
        problem = self._control.problem()
        if problem is not None:
            self._tell(problem)
            raise PeerLost(f"{where}: {problem}.")

    def _check_time(self, where: str, waited_s: float) -> None:
        if waited_s > self._timeout_s:
            message = (
                f"{where}: waited {self._timeout_s:g} s for the other ranks to do their part of "
                "the collective"
            )
            self._tell(message)
            raise WaitTimeout(f"{message}.")

    def _reason(self, where: str, error: Exception) -> StrettoError:
        """Return what an error of the library means, by what is known of the other ranks."""
        if self._error is not None:
            return self._error  # the library was made to fail
        said = (str(error).splitlines() or [""])[0]
        patience_s = GRACE_S if self.device is None and self.world_size > 1 else 0.0
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._look(where)
            except PeerLost as found:
                return found
            if time.monotonic() >= deadline:
                break
            time.sleep(SLICE_S / 5)
        message = f"{where}: {self.implementation} failed: {said}"
        self._tell(message)
        return RunFailed(f"{message}.")

    def _note(self, error: StrettoError) -> None:
        """Keep the first failure; on a GPU, let the library's kernels end."""
        with self._noting:
            if self._error is not None:
                return
            self._error = error
        self._let_go()

    def _let_go(self) -> None:
        if self.device is not None and self._backend is not None:
            with suppress(RuntimeError):  # it has failed by itself, and says so elsewhere
                self._backend.abort()

    def _tell(self, reason: str) -> None:
        with suppress(RunFailed):  # closed: there is nobody to tell any more
            self._control.abort(reason)

    def abort(self, reason: str) -> None:
        self._tell(reason)
        self._let_go()

    def raise_if_failed(self) -> None:
        """Raise what another rank, or a collective on the device, has run into.

        Raises
        ------
        WaitTimeout, PeerLost, RunFailed
            The first that was found.
        """
        if self._error is None and not self._closed.is_set():
            try:
                self._look(f"rank {self.rank}")
                self._find_late()
            except StrettoError as error:
                self._note(error)
        if self._error is not None:
            raise self._error

    def raise_if_noted(self) -> None:
        if self._error is not None:
            raise self._error

    def _find_late(self) -> None:
        """Raise if an eager collective of a GPU has begun long ago and has not ended."""
        if not self._running:
            return
        import torch

        if torch.cuda.is_current_stream_capturing():
            return  # events cannot be asked now
        for key, enqueued in list(self._running.items()):
            running_s = enqueued.running_s()
            if running_s is None:
                del self._running[key]
            else:
                self._check_time(f"{enqueued.where}, call {enqueued.call}", running_s)

    def _watch(self) -> None:
        """Start the thread that lets a GPU go when a rank is lost; it asks no device anything."""

        def work() -> None:
            while not self._closed.wait(SLICE_S):
                try:
                    self._look(f"rank {self.rank}")
                except StrettoError as error:
                    self._note(error)
                    return

        self._watcher = threading.Thread(target=work, name="stretto-rccl", daemon=True)
        self._watcher.start()

    # ---- the end -----------------------------------------------------------------------------

    def barrier(self) -> None:
        self._control.barrier()

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return self._control.exchange(message)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join(CLOSE_LIMIT_S)
        self._control.say_closed()
        for workspace in self._workspaces:
            workspace.close()
        self._close_backend()
        quiet = self._control.gate.shut(CLOSE_LIMIT_S)
        # A launch that has not come out of a workspace's gate still looks at the control segment.
        if quiet and not any(workspace.gate.busy for workspace in self._workspaces):
            self._control.release()

    def _close_backend(self) -> None:
        backend, self._backend = self._backend, None
        if backend is None or not self._private:
            return
        if self.device is None:
            # Gloo's connections end with the last reference, which waits for what was left behind:
            # until the other ranks have closed too, or gloo's own timeout is over.
            if self._left_behind:
                last = [backend]
                del backend
                threading.Thread(target=last.clear, name="stretto-rccl-end", daemon=True).start()
            return
        with suppress(RuntimeError):  # a group that has failed may refuse to be closed
            if self._idle(CLOSE_LIMIT_S):
                backend.shutdown()
            else:
                backend.abort()

    def _idle(self, limit_s: float) -> bool:
        """Wait until the eager collectives have ended; whether all did, and no rank is lost."""
        try:
            self._look(f"rank {self.rank}")
        except StrettoError as error:
            self._note(error)
        deadline = time.monotonic() + limit_s
        while self._error is None and self._running and time.monotonic() < deadline:
            with suppress(WaitTimeout):
                self._find_late()
            time.sleep(1e-3)
        return self._error is None and not self._running

    # ---- set-up ------------------------------------------------------------------------------

    def _check_devices(self, torch: Any, index: int | None) -> None:
        """Refuse ranks on one GPU, and ranks of which some have none."""
        own = None if index is None else identity(torch, index)
        devices = [one["device"] for one in self._control.exchange({"device": own})]
        refuse_shared(devices, self.implementation)
        if index is not None:
            torch.cuda.set_device(index)

    def _agree_on(self, shape: Shape, where: str) -> None:
        """Compare a collective with what the other ranks prepare, the first time that it is.

        The same one over other addresses is prepared again by each rank as it needs it, without
        the others.
        """
        problem = None
        try:
            shape.check(self.world_size)
        except InvalidInput as error:
            problem = error
        if (where, shape.signature) in self._agreed:
            if problem is not None:
                raise problem
            return
        differs = f"prepares another collective than {where}"
        self._control.agree(shape.signature, differs, problem)
        self._agreed.add((where, shape.signature))

    def _own(self, workspace: Workspace) -> LocalWorkspace:
        if isinstance(workspace, LocalWorkspace):
            workspace.gate.check()
            if workspace in self._workspaces:
                return workspace
        raise InvalidInput("The workspace was not allocated by this transport.")


def _nothing(call: int) -> Sequence[int]:
    return ()
