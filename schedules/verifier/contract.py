"""The workspace's protocol: what a Program owes to whatever is called before and after it.

No Program can be checked against all others that may take turns with it; but if every one keeps the
protocol, any sequence of them is safe: `stretto.schedules.language.workspace` says what it is, and
why it is enough.  Here each call is held against it: credit, release, turn and slot.  What a call
makes of what others leave in its slot is asked in `company`.

To have seen a put that needed the release is no turn: it says that the word of one rank was set,
while the same signal may still be on its way to another, or to the own one.

What lies in no slot, and flags of a Program's own, are looked at elsewhere (`sharing`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from stretto.schedules.language import RELEASED, Word, in_slot
from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.report import Reporter
from stretto.schedules.verifier.world import BEGIN, END, NEVER, Access, Site

__all__ = ["find_breaches"]


@dataclass
class _Use:
    """What one call does about one rank's slot.

    Attributes
    ----------
    accesses
        To the slot, by any rank.
    signals, waits
        Of arrivals there.
    releases
        Signals of this rank's release, with the homes and values of their words.
    """

    accesses: list[Access] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    releases: list[tuple[int, int, int]] = field(default_factory=list)


def find_breaches(order: Order, report: Reporter) -> None:
    """Report where a Program does not keep the protocol."""
    _Contract(order, report).check()


class _Contract:
    def __init__(self, order: Order, report: Reporter) -> None:
        self.order, self.report, self.world = order, report, order.world
        self._words: dict[int, Word] = {}
        self._uses: dict[tuple[int, int], _Use] = {}
        # Waits for release: by call, waiting rank and released rank.
        self._credits: dict[tuple[int, int, int], list[tuple[int, int]]] = {}

    def check(self) -> None:
        """Look at every call and rank."""
        world = self.world
        for number, turn in enumerate(world.turns):
            if world.programs[turn.program].release is not None:
                for rank in range(world.world_size):
                    self._uses[number, rank] = _Use()
        self._gather()
        for (turn_number, owner), use in self._uses.items():
            self._check_writers(turn_number, owner, use)
            self._check_release(turn_number, owner, use)
        self._check_unreleased()

    # ---- who does what -----------------------------------------------------------------------

    def _gather(self) -> None:
        world, order = self.world, self.order
        for access in world.accesses:
            if not order.executed(access.start):
                continue
            _, owner, _ = world.storages[access.storage]
            use = self._uses.get((world.sites[access.site].turn, owner))
            buffer = world.program_of(access.site).buffer[access.buffer]
            if use is not None and in_slot(buffer):
                use.accesses.append(access)
        for event, (number, value) in world.fired.items():
            if order.executed(event) and world.flags.purpose[number] != "own":
                self._gather_signal(event, number, value)
        for event, awaited in world.awaited.items():
            if order.executed(event):
                for number, expected in awaited:
                    if world.flags.purpose[number] != "own":
                        self._gather_wait(event, number, expected)

    def _gather_signal(self, event: int, number: int, value: int) -> None:
        world, word = self.world, self._word(number)
        site = world.sites[world.site[event]]
        if not self._of_the_call(site, word):
            self._report_slot(event, number)
            return
        if world.flags.purpose[number] == "release":
            if word.position != site.rank:
                self.report.add(
                    "early_release",
                    f"{self._who(world.site[event])} sets {self.report.word(number)}, which is for "
                    f"rank {word.position} alone to set: its slot may still be in use.",
                    missing=f"nothing: only rank {word.position} gives its slot back",
                    places=(self.report.place(world.site[event], "signal"),),
                    goals=(event,),
                )
                return
            self._uses[site.turn, site.rank].releases.append((event, word.home, value))
            return
        use = self._uses.get((site.turn, word.home))
        if use is not None:
            use.signals.append(event)

    def _gather_wait(self, event: int, number: int, expected: int) -> None:
        world, word = self.world, self._word(number)
        site = world.sites[world.site[event]]
        if world.flags.purpose[number] == "release":
            if self._of_the_call(site, word):
                key = (site.turn, site.rank, word.position)
                self._credits.setdefault(key, []).append((event, expected))
            return
        use = self._uses.get((site.turn, site.rank))
        if use is not None:
            use.waits.append(event)

    def _report_slot(self, event: int, number: int) -> None:
        site = self.world.site[event]
        self.report.add(
            "no_credit",
            f"{self._who(site)} signals {self.report.word(number)}, which is not the slot of call "
            f"{self.world.call_of(site)}: that one is in use by another call, which may be another "
            "schedule's.",
            missing="a word of the call's own slot",
            places=(self.report.place(site, "signal"),),
            goals=(event,),
        )

    def _of_the_call(self, site: Site, word: Word) -> bool:
        """Whether the word is that of the call's own slot."""
        return (
            word.slot == self.world.turns[site.turn].call % self.world.flags.flag[word.flag].slots
        )

    def _word(self, number: int) -> Word:
        word = self._words.get(number)
        if word is None:
            word = self._words[number] = self.world.flags.word(number)
        return word

    # ---- 1: credit ---------------------------------------------------------------------------

    def _check_writers(self, turn: int, owner: int, use: _Use) -> None:
        world, report = self.world, self.report
        call = world.turns[turn].call
        slots = world.programs[world.turns[turn].program].slots
        needed = call + 1 - slots
        for access in use.accesses:
            _, _, slot = world.storages[access.storage]
            timely = slot == call % slots
            if timely and (
                access.mode == "read"
                or self._credited(turn, access.site, owner, needed, access.start)
            ):
                continue
            verb = "may read" if access.mode == "read" else "may write"
            when = (
                f"before rank {owner} has given it back: another schedule may have used it just "
                "before"
                if timely
                else f"in call {call}, whose slot is another: it may be in use by another schedule"
            )
            report.add(
                "no_credit",
                f"{self._who(access.site)} {verb} {report.rectangle(access)} {when}.",
                missing=f"a wait of rank {world.sites[access.site].rank} for "
                f"'{RELEASED}'[{owner}] to reach {needed} in call {call}, "
                f"before {report.full(access.site)}"
                if timely
                else "an access to the call's own slot",
                places=(report.touched(access),),
                goals=(access.start,),
                open=(access.site,),
            )
        for event in use.signals:
            site = world.site[event]
            if not self._credited(turn, site, owner, needed, event):
                report.add(
                    "no_credit",
                    f"{self._who(site)} may signal {report.word(world.fired[event][0])} "
                    f"before rank {owner} has given its slot back: another schedule "
                    "may still await the word.",
                    missing=f"a wait of rank {world.sites[site].rank} for "
                    f"'{RELEASED}'[{owner}] to reach {needed} in call {call}, before "
                    f"{report.full(site)}",
                    places=(report.place(site, "signal"),),
                    goals=(event,),
                    open=(site,),
                )

    def _credited(self, turn: int, site: int, owner: int, needed: int, event: int) -> bool:
        own = self.world.sites[site].rank
        others = (rank for rank in range(self.world.world_size) if rank != own)
        return any(
            expected >= needed and self.order.before(wait, event)
            for rank in (own, *others)
            for wait, expected in self._credits.get((turn, rank, owner), ())
        )

    # ---- 2 and 3: release, in turn -----------------------------------------------------------

    def _check_release(self, turn: int, rank: int, use: _Use) -> None:
        world, order, report = self.world, self.order, self.report
        call = world.turns[turn].call
        slots = world.programs[world.turns[turn].program].slots
        homes = [home for _, home, _ in use.releases]
        absent = sorted(set(range(world.world_size)) - set(homes))
        if absent:
            report.add(
                "early_release",
                f"Rank {rank} does not give its slot back to rank "
                f"{', '.join(map(str, absent))} in call {call}: a later call waits for that.",
                missing=f"a signal of '{RELEASED}'[{rank}] on every rank",
                like="absent",
            )
            return
        first = min(use.releases, key=lambda one: order.run.rank_of[one[0]])[0]
        site = world.site[first]
        wrong = [value for _, _, value in use.releases if not call < value <= call + slots]
        if wrong or len(homes) > world.world_size:
            report.add(
                "early_release",
                f"{self._who(site)} releases its slot "
                + (f"to epoch {wrong[0]}, not {call + 1}" if wrong else "twice in one call")
                + ": a later call may take it for the release of another.",
                missing=f"one signal of epoch {call + 1} to every rank",
                places=(report.place(site, "signal"),),
            )
        for start, event, what in self._last_uses(use):
            if event == NEVER or not order.before(event, first):
                self._report_early(site, what, first, (start, event))
        last = next(event for event, home, _ in use.releases if home == rank)
        needed = call + 1 - slots
        turns = self._credits.get((turn, rank, rank), ())
        if not any(expected >= needed and order.before(wait, first) for wait, expected in turns):
            report.add(
                "no_turn",
                f"{self._who(site)} may release its slot before this rank's last release of it has "
                "reached every rank, if that is another schedule's on another stream: the epoch "
                "would go back.",
                missing=f"a wait of rank {rank} for '{RELEASED}'[{rank}] to reach {needed}, "
                f"before {report.full(site)}",
                places=(report.place(site, "signal"),),
                goals=(first,),
            )
        elif not all(order.before(event, last) for event, _, _ in use.releases):
            report.add(
                "no_turn",
                f"{self._who(site)} sets rank {rank}'s own word of '{RELEASED}' before that "
                "of another rank: the next call's release may overtake this one's.",
                missing="the own word last",
                places=(report.place(site, "signal"),),
                goals=(first,),
            )

    def _last_uses(self, use: _Use) -> Iterator[tuple[int, int, str]]:
        """Yield what must be over before the slot is given back: begin, end, how to say so."""
        report, world = self.report, self.world
        for access in use.accesses:
            verb = "read" if access.mode == "read" else "written"
            yield (
                access.start,
                access.finish,
                f"{report.operation(access.site)} has {verb} {report.rectangle(access)}",
            )
        for event in use.waits:
            yield event, event, f"{report.operation(world.site[event])} has seen its signal"
        for event in use.signals:
            word = report.word(world.fired[event][0])
            begin, by = world.first[world.site[event]], report.operation(world.site[event])
            yield begin, event, f"{by} has signalled {word}"

    def _report_early(self, site: int, what: str, release: int, use: tuple[int, int]) -> None:
        """Report a release; `use` is the first and the last event of what it does not wait for."""
        self.report.add(
            "early_release",
            f"{self._who(site)} may give its slot back before {what}: another schedule may use it "
            "next.",
            missing=f"an edge from that to {self.report.full(site)}",
            places=(self.report.place(site, "signal"),),
            goals=(release, use[0]),
            held=[event for event in use[1:] if event != NEVER],
            open=[self.world.site[use[0]]],
        )

    # ---- Programs that give nothing back -----------------------------------------------------

    def _check_unreleased(self) -> None:
        """Hold a slot that is not given back against the caller's stream of its own rank."""
        world, order = self.world, self.order
        bounds: dict[tuple[int, int], dict[str, int]] = {}
        for number, site in enumerate(world.sites):
            if site.operation is None:
                bounds.setdefault((site.turn, site.rank), {})[site.name] = world.first[number]
        for access in world.accesses:
            program, site = world.program_of(access.site), world.sites[access.site]
            if program.release is not None or not in_slot(program.buffer[access.buffer]):
                continue
            if site.operation is None or not order.executed(access.start):
                continue
            _, owner, slot = world.storages[access.storage]
            within = bounds[site.turn, owner]
            if (
                slot == world.turns[site.turn].call % program.slots
                and owner == site.rank
                and access.finish != NEVER
                and order.before(within[BEGIN], access.start)
                and order.before(access.finish, within[END])
            ):
                continue
            self.report.add(
                "no_credit",
                f"{self._who(access.site)} touches {self.report.rectangle(access)}, which is not "
                "given back, outside of the call's time on the caller's stream of that rank: "
                "another schedule may use it then.",
                missing="a credit before it and a release after it, or an order with the caller's "
                "stream",
                places=(self.report.touched(access),),
                goals=(access.start,),
                open=(access.site,),
            )

    def _who(self, site: int) -> str:
        return self.report.subject(site)
