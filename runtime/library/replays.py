"""Eager calls as replays of graphs of one call, once the same call has come several times.

An eager call of a few operations costs the host a hundred microseconds and more, a replay about a
tenth of that (``stretto bench host``), and for few rows the device would wait for the host.  So a
call that has come `TIMES_BEFORE` times with the same form, slot and addresses is captured;
allocators give the same few addresses again and again.

A graph of one call is a use of one slot like any other, counted on the device.  All that it touches
is ordered by the stream it is replayed on: it ends when its last node does, releases included.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

__all__ = ["Replays"]

TIMES_BEFORE = 3
"""A call is captured when it comes for the fourth time: a graph costs about ten eager calls."""

GRAPHS_KEPT, KEYS_KEPT = 256, 4096


class Replays:
    """Graphs of single calls, by what the call is made of."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._pool: Any = None
        self._stream: Any = None

    def find(self, key: Hashable) -> Any | None:
        """Return the graph of a call, if there is one."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    def due(self, key: Hashable) -> bool:
        """Count a call that has no graph; whether it should get one now."""
        times = self._seen.pop(key, 0)
        self._seen[key] = times + 1
        if len(self._seen) > KEYS_KEPT:
            self._seen.popitem(last=False)
        return times >= TIMES_BEFORE

    def capture(self, key: Hashable, enqueue: Callable[[], None]) -> Any:
        """Capture a call on a stream of our own and return its graph, which has not run yet."""
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Not torch.cuda.graph(), which waits for the device and empties the allocator's cache.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                enqueue()
            finally:
                graph.capture_end()
        self._graphs[key] = graph
        if len(self._graphs) > GRAPHS_KEPT:
            self._graphs.popitem(last=False)
        return graph

    def clear(self) -> None:
        """Forget all graphs; those that are running end first."""
        self._seen.clear()
        self._graphs.clear()
