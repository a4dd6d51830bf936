"""The verifier: proves a Program free of races, deadlocks and unsafe reuse, or shows otherwise.

::

    Programs --calls--> turns --unroll--> events, lanes, accesses --play, order--> what comes first
                                                                                   |
        conflicts    races, and slots that are written while in use
        progress     deadlocks
        signals      words of which it is open who sets or takes them; lost: epochs set back
        collectives  ranks that do not issue the same ones
        residency    kernels that wait on all multiprocessors, tiles that wait for tiles behind them
        contract     what schedules owe each other that take turns on a workspace (`sharing`)
        meaning      bytes nobody wrote, outputs that are not what the Program says it computes
                                                                                   |
                                                    findings, counterexample, verdict

What is proved
--------------
If a Program is safe, then in every run that the language allows, however fast or slow any stream
of any rank is, any number of calls back to back come to their end, no two operations touch the same
bytes in an order that is open, nothing is read that was not written, and outputs hold what
`Program.computes` says (where that is known, see `formulas`).  It also keeps the workspace's
contract, so that the same holds when it takes turns with any others that do, unless they use what
`Verdict.unshared` names.  `calls` argues why a few calls are enough, `order` why what must precede
what is exact.

What is assumed
---------------
* The transport does what the language says of its verbs: a signal is seen after the puts that its
  stream enqueued before it (if the capabilities say so), puts of a stream land in their order, and
  collectives write no rank's destination before that rank has come to them.
* Kernels touch what they state; functions with a name depend on their operands alone.
* The streams of a Program stay the same queues from call to call (`fresh_streams` does without),
  those of different Programs are different ones but for the caller's.
* Epochs that are compared lie less than 2^31 apart.
* One workspace has one use count: every call on it counts, on all ranks in the same order.

The module `explorer` is an independent judge of tiny Programs, `mutants` makes small mistakes to be
found, `traces` holds a recorded run against its Program.
"""

from __future__ import annotations

from stretto.schedules.verifier.admission import verified
from stretto.schedules.verifier.checker import verify
from stretto.schedules.verifier.traces import check_timeline
from stretto.schedules.verifier.verdict import Finding, Place, Redundant, Verdict

__all__ = [
    "Finding",
    "Place",
    "Redundant",
    "Verdict",
    "check_timeline",
    "verified",
    "verify",
]
