"""Schedules that take turns with a mutant, to show what it does to others.

Unlike an all-gather, they let ranks run ahead of each other; all keep the workspace's contract.
"""

from __future__ import annotations

from stretto.schedules.ag_gemm import AllGatherGemm
from stretto.schedules.language import Extent, Peer, Program, RankBuilder

__all__ = ["Broadcast", "Neighbour", "Relay", "Staged", "source_of"]


class Neighbour(AllGatherGemm):
    """Every rank multiplies its neighbour's rows alone: it hears from one rank, writes to another.

    Unlike in an all-gather, a rank can be any number of calls ahead of the one it writes to, which
    makes it a good partner for showing what a missing credit or release does.
    """

    variant, computes = "neighbour", "neighbour_gemm"

    def enqueue(self, rank: RankBuilder) -> None:
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        gathered = rank.workspace("gathered", rows=self.m, columns=self.k)
        compute, send, receive = rank.streams("compute", "send", "receive")
        rank.put(x[rank], to=rank + 1, into=gathered[rank + 0], on=send)
        compute.after(rank.wait(gathered[rank - 1], on=receive))
        rank.fill(y, on=compute)
        rank.gemm(gathered[rank - 1], w, y[rank - 1], on=compute)


class Relay(AllGatherGemm):
    """Rows go on from neighbour to neighbour once; only the forwarding stream knows when."""

    variant, computes = "relay", "relay_gemm"

    def enqueue(self, rank: RankBuilder) -> None:
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        gathered = rank.workspace("gathered", rows=self.m, columns=self.k)
        compute, send, receive = rank.streams("compute", "send", "receive")
        rank.put(x[rank], to=rank + 1, into=gathered[rank + 0], on=send)
        send.after(rank.wait(gathered[rank - 1], on=receive))
        rank.put(gathered[rank - 1], to=rank + 1, into=gathered[rank - 1], on=send)
        compute.after(rank.wait(gathered[rank - 2], on=receive))
        rank.fill(y, on=compute)
        rank.gemm(gathered[rank - 2], w, y[rank - 2], on=compute)


class Staged(Neighbour):
    """The same as `Neighbour`, but what is sent is a copy: the caller's stream waits for no put."""

    variant = "staged"

    def enqueue(self, rank: RankBuilder) -> None:
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        gathered = rank.workspace("gathered", rows=self.m, columns=self.k)
        staging = rank.scratch("staging", rows=Extent(self.m, "shard"), columns=self.k)
        compute, send, receive = rank.streams("compute", "send", "receive")
        rank.copy(x[rank], staging[rank], on=send)
        rank.put(staging[rank], to=rank + 1, into=gathered[rank + 0], on=send)
        compute.after(rank.wait(gathered[rank - 1], on=receive))
        rank.fill(y, on=compute)
        rank.gemm(gathered[rank - 1], w, y[rank - 1], on=compute)


class Broadcast(AllGatherGemm):
    """One rank sends its rows to all others and waits for nobody."""

    variant, computes = "broadcast", "broadcast_gemm"

    def enqueue(self, rank: RankBuilder) -> None:
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        gathered = rank.workspace("gathered", rows=self.m, columns=self.k)
        compute, send, receive = rank.streams("compute", "send", "receive")
        root = Peer(self.world_size - 1, absolute=True)
        rank.fill(y, on=compute)
        if rank.index == root.offset:
            for step in rank.steps():
                rank.put(x[rank], to=rank + step, into=gathered[root], on=send)
            rank.gemm(x[rank], w, y[root], on=compute)
        else:
            compute.after(rank.wait(gathered[root], on=receive))
            rank.gemm(gathered[root], w, y[root], on=compute)


def source_of(program: Program, rank: int) -> int:
    """Return whose rows one of these schedules multiplies on a rank."""
    if program.computes == Broadcast.computes:
        return program.world_size - 1
    hops = 2 if program.computes == Relay.computes else 1
    return (rank - hops) % program.world_size
