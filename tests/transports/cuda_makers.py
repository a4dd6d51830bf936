"""What ranks do in the conformance tests on GPUs: importable by a plain name."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from library_makers import memory_of, new, torch_store, workspace_of

from stretto.schedules.language import Epoch, StrettoError, Word
from stretto.transports.conformance import Member
from stretto.transports.conformance.cuda_device import CountingStream
from stretto.transports.copy_engine import CopyEngineTransport
from stretto.transports.cuda.stream import CudaStream
from stretto.transports.cuda.workspace import CudaWorkspace
from stretto.transports.interface import NO_LABEL, Label, Launch, Store, Workspace
from stretto.transports.rccl import RcclTransport


class Counted(CopyEngineTransport):
    """The copy engines as the cases drive them: every stream at a call of its own.

    The number of a call is on the device, one for a workspace and slot residue, and what begins a
    call writes it.  An executor makes one call at a time.  The cases do not: one stream may be in
    round 90 while another is in round 2.  So every stream gets a view of the workspace with a count
    of its own, on the same buffers and words, and before each launch the stream sets that count and
    begins the call.
    """

    def signal(
        self,
        workspace: Workspace,
        words: Sequence[Word],
        value: Epoch,
        *,
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        own = self._counted(workspace, stream)
        return self._set_up(own, super().signal(own, words, value, stream=stream, label=label))

    def wait(
        self,
        workspace: Workspace,
        words: Sequence[Word],
        value: Epoch,
        *,
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        own = self._counted(workspace, stream)
        return self._set_up(own, super().wait(own, words, value, stream=stream, label=label))

    def _set_up(self, view: CudaWorkspace, launch: Launch) -> Launch:
        """Wait for the tables that a verb has put on the device, by the current stream.

        They belong to every later beginning of a call, so the present one is begun again.
        """
        import torch

        torch.cuda.current_stream().synchronize()
        _present.pop(id(view), None)
        return launch

    def _counted(self, workspace: Workspace, stream: CountingStream) -> CudaWorkspace:
        """Return this stream's view of a workspace."""
        own = self._own(workspace)
        views = self.__dict__.setdefault("views", {})
        if (id(own), id(stream)) not in views:
            view = CudaWorkspace(
                own.layout,
                own.rank,
                own._tensor,
                own.peers,
                kernels=own._kernels,
                abort=own._abort,
            )
            self._workspaces.append(view)
            begin = counting(view, self.begin(view, [[]] * view.period, stream=stream), stream)
            begin(0)  # loads what it runs, before anything waits on the device
            _synchronise(stream)
            stream.begins.append(begin)
            views[id(own), id(stream)] = view, own, stream
        found: CudaWorkspace = views[id(own), id(stream)][0]
        return found


_present: dict[int, int] = {}
"""By view: the call that it is in."""


def counting(view: Any, begin: Launch, stream: CudaStream) -> Launch:
    """Return the launch that lets a view be at a call, in the order of a stream.

    The kernel behind `begin` makes the call's number from the uses of its slot residue, and counts
    one use; so the uses are those before the call.  A call that the stream is in already is not
    begun again: a stream behind a wait takes about a thousand launches, and then its host waits.
    """

    def at(call: int) -> Sequence[int]:
        if _present.get(id(view)) == call:
            return ()
        _present[id(view)] = call
        with _on(stream):
            view.set_uses(call // view.period)
        return begin(call)

    return at


def _on(stream: CudaStream) -> Any:
    import torch

    return torch.cuda.stream(torch.cuda.ExternalStream(stream.handle))


def _synchronise(stream: CudaStream) -> None:
    import torch

    torch.cuda.ExternalStream(stream.handle).synchronize()


def copy_engine(rank: int, world_size: int, store: Store, *, timeout_s: float) -> Counted:
    prefix = _fresh(rank, store)
    return Counted(
        rank, world_size, _kept(rank, world_size, store), key_prefix=prefix, timeout_s=timeout_s
    )


_stores: list[Any] = []


def _kept(rank: int, world_size: int, store: Store) -> Any:
    """Return the one store of this process: torch's default group lives as long as it does.

    Symmetric memory meets through the default group, which the first transport of a process makes
    and later ones find; so all processes of a crew must be of one age.
    """
    if not _stores:
        _stores.append(torch_store(rank, world_size, store))
    return _stores[0]


def _fresh(rank: int, store: Store) -> str:
    """Return a prefix of keys that no earlier transport has used."""
    if rank == 0:
        store.set("prefix", secrets.token_hex(8))
    return store.get("prefix").decode()


# ---- the library on GPUs ------------------------------------------------------------------------


def share_a_gpu(member: Member) -> str:
    """Return what two ranks on one GPU are told."""
    try:
        new(member, device=0).close()
    except StrettoError as error:
        return str(error)
    return ""


def gathers_in_graphs(member: Member) -> list[str]:
    """Capture collectives on a side stream, replay them over new numbers; say what is wrong."""
    import torch

    transport = new(member, device=None)
    wrong = []
    try:
        for rows in (8, 7):
            for dtype in (torch.bfloat16, torch.float32):
                wrong += _in_a_graph(transport, rows, dtype)
    finally:
        transport.close()
    return wrong


def _in_a_graph(transport: RcclTransport, rows: int, dtype: Any) -> list[str]:
    import torch

    ranks, rank = transport.world_size, transport.rank
    full = -(-rows // ranks)
    blocks = [min(max(rows - peer * full, 0), full) for peer in range(ranks)]
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    holder = CudaStream(side.cuda_stream)
    whole = torch.zeros((rows, 16), dtype=dtype, device="cuda")
    own = torch.zeros((blocks[rank], 16), dtype=dtype, device="cuda")
    total = torch.zeros_like(whole)
    workspace = workspace_of(transport)
    common = {"dtype": name, "blocks": blocks, "stream": holder}
    launches = [
        transport.collective(workspace, "all_gather", memory_of(own), memory_of(whole), **common),
        transport.collective(workspace, "all_reduce", memory_of(whole), memory_of(total), **common),
    ]

    def run() -> None:
        side.wait_stream(torch.cuda.current_stream())
        for launch in launches:
            launch(0)
        torch.cuda.current_stream().wait_stream(side)

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    wrong = []
    for turn in range(1, 4):
        own.fill_(float(turn + rank))
        torch.cuda.synchronize()
        transport.barrier()
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize()
        transport.raise_if_failed()
        expected = torch.cat(
            [torch.full((count, 16), float(turn + peer)) for peer, count in enumerate(blocks)]
        )
        if not torch.equal(whole.float().cpu(), expected):
            wrong.append(f"{name}, {rows} rows, turn {turn}: the gathered rows are wrong")
        if not torch.equal(total.float().cpu(), ranks * expected):
            wrong.append(f"{name}, {rows} rows, turn {turn}: the sum is wrong")
    return wrong
