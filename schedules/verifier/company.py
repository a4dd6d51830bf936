"""What a call makes of what earlier calls, which may be another schedule's, left in its slot.

Looked at last, since a Program by itself may be right where it is not in company: its own last use
of the slot left what it counts on.  Arrival words hold at most the number of the call, since every
schedule signals at most its call plus the slots; and memory holds anything.
"""

from __future__ import annotations

from stretto.schedules.language import in_slot
from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.patches import Corners, outside
from stretto.schedules.verifier.report import Reporter
from stretto.schedules.verifier.world import NEVER, Access

__all__ = ["find_foreign_reads", "find_foreign_words"]


def find_foreign_words(order: Order, report: Reporter) -> None:
    """Report arrivals whose values others may mistake, and waits that theirs may pass."""
    world = order.world
    for event, (number, value) in world.fired.items():
        if world.flags.purpose[number] != "arrival" or not order.executed(event):
            continue
        site = world.site[event]
        call, slots = world.call_of(site), world.program_of(site).slots
        if not call < value <= call + slots:
            report.add(
                "no_credit",
                f"{report.subject(site)} signals {report.word(number)} to {value} in call {call}: "
                f"the slot's next use, which may be another schedule's, takes any value above "
                f"{call + slots} for an arrival of its own.",
                missing=f"a value from {call + 1} to {call + slots}",
                places=(report.place(site, "signal"),),
                goals=(event,),
            )
    for event, awaited in world.awaited.items():
        site = world.site[event]
        call = world.call_of(site)
        for number, expected in awaited:
            if world.flags.purpose[number] != "arrival" or not order.executed(event):
                continue
            word = world.flags.word(number)
            foreign = word.slot != call % world.flags.flag[word.flag].slots
            if expected <= call or foreign:
                report.add(
                    "no_credit",
                    f"{report.subject(site)} waits in call {call} for {report.word(number)} to "
                    f"reach {expected}: another call, which may be another schedule's, may have "
                    "left that or may never do so.",
                    missing=f"a wait for more than {call} in the call's own slot",
                    places=(report.place(site, "wait"),),
                    goals=(event,),
                )


def find_foreign_reads(order: Order, report: Reporter) -> None:
    """Report reads of a slot that no write of the same call comes before, byte by byte.

    What is there is what another call left: the Program's own last one, or another's.
    """
    world = order.world
    written: dict[tuple[int, int], list[Access]] = {}
    accesses = [
        access
        for access in world.accesses
        if order.executed(access.start)
        and world.sites[access.site].operation is not None
        and in_slot(world.program_of(access.site).buffer[access.buffer])
    ]
    for access in accesses:
        if access.mode == "write":
            key = (world.sites[access.site].turn, access.storage)
            written.setdefault(key, []).append(access)
    for access in accesses:
        if access.mode == "write":
            continue
        key = (world.sites[access.site].turn, access.storage)
        missing: list[Corners] = [(access.row, access.row_stop, access.column, access.column_stop)]
        for write in written.get(key, ()):
            if not missing:
                break
            same = write.buffer == access.buffer and write.finish != NEVER
            if same and order.before(write.finish, access.start):
                hole = (write.row, write.row_stop, write.column, write.column_stop)
                missing = [rest for one in missing for rest in outside(one, hole)]
        if missing:
            place = report.touched(access)
            report.add(
                "unwritten",
                f"{report.subject(access.site)} reads {report.rectangle(access)}, part of which "
                "this call does not write before: another schedule may have used the slot last.",
                missing="a write of these bytes in the same call, ordered before the read",
                places=(place,),
                goals=(access.start,),
                open=(access.site,),
            )
