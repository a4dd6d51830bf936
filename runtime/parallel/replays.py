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
from contextlib import suppress
from typing import Any

__all__ = ["Replays"]

TIMES_BEFORE = 3
"""A call is captured when it comes for the fourth time: a graph costs about ten eager calls."""

GRAPHS_KEPT, KEYS_KEPT = 256, 4096

STALE_AFTER = 16 * GRAPHS_KEPT
"""Calls after which a graph that was not replayed may make room.  A model whose calls are more than
the graphs kept would capture one in every call if the oldest always had to go."""


class Replays:
    """Graphs of single calls, by what the call is made of."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._used: dict[Hashable, int] = {}
        self._calls = 0
        self._pool: Any = None
        self._stream: Any = None

    def find(self, key: Hashable) -> Any | None:
        """Return the graph of a call, if there is one."""
        self._calls += 1
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            self._used[key] = self._calls
        return graph

    def due(self, key: Hashable) -> bool:
        """Count a call that has no graph; whether it should get one now."""
        times = self._seen.pop(key, 0)
        self._seen[key] = times + 1
        if len(self._seen) > KEYS_KEPT:
            self._seen.popitem(last=False)
        return times >= TIMES_BEFORE and self._has_room()

    def capture(self, key: Hashable, enqueue: Callable[[], None]) -> Any:
        """Capture a call on a stream of our own and return its graph, which has not run yet."""
        graph = self._captured(enqueue)
        self._seen.pop(key, None)
        self._graphs[key], self._used[key] = graph, self._calls
        return graph

    def clear(self) -> None:
        """Forget all graphs; none may be running."""
        self._seen.clear()
        self._graphs.clear()
        self._used.clear()

    def _has_room(self) -> bool:
        """Whether one more graph may be kept; the oldest makes room if it is stale."""
        if len(self._graphs) < GRAPHS_KEPT:
            return True
        oldest = next(iter(self._graphs))
        if self._calls - self._used[oldest] < STALE_AFTER:
            return False
        del self._graphs[oldest], self._used[oldest]
        return True

    def _captured(self, enqueue: Callable[[], None]) -> Any:
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
            except BaseException:
                with suppress(RuntimeError):  # the first error says more
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph
