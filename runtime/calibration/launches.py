"""Work to be timed: launches put together, GEMM operands, signals between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from stretto.runtime.gemm import TorchGemm
from stretto.runtime.tensors import torch_dtype
from stretto.schedules.language import Epoch, Word
from stretto.transports.cuda.stream import CudaStream
from stretto.transports.interface import Memory

__all__ = [
    "Enqueue",
    "Operands",
    "Shape",
    "beginning",
    "exchange",
    "gemm_guess_us",
    "in_turn",
    "nothing",
    "one_gemm",
    "ping_pong",
    "pushing",
    "signals",
    "spread",
    "times",
]

Enqueue = Callable[[], Any]
Shape = tuple[int, int, int]

GUESS_TFLOPS = 600.0
"""For choosing how many operations go into a graph, and nothing else."""

EPOCH = Epoch(1, 1)
"""Every call of a workspace signals and awaits one more than the last one."""


# ---- putting launches together -------------------------------------------------------------------


def nothing() -> None:
    """Do nothing."""


def in_turn(*launches: Enqueue) -> Enqueue:
    """Return what does all of them, one after the other."""

    def enqueue() -> None:
        for launch in launches:
            launch()

    return enqueue


def times(launch: Enqueue, count: int) -> Enqueue:
    """Return what does it `count` times."""
    return in_turn(*[launch] * count)


def spread(make: Callable[[int, Any], Enqueue], peers: Sequence[int]) -> Enqueue:
    """Return what does ``make(peer, stream)`` for several peers at once, each on its stream."""
    import torch

    streams = [torch.cuda.Stream() for _ in peers]
    launches = [make(peer, stream) for peer, stream in zip(peers, streams, strict=True)]

    def enqueue() -> None:
        current = torch.cuda.current_stream()
        for stream, launch in zip(streams, launches, strict=True):
            stream.wait_stream(current)
            launch()
        for stream in streams:
            current.wait_stream(stream)

    return enqueue


# ---- GEMMs ---------------------------------------------------------------------------------------


class Operands:
    """Random normal operands of many GEMMs: one a for each k, one b for each (n, k), one result.

    Parameters
    ----------
    transport
        Whose device they are on, and whose rank seeds them.
    sites
        Sizes (n, k).
    rows
        The largest m.
    dtype
        By its name here.
    """

    def __init__(
        self, transport: Any, sites: Sequence[tuple[int, int]], rows: int, dtype: str
    ) -> None:
        import torch

        make = partial(
            torch.randn,
            device=transport.device,
            dtype=torch_dtype(dtype),
            generator=torch.Generator(device=transport.device).manual_seed(transport.rank),
        )
        self._a = {k: make((rows, k)) for k in dict.fromkeys(k for _, k in sites)}
        self._b = {(n, k): make((n, k)).mul_(k**-0.5) for n, k in sites}
        self._out = torch.empty(
            rows * max(n for n, _ in sites), device=transport.device, dtype=torch_dtype(dtype)
        )

    def gemm(self, shape: Shape) -> Enqueue:
        """Return the GEMM (m, n, k)."""
        m, n, k = shape
        out = self._out[: m * n].view(m, n)
        return TorchGemm().prepare(self._a[k][:m], self._b[n, k], out, None)


def one_gemm(transport: Any, shape: Shape, dtype: str = "bf16") -> Enqueue:
    """Return a GEMM with operands of its own."""
    m, n, k = shape
    return Operands(transport, ((n, k),), m, dtype).gemm(shape)


def gemm_guess_us(shape: Shape) -> float:
    """Return about how long a GEMM (m, n, k) takes."""
    m, n, k = shape
    return 5.0 + 2.0 * m * n * k / GUESS_TFLOPS / 1e6


# ---- pushes and signals --------------------------------------------------------------------------


def pushing(
    transport: Any, source: Any, workspace: Any, size: int, peer: int, slot: int, stream: Any
) -> Enqueue:
    """Return the push of the first `size` bytes of a tensor to a peer's buffer ``probe``."""
    launch = transport.put(
        Memory(source.data_ptr(), 1, size, size),
        Memory(workspace.address("probe", rank=peer, slot=slot), 1, size, size),
        stream=CudaStream(stream.cuda_stream),
    )

    def push(kept: Any = source) -> Any:
        return launch(0)

    return push


def beginning(transport: Any, workspace: Any, stream: Any) -> Enqueue:
    """Return what begins a call of a workspace, so that its epochs go on."""
    launch = transport.begin(
        workspace, [[]] * workspace.period, stream=CudaStream(stream.cuda_stream)
    )
    return nothing if launch is None else partial(launch, 0)


def signals(transport: Any, workspace: Any, stream: Any, *, flag: str, steps: int) -> Enqueue:
    """Return `steps` signals to the next rank, each to a word of its own."""
    peer = (transport.rank + 1) % transport.world_size
    return in_turn(
        *(
            _signal(transport, workspace, [Word(flag, peer, 0, step)], stream)
            for step in range(steps)
        )
    )


def ping_pong(transport: Any, workspace: Any, stream: Any, *, flag: str, steps: int) -> Enqueue:
    """Return signals and waits in turn between ranks 0 and 1, each with a word of its own."""
    rank = transport.rank
    if rank > 1:
        return nothing
    verbs: list[Enqueue] = []
    for step in range(steps):
        out = _signal(transport, workspace, [Word(flag, 1 - rank, 0, step)], stream)
        back = _wait(transport, workspace, [Word(flag, rank, 0, step)], stream)
        verbs += (out, back) if rank == 0 else (back, out)
    return in_turn(*verbs)


def exchange(transport: Any, workspace: Any, stream: Any, *, flag: str, steps: int) -> Enqueue:
    """Return barriers: every rank signals all others, then waits for all of them."""
    rank, size = transport.rank, transport.world_size
    peers = [peer for peer in range(size) if peer != rank]
    verbs: list[Enqueue] = []
    for step in range(steps):
        theirs = [Word(flag, peer, 0, step * size + rank) for peer in peers]
        ours = [Word(flag, rank, 0, step * size + peer) for peer in peers]
        verbs.append(_signal(transport, workspace, theirs, stream))
        verbs.append(_wait(transport, workspace, ours, stream))
    return in_turn(*verbs)


def _signal(transport: Any, workspace: Any, words: Iterable[Word], stream: Any) -> Enqueue:
    where = CudaStream(stream.cuda_stream)
    return partial(transport.signal(workspace, list(words), EPOCH, stream=where), 0)


def _wait(transport: Any, workspace: Any, words: Iterable[Word], stream: Any) -> Enqueue:
    where = CudaStream(stream.cuda_stream)
    return partial(transport.wait(workspace, list(words), EPOCH, stream=where), 0)
