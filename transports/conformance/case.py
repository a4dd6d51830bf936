"""A case of the conformance suite, and what it works with on each rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stretto.schedules.language import (
    Capabilities,
    CheckFailed,
    CollectiveKind,
    DType,
    Flag,
    Verb,
    WorkspaceLayout,
)
from stretto.transports.conformance.crew import Member
from stretto.transports.conformance.device import Device, HostDevice, Stream
from stretto.transports.interface import Label, Launch, Memory, Store, Transport, Workspace

__all__ = [
    "Case",
    "Harness",
    "MakeTransport",
    "RankContext",
    "expect",
    "has_flags",
    "maps_peers",
    "play",
]

_POLL_S = 0.002


class MakeTransport(Protocol):
    """Makes the transport under test, in a rank's process; must be picklable."""

    def __call__(
        self, rank: int, world_size: int, store: Store, *, timeout_s: float
    ) -> Transport: ...


@dataclass(frozen=True)
class Harness:
    """What a backend brings to be tested.

    Attributes
    ----------
    make
        Makes a transport.
    device
        Makes a rank's device.
    dtypes
        Types whose numbers its collectives can add.
    wait_limit_s
        Timeout of the transports it makes, where a case does not choose one.
    """

    make: MakeTransport
    device: Callable[[], Device] = HostDevice
    dtypes: tuple[DType, ...] = ("fp32", "fp64", "fp16", "bf16")
    wait_limit_s: float = 30.0


@dataclass(frozen=True)
class Case:
    """One thing that every transport must do right.

    Attributes
    ----------
    check
        Runs on every rank and raises if something is wrong.
    verbs
        That it needs.
    kind
        Of collective that it needs.
    least_ranks
        That it makes sense with.
    kills
        Whether the last rank dies in it.
    maps_peers
        Whether it needs other ranks' memory at an address of its own.
    """

    check: Callable[[RankContext], None]
    verbs: tuple[Verb, ...] = ()
    kind: CollectiveKind | None = None
    least_ranks: int = 1
    kills: bool = False
    maps_peers: bool = False

    @property
    def name(self) -> str:
        """As it is reported."""
        return self.check.__name__

    def skipped(self, capabilities: Capabilities, world_size: int) -> str | None:
        """Say why it cannot be run, or None if it can."""
        if world_size < self.least_ranks:
            return f"needs {self.least_ranks} ranks"
        for verb in self.verbs:
            lacking = capabilities.lacks(verb, self.kind)
            if lacking is not None:
                return lacking
        if self.maps_peers and not maps_peers(capabilities):
            return f"transport {capabilities.transport!r} maps no memory of other ranks"
        return None


def maps_peers(capabilities: Capabilities) -> bool:
    """Whether a transport's workspaces have addresses for the memory of other ranks."""
    return capabilities.lacks("put") is None or bool(capabilities.kernel_access)


def has_flags(capabilities: Capabilities) -> bool:
    """Whether a transport's workspaces can hold flags."""
    return capabilities.lacks("signal") is None


@dataclass
class RankContext:
    """What a case has on one rank."""

    member: Member
    harness: Harness
    device: Device
    transports: list[Transport] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.member.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.member.world_size

    def reachable(self, transport: Transport) -> list[int]:
        """Return the ranks whose memory has an address on this one."""
        if maps_peers(transport.offered()):
            return list(range(self.world_size))
        return [self.rank]

    @property
    def following(self) -> int:
        """The next rank, around the ring."""
        return (self.rank + 1) % self.world_size

    @property
    def preceding(self) -> int:
        """The previous rank, around the ring."""
        return (self.rank - 1) % self.world_size

    def transport(self, *, timeout_s: float | None = None) -> Transport:
        """Make a transport together with all ranks; it is closed at the end of the case."""
        store = self.member.store.within(f"transport{len(self.transports)}")
        limit_s = self.harness.wait_limit_s if timeout_s is None else timeout_s
        made = self.harness.make(self.rank, self.world_size, store, timeout_s=limit_s)
        self.transports.append(made)
        self.device.watch(made)
        return made

    def workspace(
        self,
        transport: Transport,
        *,
        buffers: tuple[tuple[str, int, int], ...] = (),
        flags: tuple[Flag, ...] = (),
    ) -> Workspace:
        """Allocate a workspace together with all ranks."""
        return transport.allocate(WorkspaceLayout(self.world_size, buffers, flags))

    def local(self, data: bytes, *, rows: int = 1) -> Memory:
        """Return local memory that holds `data` in so many rows."""
        address = self.device.allocate(len(data))
        self.device.write(address, data)
        row_bytes = len(data) // rows
        return Memory(address, rows, row_bytes, row_bytes)

    def stream(self, name: str) -> Stream:
        """Return a stream of this rank."""
        return self.device.stream(name)

    def run(self, launch: Launch, call: int = 0, *, on: str = "main") -> Sequence[int]:
        """Run one launch to its end and return what it returned."""
        stream = self.stream(on)
        stream.run(launch, call)
        return stream.synchronise()[-1]

    def on(self, stream: str, operation: str = "case") -> dict[str, Any]:
        """Return the arguments of a verb that say where it runs and what it is called."""
        return {"stream": self.stream(stream).handle, "label": Label(stream, operation)}

    def tell(self, key: str, value: str = "") -> None:
        """Say something to the other ranks, past the transport."""
        self.member.store.set(f"case/{key}", value)

    def told(self, key: str) -> bool:
        """Whether somebody has said it."""
        return self.member.store.has(f"case/{key}")

    def hear(self, key: str) -> str:
        """Wait until somebody says it; raise `CheckFailed` if another rank fails first."""
        deadline = time.monotonic() + self.harness.wait_limit_s
        while not self.told(key):
            expect(not self.told("failed"), f"another rank failed; {key!r} will not be said")
            expect(time.monotonic() < deadline, f"{key!r} was not said")
            time.sleep(_POLL_S)
        return self.member.store.get(f"case/{key}").decode()

    def meet(self, key: str) -> None:
        """Wait for all ranks, past the transport."""
        self.tell(f"{key}/{self.rank}")
        for rank in range(self.world_size):
            self.hear(f"{key}/{rank}")


def expect(right: bool, message: str) -> None:
    """Raise `CheckFailed` if something is not right."""
    if not right:
        raise CheckFailed(message)


def play(member: Member, harness: Harness, check: Callable[[RankContext], None]) -> None:
    """Run a case on one rank; what a crew calls."""
    context = RankContext(member, harness, harness.device())
    try:
        check(context)
    except BaseException as error:
        context.tell("failed")
        for transport in context.transports:
            transport.abort(f"the case failed on rank {member.rank}: {error}")
        raise
    finally:
        for transport in context.transports:
            transport.close()
        context.device.close()
