"""The one interface of all transports: four verbs, and the workspaces that they act on.

Verbs are *prepared*, then run.  ``transport.put(...)`` resolves every address once and returns a
`Launch`; calling the launch with the workspace's use count does the work, in the order of the
stream it was prepared for.  On a CPU the launch blocks the thread that is that stream; on a GPU it
enqueues on a CUDA stream and returns at once.  The lowering prepares, an executor's call is one
loop over launches.

Addresses, not tensors, cross this interface, so that a transport needs no tensor library and a
test needs no GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, ClassVar, NamedTuple, Protocol

from stretto.schedules.language import (
    Capabilities,
    CollectiveKind,
    Epoch,
    Word,
    WorkspaceLayout,
)

__all__ = [
    "Availability",
    "DeviceHandle",
    "Label",
    "Launch",
    "Memory",
    "Store",
    "Transport",
    "Workspace",
]

Launch = Callable[[int], Sequence[int]]
"""Run a prepared verb for one use of the workspace (its count).

A wait returns what each awaited word held when it passed, if the transport can tell on the host
(empty where it cannot); the other verbs return an empty sequence.
"""


class Availability(NamedTuple):
    """Whether a transport can be used here, or why not and what would change that."""

    usable: bool
    reason: str


class Label(NamedTuple):
    """Which operation a verb is prepared for; errors name it."""

    stream: str
    operation: str


NO_LABEL = Label("", "")


class Memory(NamedTuple):
    """A rectangle of bytes in this process's address space (a peer's memory is mapped there).

    Row r begins at ``address + r * pitch_bytes`` and is `row_bytes` long.
    """

    address: int
    rows: int
    row_bytes: int
    pitch_bytes: int

    @property
    def total_bytes(self) -> int:
        """Number of bytes named."""
        return self.rows * self.row_bytes


class Store(Protocol):
    """The key-value store through which ranks meet; ``torch.distributed.Store`` is one."""

    def set(self, key: str, value: Any, /) -> Any:
        """Publish a value (text or bytes)."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value and return it; raise if it does not come in time."""


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """What a kernel needs to reach a workspace from inside.

    Attributes
    ----------
    peers
        Address of every rank's memory, as seen from this device.
    multicast
        Address that reaches all of them at once, or None.
    words
        Address of every rank's flag words.
    use_count
        Address of this rank's device-side use count.
    abort
        Address of the word that every wait polls: not 0 means give up.
    """

    peers: tuple[int, ...]
    multicast: int | None
    words: tuple[int, ...]
    use_count: int
    abort: int


class Workspace(ABC):
    """Symmetric buffers and flags of all ranks, mapped into this process; made by a transport.

    One workspace serves many Programs (`WorkspaceLayout.of`), one call at a time.  `use_count` is
    the number of calls made on it; every rank makes the same calls in the same order.
    """

    layout: WorkspaceLayout
    rank: int
    use_count: int

    @property
    def period(self) -> int:
        """Number of calls after which slots repeat."""
        return lcm(
            1,
            *(slots for _, _, slots in self.layout.buffers),
            *(flag.slots for flag in self.layout.flags),
        )

    @abstractmethod
    def address(self, buffer: str, *, rank: int, slot: int) -> int:
        """Return where `rank`'s slot of a buffer of the layout begins, as this process sees it."""

    @abstractmethod
    def word_address(self, word: Word) -> int:
        """Return where a flag word is in this process's address space."""

    @abstractmethod
    def read_word(self, word: Word) -> int:
        """Return what a word holds now (for reports and tests)."""

    def latest_calls(self) -> list[int]:
        """Return the number of the latest call of every slot residue, the oldest first."""
        return list(range(max(self.use_count - self.period, 0), self.use_count))

    @abstractmethod
    def device_handle(self) -> DeviceHandle:
        """Return what a kernel needs.

        Raises
        ------
        Unsupported
            If no kernel can reach this kind of memory.
        """

    def snapshot(self) -> Mapping[Word, int]:
        """Return every word of every rank and what it holds now: the state to print at a hang."""
        return {
            word: self.read_word(word)
            for flag in self.layout.flags
            for home in range(self.layout.world_size)
            for slot in range(flag.slots)
            for word in (Word(flag.name, home, slot, place) for place in range(flag.count))
        }

    @abstractmethod
    def close(self) -> None:
        """Unmap; a second call does nothing."""


