"""The published ring all-gather GEMM: mailbox flags of depth one, no exit barrier.

The design is that of vLLM pull request 54151: copy engines push rows to the next rank, one step
after the other, and a step's rows are announced by ``put_signal(next, channel)`` and awaited by
``wait_signal(previous, channel)``, where a channel is a flag that holds 0 or 1.  There is one
gathered buffer and no barrier at the end of a call: the design relies on another collective between
two calls.  How much it relies on it is shown by two Programs, which differ in nothing else::

    PublishedRing                   the ring alone, called back to back
    PublishedRingThenAllReduce      an all-reduce of another layer follows in every call

`verify` proves the second one safe at any TP, and refutes the first: nothing holds a rank back from
its next call while its neighbour still multiplies the rows of this one.  At TP 2::

    Rank 1's put0 of call 1 may overwrite rows 2 to 3 of 'gathered' on rank 0 before rank 0's gemm1
    of call 0 has read them.

    rank 0   compute   |gemm0||       gemm1, reads rows 2 to 3 .....|
             send      |put0 |
             receive   [wait0]
    rank 1   compute   |gemm0||gemm1|
             send      |put0 |         |  put0 of call 1, writes them|
             receive         [wait0]

The mailbox does not help: it was emptied by ``wait0``, so the next signal goes through; and it
comes after the data in any case.  An all-reduce on the caller's stream does: the first put reads
the input, so it follows the caller's work, and that comes after every rank has multiplied.  For
that reason the schedules that are shipped have slots and credits instead (`ag_gemm`), which hold
between any two calls, whatever lies between them.
"""

from __future__ import annotations

from stretto.schedules.ag_gemm import AllGatherGemm
from stretto.schedules.language import (
    Buffer,
    BufferHandle,
    Epoch,
    Extent,
    Flag,
    Peer,
    Put,
    RankBuilder,
    Tags,
    Wait,
)

__all__ = ["PublishedRing", "PublishedRingThenAllReduce"]

FULL = Epoch(0, 1)
"""What a signal leaves in a mailbox."""


class PublishedRing(AllGatherGemm):
    """The ring alone: unsafe when it is called twice with nothing in between."""

    variant = "published-ring"

    def declare(self) -> tuple[Buffer, ...]:
        return (*super().declare(), self._gathered)

    def enqueue(self, rank: RankBuilder) -> None:
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        gathered = BufferHandle(self._gathered)
        channel = rank.flag(Flag("channel", "mailbox", count=max(1, self.world_size - 1)))
        compute, send, receive = rank.streams("compute", "send", "receive")
        held, following = x[rank], Peer(1).within(self.world_size)
        rank.gemm(x[rank], w, y[rank], on=compute)
        for step in rank.steps():
            source = (rank - step).within(self.world_size)
            sent = (source + 1).within(self.world_size)
            rank.operation(
                Put(
                    id=f"put{step - 1}",
                    stream=send.name,
                    source=held.view(),
                    destination=gathered[sent].view(on=following),
                    signal=channel.word(step - 1, on=following),
                    value=FULL,
                    tags=Tags(step=step, shard=sent),
                )
            )
            arrival = rank.operation(
                Wait(
                    id=f"wait{step - 1}",
                    stream=receive.name,
                    words=(channel.word(step - 1),),
                    value=FULL,
                    tags=Tags(step=step, shard=source),
                )
            )
            send.after(arrival)
            compute.after(arrival)
            rank.gemm(gathered[source], w, y[source], on=compute)
            held = gathered[source]

    @property
    def _gathered(self) -> Buffer:
        """One slot, which nobody gives back."""
        rows, columns = Extent(self.m, "padded"), Extent(self.k)
        return Buffer("gathered", "workspace", self.dtype, rows, columns, kind="symmetric")


class PublishedRingThenAllReduce(PublishedRing):
    """The ring, and an all-reduce of another layer between two calls of it: safe."""

    variant = "published-ring-then-all-reduce"

    def declare(self) -> tuple[Buffer, ...]:
        rows, columns = Extent(self.m), Extent(self.n)
        return (
            *super().declare(),
            Buffer("partial", "input", self.dtype, rows, columns, initial="caller"),
            Buffer("total", "output", self.dtype, rows, columns),
        )

    def enqueue(self, rank: RankBuilder) -> None:
        super().enqueue(rank)
        (compute,) = rank.streams("compute")
        rank.collective("all_reduce", rank.input("partial"), rank.output("total"), on=compute)
