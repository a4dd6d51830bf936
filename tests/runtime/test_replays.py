"""When calls become graphs; the graphs themselves are made on GPUs (tests/runtime/gpu_cases.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stretto.runtime.parallel import replays
from stretto.runtime.parallel.replays import Replays


class Counted(Replays):
    """Replays whose graphs are numbers."""

    captures = 0

    def _captured(self, enqueue: Callable[[], None]) -> Any:
        enqueue()
        self.captures += 1
        return self.captures

    def call(self, key: object) -> str:
        """Make a call as a carrier does; say how it was made."""
        if self.find(key) is not None:
            return "replayed"
        if not self.due(key):
            return "enqueued"
        self.capture(key, lambda: None)
        return "captured"


def test_the_fourth_call_is_captured_and_later_ones_are_replayed() -> None:
    calls = Counted()
    assert [calls.call("a") for _ in range(6)] == [
        "enqueued", "enqueued", "enqueued", "captured", "replayed", "replayed",
    ]  # fmt: skip
    assert calls.call("b") == "enqueued"
    calls.clear()
    assert calls.call("a") == "enqueued"


def test_more_calls_than_graphs_do_not_capture_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "GRAPHS_KEPT", 8)
    monkeypatch.setattr(replays, "STALE_AFTER", 1000)
    calls = Counted()
    for _ in range(20):
        for key in range(10):
            calls.call(key)
    assert calls.captures == 8
    assert [calls.call(key) for key in range(10)] == ["replayed"] * 8 + ["enqueued"] * 2


def test_a_graph_that_nobody_replays_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "GRAPHS_KEPT", 1)
    monkeypatch.setattr(replays, "STALE_AFTER", 10)
    calls = Counted()
    for _ in range(4):
        calls.call("old")
    said = [calls.call("new") for _ in range(12)]
    assert "captured" in said
    assert said[-1] == "replayed"
    assert calls.call("old") == "enqueued"
