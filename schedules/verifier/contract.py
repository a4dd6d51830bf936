"""The workspace's contract: what a Program owes to whatever is called before and after it.

Different schedules take turns on one workspace with no barrier in between.  No Program can be
checked against all others; but if every one keeps the following, any sequence of them is safe.  In
call c, for every buffer that is reused on release, with s slots:

1. *Credit.*  A rank writes rank q's slot, or signals a word of the buffer there, only after some
   rank has waited, in the same call, for its word ``<buffer>.released[q]`` to reach c + 1 - s.
2. *Release.*  Rank r sets its word on every rank to c + 1 (or more, but less than the slot's next
   release), once, after its slot's last use: every access of its own and every landing in it is
   over, and every signal of it has been awaited.
3. *Turn.*  It does so after the same wait for its own word, and sets its own word last.  So
   released epochs only grow, whichever streams they are set on.

Every word is that of the call's slot, so that each slot is a domain of its own: the buffer's other
flags have its slots, too.  By 3, a credit follows the release of call c - s and of all calls before
on that slot; by 2, it follows all use of the slot in these; by 1, nothing touches the slot sooner.

To have seen a put that needed the release is no turn: it says that the word of one rank was set,
while the same signal may still be on its way to another, or to the own one.

The contract is about buffers that are given back, and the flags named after them; what else a
schedule uses is its own (`sharing`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from stretto.schedules.language import Word
from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.report import Reporter
from stretto.schedules.verifier.sharing import given_back
from stretto.schedules.verifier.world import NEVER, Access, Site

__all__ = ["find_breaches"]


@dataclass
class _Use:
    """What one call does about one rank's slot of one buffer.

    Attributes
    ----------
    accesses
        To the slot, by whomever.
    signals, waits
        Of the buffer's words at home there, other than those of release.
    releases
        Signals of this rank's release, with the homes and values of their words.
    """

    accesses: list[Access] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    releases: list[tuple[int, int, int]] = field(default_factory=list)


def find_breaches(order: Order, report: Reporter) -> None:
    """Report where a Program does not keep the contract."""
    _Contract(order, report).check()


class _Contract:
    def __init__(self, order: Order, report: Reporter) -> None:
        self.order, self.report, self.world = order, report, order.world
        self._words: dict[int, Word] = {}
        self._uses: dict[tuple[int, str, int], _Use] = {}
        # Waits for release: by call, waiting rank, buffer and released rank.
        self._credits: dict[tuple[int, int, str, int], list[tuple[int, int]]] = {}

    def check(self) -> None:
        """Look at every call, buffer and rank."""
        world = self.world
        kept = {
            (number, name): world.programs[turn.program].buffer[name].slots
            for number, turn in enumerate(world.turns)
            for name in given_back(world.programs[turn.program])
        }
        if not kept:
            return
        self._check_flags()
        self._gather(kept)
        for (turn, buffer, owner), use in self._uses.items():
            self._check_writers(turn, buffer, owner, kept[turn, buffer], use)
            self._check_release(turn, buffer, owner, use)

    def _check_flags(self) -> None:
        """Look for flags whose words serve several slots, so that calls may mistake signals."""
        for program in self.world.programs:
            for flag in program.flags:
                name, _, kind = flag.name.rpartition(".")
                slots = program.buffer[name].slots if name in given_back(program) else flag.slots
                if kind != "released" and flag.slots != slots:
                    self.report.add(
                        "no_credit",
                        f"Flag {flag.name!r} has {flag.slots} slots, its buffer has {slots}: a "
                        "call may take another's signal for its own, if that is another "
                        "schedule's.",
                        missing=f"{slots} slots of {flag.name!r}",
                    )

    # ---- who does what -----------------------------------------------------------------------

    def _gather(self, kept: dict[tuple[int, str], int]) -> None:
        world = self.world
        for number, buffer in kept:
            for rank in range(world.world_size):
                self._uses[number, buffer, rank] = _Use()
        for access in world.accesses:
            (memory, buffer), owner, _ = world.storages[access.storage]
            use = self._uses.get((world.sites[access.site].turn, buffer, owner))
            if use is not None and memory == "shared" and self.order.executed(access.start):
                use.accesses.append(access)
        for event, (word, value) in world.fired.items():
            if not self.order.executed(event):
                continue
            site = world.sites[world.site[event]]
            for buffer, kind, found in self._named(word):
                if kind == "released" and found.position == site.rank and self._timely(site, found):
                    use = self._uses.get((site.turn, buffer, site.rank))
                    if use is not None:
                        use.releases.append((event, found.home, value))
                elif kind != "released" and (site.turn, buffer, found.home) in self._uses:
                    self._uses[site.turn, buffer, found.home].signals.append(event)
        for event, awaited in world.awaited.items():
            if not self.order.executed(event):
                continue
            site = world.sites[world.site[event]]
            for word, expected in awaited:
                for buffer, kind, found in self._named(word):
                    if kind == "released" and self._timely(site, found):
                        key = (site.turn, site.rank, buffer, found.position)
                        self._credits.setdefault(key, []).append((event, expected))
                    elif kind != "released" and (site.turn, buffer, site.rank) in self._uses:
                        self._uses[site.turn, buffer, site.rank].waits.append(event)

    def _timely(self, site: Site, word: Word) -> bool:
        """Whether the word is that of the call's own slot."""
        return (
            word.slot == self.world.turns[site.turn].call % self.world.flags.flag[word.flag].slots
        )

    def _named(self, number: int) -> Iterator[tuple[str, str, Word]]:
        """Yield buffer, kind and word if the word is one of a buffer's."""
        word = self._words.get(number)
        if word is None:
            word = self._words[number] = self.world.flags.word(number)
        buffer, dot, kind = word.flag.rpartition(".")
        if dot:
            yield buffer, kind, word

    # ---- 1: credit ---------------------------------------------------------------------------

    def _check_writers(self, turn: int, buffer: str, owner: int, slots: int, use: _Use) -> None:
        world = self.world
        call = world.turns[turn].call
        needed = call + 1 - slots
        for access in use.accesses:
            _, _, slot = world.storages[access.storage]
            if access.mode == "read" or (
                slot == call % slots
                and self._credited(turn, access.site, buffer, owner, needed, access.start)
            ):
                continue
            self.report.add(
                "no_credit",
                f"{self._who(access.site)} may write {self.report.rectangle(access)} before rank "
                f"{owner} has given it back: another schedule may have used it just before.",
                missing=f"a wait of rank {world.sites[access.site].rank} for "
                f"'{buffer}.released'[{owner}] to reach {needed} in call {call}, "
                f"before {self.report.full(access.site)}",
                places=(self.report.touched(access),),
                goals=(access.start,),
                open=(access.site,),
            )
        for event in use.signals:
            site = world.site[event]
            if not self._credited(turn, site, buffer, owner, needed, event):
                self.report.add(
                    "no_credit",
                    f"{self._who(site)} may signal {self.report.word(world.fired[event][0])} "
                    f"before rank {owner} has given the slot of {buffer!r} back: another schedule "
                    "may still await the word.",
                    missing=f"a wait of rank {world.sites[site].rank} for "
                    f"'{buffer}.released'[{owner}] to reach {needed} in call {call}, before "
                    f"{self.report.full(site)}",
                    places=(self.report.place(site, "signal"),),
                    goals=(event,),
                    open=(site,),
                )

    def _credited(
        self, turn: int, site: int, buffer: str, owner: int, needed: int, event: int
    ) -> bool:
        own = self.world.sites[site].rank
        others = (rank for rank in range(self.world.world_size) if rank != own)
        return any(
            expected >= needed and self.order.before(wait, event)
            for rank in (own, *others)
            for wait, expected in self._credits.get((turn, rank, buffer, owner), ())
        )

    # ---- 2 and 3: release, in turn -----------------------------------------------------------

    def _check_release(self, turn: int, buffer: str, rank: int, use: _Use) -> None:
        world, order, report = self.world, self.order, self.report
        call = world.turns[turn].call
        homes = [home for _, home, _ in use.releases]
        absent = sorted(set(range(world.world_size)) - set(homes))
        if absent:
            report.add(
                "early_release",
                f"Rank {rank} does not give its slot of {buffer!r} back to rank "
                f"{', '.join(map(str, absent))} in call {call}: a later call waits for that.",
                missing=f"a signal of '{buffer}.released'[{rank}] on every rank",
                like=f"absent {buffer}",
            )
            return
        first = min(use.releases, key=lambda one: order.run.rank_of[one[0]])[0]
        site = world.site[first]
        step = world.flags.flag[f"{buffer}.released"].slots
        wrong = [value for _, _, value in use.releases if not call < value <= call + step]
        if wrong or len(homes) > world.world_size:
            report.add(
                "early_release",
                f"{self._who(site)} releases {buffer!r} "
                + (f"to epoch {wrong[0]}, not {call + 1}" if wrong else "twice in one call")
                + ": a later call may take it for the release of another.",
                missing=f"one signal of epoch {call + 1} to every rank",
                places=(report.place(site, "signal"),),
            )
        for start, event, what in self._last_uses(buffer, rank, use):
            if event == NEVER or not order.before(event, first):
                self._report_early(buffer, rank, site, what, first, (start, event))
        last = next(event for event, home, _ in use.releases if home == rank)
        needed = call + 1 - world.flags.flag[f"{buffer}.released"].slots
        turns = self._credits.get((turn, rank, buffer, rank), ())
        if not any(expected >= needed and order.before(wait, first) for wait, expected in turns):
            report.add(
                "no_turn",
                f"{self._who(site)} may release {buffer!r} before this rank's last release of the "
                "slot has reached every rank, if that is another schedule's on another stream: "
                "the epoch would go back.",
                missing=f"a wait of rank {rank} for '{buffer}.released'[{rank}] to reach {needed}, "
                f"before {report.full(site)}",
                places=(report.place(site, "signal"),),
                goals=(first,),
            )
        elif not all(order.before(event, last) for event, _, _ in use.releases):
            report.add(
                "no_turn",
                f"{self._who(site)} sets rank {rank}'s own word of '{buffer}.released' before that "
                "of another rank: the next call's release may overtake this one's.",
                missing="the own word last",
                places=(report.place(site, "signal"),),
                goals=(first,),
            )

    def _last_uses(self, buffer: str, rank: int, use: _Use) -> Iterator[tuple[int, int, str]]:
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

    def _report_early(
        self, buffer: str, rank: int, site: int, what: str, release: int, use: tuple[int, int]
    ) -> None:
        """Report a release; `use` is the first and the last event of what it does not wait for."""
        self.report.add(
            "early_release",
            f"{self._who(site)} may give the slot of {buffer!r} back before {what}: another "
            "schedule may use it next.",
            missing=f"an edge from that to {self.report.full(site)}",
            places=(self.report.place(site, "signal"),),
            goals=(release, use[0]),
            held=[event for event in use[1:] if event != NEVER],
            open=[self.world.site[use[0]]],
        )

    def _who(self, site: int) -> str:
        return self.report.subject(site)
