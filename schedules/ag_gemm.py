"""All-gather GEMM: ``y[m, n] = all_gather(x)[m, k] @ w[n, k].T`` on every rank.

Every rank holds a block of ``m_local = ceil(m / tp)`` rows of x and its own w; every rank needs all
rows.  The variants differ in who pushes what to whom, and when::

    ring     send      |x to +1 |  |r-1 to +1|  |r-2 to +1|        each rank forwards what came
             compute   | gemm r ||gemm r-1||gemm r-2||gemm r-3|

    direct   send      |x to +1 |  |x to +2 |  |x to +3 |          own rows only, one peer a step
             compute   | gemm r ||gemm r-1||gemm r-2||gemm r-3|

    eager    send      |x to +1 ||x to +2 ||x to +3 |              the same, without waiting
             compute   | gemm r ||gemm r-1||gemm r-2||gemm r-3|

    unfused  compute   |     all_gather     ||       gemm        | the baseline

A wait for rows that are to be forwarded, or that hold back the next push, is on a stream of its
own, so that a GEMM never delays the forwarding of rows that have already come.  A wait that only a
GEMM needs is on the compute stream.  Where a wait is a kernel it must not poll beside a GEMM
without need: it takes one multiprocessor, and a GEMM with one block on each then runs in two waves
instead of one (two H200, m = 2048 x 6288 x 7168: 219 us instead of 125, recorded in
figures/data/wait_beside_gemm_h200_x2.json).

Rejected: all waits on the compute stream (one stream less, but step s + 1 is forwarded only after
the GEMM of step s - 1); a GEMM enqueued before the push beside it (the push's kernels, if it has
any, then wait for a multiprocessor); an exit barrier (slots and credits make calls safe without).
"""

from __future__ import annotations

from stretto.schedules.language import Buffer, Extent, RankBuilder, Schedule

__all__ = [
    "AllGatherGemm",
    "DirectAllGatherGemm",
    "EagerAllGatherGemm",
    "RingAllGatherGemm",
    "UnfusedAllGatherGemm",
]


class AllGatherGemm(Schedule):
    """What all variants share: the buffers of the caller, and the workspace.

    ``x`` is this rank's block of the [m, k] input, ``w`` this rank's [n, k] weight, ``y`` the
    [m, n] output of all rows.
    """

    name = "ag-gemm"
    computes = "all_gather_gemm"

    def declare(self) -> tuple[Buffer, ...]:
        rows, columns = Extent(self.m, "shard"), Extent(self.k)
        return (
            Buffer("x", "input", self.dtype, rows, columns, initial="caller"),
            Buffer(
                "w", "weight", self.dtype, Extent(self.n), columns, initial="caller", reuse="never"
            ),
            Buffer("y", "output", self.dtype, Extent(self.m), Extent(self.n)),
        )


class RingAllGatherGemm(AllGatherGemm):
    """Each rank forwards what it received to its neighbour."""

    variant = "ring"

    def enqueue(self, rank: RankBuilder) -> None:
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        gathered = rank.workspace("gathered", rows=self.m, columns=self.k)
        compute, send, receive = rank.streams("compute", "send", "receive")
        held = x[rank]  # the rows to multiply, and to pass on, next
        for step in rank.steps():
            source = rank - step  # whose rows arrive in this step
            rank.put(held, to=rank + 1, into=gathered[source + 1], on=send)
            forwards = step < self.world_size - 1
            if forwards:
                arrival = rank.wait(gathered[source], on=receive)
                send.after(arrival)
            rank.gemm(held, w, y[source + 1], on=compute)
            if forwards:
                compute.after(arrival)
            else:
                rank.wait(gathered[source], on=compute)
            held = gathered[source]
        rank.gemm(held, w, y[rank + 1], on=compute)


class DirectAllGatherGemm(AllGatherGemm):
    """Each rank pushes its own shard to rank + 1, rank + 2, ..., one round at a time."""

    variant = "direct"

    def enqueue(self, rank: RankBuilder) -> None:
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        gathered = rank.workspace("gathered", rows=self.m, columns=self.k)
        compute, send, receive = rank.streams("compute", "send", "receive")
        held = x[rank]
        for step in rank.steps():
            source = rank - step
            rank.put(x[rank], to=rank + step, into=gathered[rank + 0], on=send)
            pushes_on = step < self.world_size - 1
            if pushes_on:  # the next push only after this round's shard
                arrival = rank.wait(gathered[source], on=receive)
                send.after(arrival)
            rank.gemm(held, w, y[source + 1], on=compute)
            if pushes_on:
                compute.after(arrival)
            else:
                rank.wait(gathered[source], on=compute)
            held = gathered[source]
        rank.gemm(held, w, y[rank + 1], on=compute)


class EagerAllGatherGemm(AllGatherGemm):
    """Each rank pushes its own shard to all others without waiting in between."""

    variant = "eager"

    def enqueue(self, rank: RankBuilder) -> None:
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        gathered = rank.workspace("gathered", rows=self.m, columns=self.k)
        compute, send = rank.streams("compute", "send")
        for step in rank.steps():
            rank.put(x[rank], to=rank + step, into=gathered[rank + 0], on=send)
        rank.gemm(x[rank], w, y[rank], on=compute)
        for step in rank.steps():
            source = rank - step
            rank.wait(gathered[source], on=compute)
            rank.gemm(gathered[source], w, y[source], on=compute)


class UnfusedAllGatherGemm(AllGatherGemm):
    """The baseline: the library's all-gather, then one GEMM over all rows."""

    variant = "unfused"

    def enqueue(self, rank: RankBuilder) -> None:
        x, w, y = rank.input("x"), rank.weight("w"), rank.output("y")
        (compute,) = rank.streams("compute")
        if self.world_size == 1:
            rank.gemm(x[rank], w, y, on=compute)
            return
        gathered = rank.workspace("gathered", rows=self.m, columns=self.k)
        rank.collective("all_gather", x[rank], gathered, on=compute)
        rank.gemm(gathered, w, y, on=compute)