class Transport(ABC):
    """One way to move bytes between ranks.

    A transport is made with the rank, the world size and a `Store`; `allocate` is collective.
    Errors on the way are `WaitTimeout` (no signal in time) and `PeerLost` (a rank died or gave
    up); after either, the transport is good for nothing but `close`.
    """

    name: ClassVar[str]
    rank: int
    world_size: int
    device: Any = None
    """The ``torch.device`` whose memory it moves; None is the CPU."""

    @classmethod
    @abstractmethod
    def available(cls) -> Availability:
        """Say whether this machine has what the transport needs; never raises."""

    @classmethod
    @abstractmethod
    def offered(cls) -> Capabilities:
        """Return what the transport can do, without making one."""

    @abstractmethod
    def allocate(self, layout: WorkspaceLayout) -> Workspace:
        """Make a workspace, together with all other ranks.

        Raises
        ------
        InvalidInput
            If the ranks ask for different layouts, or there is not enough memory; the message
            says how much is needed.
        """

    @abstractmethod
    def put(
        self,
        source: Memory,
        destination: Memory,
        *,
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        """Copy `source` (this rank's) into `destination` (a peer's symmetric buffer).

        The copy is complete, and ordered before any later signal of the same stream, when a rank
        that has waited for that signal looks.
        """

    @abstractmethod
    def signal(
        self,
        workspace: Workspace,
        words: Sequence[Word],
        value: Epoch,
        *,
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        """Set, add to or fill `words`, according to the kind of their flags."""

    @abstractmethod
    def wait(
        self,
        workspace: Workspace,
        words: Sequence[Word],
        value: Epoch,
        *,
        stream: Any = None,
        label: Label = NO_LABEL,
    ) -> Launch:
        """Hold the stream until all `words` of this rank have reached the value."""

    @abstractmethod
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
        """Issue a collective that all ranks issue in the same order.

        Parameters
        ----------
        workspace
            Holds `destination` where the transport needs it symmetric.
        kind
            all_gather, reduce_scatter or all_reduce.
        source, destination
            This rank's part; the sharded side is this rank's block alone.
        dtype
            Of the elements, for reductions (summed in fp32, rounded once).
        blocks
            Valid rows of every rank's block.
        stream
            As for the other verbs.
        label
            For errors.
        """

    def begin(
        self,
        workspace: Workspace,
        due: Sequence[Sequence[tuple[Word, Epoch]]],
        *,
        stream: Any = None,
    ) -> Launch | None:
        """Prepare the start of a call, where the transport has something to do there.

        Parameters
        ----------
        workspace
            That the call uses.
        due
            Credits, by slot residue: words of this rank, and epochs of earlier calls to wait for.
        stream
            The caller's.

        Returns
        -------
        Launch or None
            What runs first in every call and has waited for the credits; None where the Program's
            own waits do that.
        """
        return None

    def raise_if_failed(self) -> None:
        """Raise what has failed out of sight of the host, on a device or on another rank.

        Raises
        ------
        RunFailed
            The first failure (`WaitTimeout`, `PeerLost`).
        """
        return

    def raise_if_noted(self) -> None:
        """Raise the first failure that has been found already; looks nowhere, so costs nothing.

        Raises
        ------
        RunFailed
            As `raise_if_failed`.
        """
        return

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Tell all ranks to give up; every wait of theirs then raises `PeerLost`."""

    @abstractmethod
    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what every rank said, by rank: small messages (JSON), for set-up and reports."""

    @abstractmethod
    def barrier(self) -> None:
        """Hold this thread until every rank is here; for set-up and measurements only."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; a second call does nothing."""
