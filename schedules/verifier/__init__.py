"""The verifier: proves a Program free of races, deadlocks and unsafe reuse, or shows otherwise.

::

    Programs --unroll--> events, lanes, accesses --order--> what must precede what
                                                              |
        conflicts   races, and slots that are written while in use
        contract    what schedules owe each other that take turns on a workspace
        progress    deadlocks, ambiguous signals; lost: epochs that are set back
        residency   kernels that wait on all multiprocessors, tiles that wait for tiles behind them
        meaning     bytes nobody wrote, outputs that are not what the Program says it computes
                                                              |
                                     findings, counterexample, verdict

What is proved
--------------
If a Program is safe, then in every run that the language allows, however fast or slow any stream
of any rank is, any number of calls back to back come to their end, no two operations touch the same
bytes in an order that is open, nothing is read that was not written, and outputs hold what
`Program.computes` says (where that is known, see `formulas`).  It also keeps the workspace's
contract, so that the same holds when it takes turns with any others that do.  `examine` argues why
a few calls are enough, `order` why what must precede what is exact.

The proof rests on the transport doing what the language says of its verbs, on collectives writing
no rank's destination before that rank has come to them, and on kernels touching what they state.

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
