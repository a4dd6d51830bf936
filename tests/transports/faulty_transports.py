"""Transports with one fault each, which the conformance suite must find."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from stretto.schedules.language import Capabilities, Epoch, RunFailed, WaitTimeout, Word
from stretto.transports.interface import NO_LABEL, Label, Launch, Memory
from stretto.transports.posix import collectives, copying
from stretto.transports.shared_memory import SharedMemoryTransport


class LatePut(SharedMemoryTransport):
    """A put that is under way when its signal comes."""

    def put(self, source: Memory, destination: Memory, **on: Any) -> Launch:
        launch = super().put(source, destination, **on)

        def quietly(call: int) -> None:
            with suppress(RunFailed):  # the case has failed by then, and closed
                launch(call)

        def later(call: int) -> Sequence[int]:
            threading.Timer(0.005, quietly, (call,)).start()
            return ()

        return later


class WidePut(SharedMemoryTransport):
    """A put that copies the gaps between rows as well."""

    def put(self, source: Memory, destination: Memory, **on: Any) -> Launch:
        if source.pitch_bytes == destination.pitch_bytes and source.rows > 1:
            whole = (source.rows - 1) * source.pitch_bytes + source.row_bytes
            source = Memory(source.address, 1, whole, whole)
            destination = Memory(destination.address, 1, whole, whole)
        return super().put(source, destination, **on)


class HastyWait(SharedMemoryTransport):
    """A wait that compares epochs as plain numbers."""

    def wait(self, workspace: Any, words: Sequence[Word], value: Epoch, **on: Any) -> Launch:
        def launch(call: int) -> Sequence[int]:
            deadline = time.monotonic() + 3
            for word in words:
                while workspace.read_word(word) < value.at(call) & 0xFFFFFFFF:
                    if time.monotonic() > deadline:
                        raise WaitTimeout("no signal")
                    time.sleep(0.001)
            return ()

        return launch


class LosingAdd(SharedMemoryTransport):
    """A counter that is read, and then written."""

    def signal(self, workspace: Any, words: Sequence[Word], value: Epoch, **on: Any) -> Launch:
        if workspace.layout.flag(words[0].flag).kind != "counter":
            return super().signal(workspace, words, value, **on)
        shared = [workspace.word(word) for word in words]

        def launch(call: int) -> Sequence[int]:
            for one in shared:
                held = one.cell.value
                time.sleep(0)
                one.cell.value = held + value.at(call) & 0xFFFFFFFF
                one.wake()
            return ()

        return launch


class OverfullMailbox(SharedMemoryTransport):
    """A signal that does not wait until the mailbox is empty."""

    def signal(self, workspace: Any, words: Sequence[Word], value: Epoch, **on: Any) -> Launch:
        (shared,) = [workspace.word(word) for word in words]

        def launch(call: int) -> Sequence[int]:
            shared.cell.value = 1
            shared.wake()
            return ()

        return launch


class HastyCollective(SharedMemoryTransport):
    """A collective that writes into peers which have not reached it."""

    def collective(self, *arguments: Any, **on: Any) -> Launch:
        launch = super().collective(*arguments, **on)
        enter = collectives._Meeting.enter

        def hastily(call: int) -> Sequence[int]:
            collectives._Meeting.enter = lambda meeting, call: None
            try:
                return launch(call)
            finally:
                collectives._Meeting.enter = enter

        return hastily


class RoundingSum(SharedMemoryTransport):
    """Sums that are rounded after each addend."""

    def collective(self, *arguments: Any, **on: Any) -> Launch:
        kept, copying._sum_bf16 = copying._sum_bf16, _rounding_sum
        try:
            return super().collective(*arguments, **on)
        finally:
            copying._sum_bf16 = kept


def _rounding_sum(parts: list[Any], out: Any) -> None:
    total = parts[0]
    for part in parts[1:]:
        total = copying.to_bf16(copying.from_bf16(total) + copying.from_bf16(part))
    np.copyto(out, total)


class ModestClaim(SharedMemoryTransport):
    """Capabilities that leave out what there is."""

    @classmethod
    def offered(cls) -> Capabilities:
        return replace(super().offered(), collectives=("all_gather",))


class QuietAbort(SharedMemoryTransport):
    """An abort that nobody hears."""

    def abort(self, reason: str) -> None:
        return


class MuteTimeout(SharedMemoryTransport):
    """A timeout that does not say where."""

    def wait(self, *arguments: Any, label: Label = NO_LABEL, **on: Any) -> Launch:
        return super().wait(*arguments, **on)
