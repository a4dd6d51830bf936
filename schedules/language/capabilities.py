"""What a transport can do, as a value that a schedule is built against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ALL_COLLECTIVES", "ALL_VERBS", "Capabilities", "CollectiveKind", "KernelAccess", "Verb"]

Verb = Literal["put", "signal", "wait", "collective"]
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce"]
KernelAccess = Literal["load", "store", "multimem_reduce"]

ALL_VERBS: tuple[Verb, ...] = ("put", "signal", "wait", "collective")
ALL_COLLECTIVES: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one transport offers; a schedule that needs more is refused when it is built.

    Attributes
    ----------
    transport
        The backend's name, as on the command line.
    verbs
        Which of put, signal, wait and collective exist.
    collectives
        Which kinds the collective verb knows.
    signal_orders_puts
        A signal is seen only after every put that the same stream enqueued before it.
    verbs_on_sm
        Verbs that occupy a streaming multiprocessor while they run (they can be delayed by a
        kernel that holds every SM, and they slow compute down).
    verbs_that_block
        Verbs after which the stream does not go on until another rank has acted.
    kernel_access
        What a kernel may do with a peer's symmetric memory.
    gemm_outputs
        Pairs of dtypes, operands and output, of GEMMs that store another dtype than they read.
    largest_message_bytes
        The largest single put or collective; None is no limit.
    alignment_bytes
        Address and row size of a put are multiples of this.
    """

    transport: str
    verbs: tuple[Verb, ...] = ()
    collectives: tuple[CollectiveKind, ...] = ()
    signal_orders_puts: bool = False
    verbs_on_sm: tuple[Verb, ...] = ()
    verbs_that_block: tuple[Verb, ...] = ("wait", "collective")
    kernel_access: tuple[KernelAccess, ...] = ()
    gemm_outputs: tuple[tuple[str, str], ...] = ()
    largest_message_bytes: int | None = None
    alignment_bytes: int = 1

    def lacks(self, verb: Verb, kind: CollectiveKind | None = None) -> str | None:
        """Say why `verb` (for a collective, of `kind`) cannot be used, or None if it can."""
        if verb not in self.verbs:
            return f"transport {self.transport!r} has no {verb}"
        if verb == "collective" and kind is not None and kind not in self.collectives:
            offered = ", ".join(self.collectives) or "none"
            return f"transport {self.transport!r} has no {kind} (it offers {offered})"
        return None
