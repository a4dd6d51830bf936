"""Findings in the making: evidence from events, words for them, and one of many that are alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from stretto.schedules.verifier.verdict import Finding, Kind, Place, Severity
from stretto.schedules.verifier.world import BEGIN, Access, World

__all__ = ["Draft", "Reporter"]


@dataclass
class Draft:
    """A finding with the events that show it.

    Attributes
    ----------
    finding
        As it will be reported.
    goals
        Events that have to happen for it to be seen.
    held
        Events that must not have happened yet.
    open
        Sites that are still going on at the end.
    """

    finding: Finding
    goals: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    open: tuple[int, ...] = ()


@dataclass
class Reporter:
    """Collects drafts; of those that differ in rank and call alone it keeps the earliest."""

    world: World
    drafts: dict[tuple[object, ...], Draft] = field(default_factory=dict)

    def add(
        self,
        kind: Kind,
        message: str,
        *,
        missing: str | None = None,
        places: Sequence[Place] = (),
        like: str | None = None,
        severity: Severity = "error",
        goals: Iterable[int] = (),
        held: Iterable[int] = (),
        open: Iterable[int] = (),  # noqa: A002 (as in Draft)
    ) -> None:
        """Add a finding, or count it with those that it is like (by `like` or by its places)."""
        finding = Finding(kind, severity, message, missing, tuple(places))
        key = (
            kind,
            severity,
            *((place.operation, place.stream, place.buffer, place.access) for place in places),
            like or (None if places else message),
        )
        known = self.drafts.get(key)
        if known is None:
            self.drafts[key] = Draft(finding, tuple(goals), tuple(held), tuple(open))
            return
        alike = known.finding.alike + 1
        if _earliness(finding) < _earliness(known.finding):
            known.goals, known.held, known.open = tuple(goals), tuple(held), tuple(open)
            known.finding = replace(finding, alike=alike)
        else:
            known.finding = replace(known.finding, alike=alike)

    # ---- evidence ----------------------------------------------------------------------------

    def place(self, site: int, access: str | None = None) -> Place:
        """Return where an operation is."""
        world, found = self.world, self.world.sites[site]
        event = world.first[site]
        return Place(
            found.rank,
            world.call_of(site),
            world.stream_of(event),
            found.name,
            found.position,
            access,
        )

    def touched(self, access: Access) -> Place:
        """Return where an access is, with its rectangle."""
        _, owner, slot = self.world.storages[access.storage]
        return replace(
            self.place(access.site, access.mode),
            buffer=access.buffer,
            owner=owner,
            slot=slot,
            rows=(access.row, access.row_stop),
            columns=(access.column, access.column_stop),
        )

    # ---- words -------------------------------------------------------------------------------

    def operation(self, site: int, *, beside: int | None = None) -> str:
        """Return "rank 2's gemm1", with the call where it is not that of the site `beside`."""
        found, call = self.world.sites[site], self.world.call_of(site)
        where = ""
        if len(self.world.turns) > 1 and (beside is None or self.world.call_of(beside) != call):
            where = f" of call {call}"
        if found.operation is None:
            when = "before" if found.name == BEGIN else "after"
            return f"rank {found.rank}'s caller, {when} call {call},"
        return f"rank {found.rank}'s {found.name}{where}"

    def subject(self, site: int, *, beside: int | None = None) -> str:
        """Return the same as it stands at the beginning of a sentence."""
        text = self.operation(site, beside=beside)
        return text[:1].upper() + text[1:]

    def full(self, site: int) -> str:
        """Return "gemm1 (rank 2, stream compute, call 0)"."""
        found = self.world.sites[site]
        stream = self.world.stream_of(self.world.first[site])
        name = "the caller's work " + found.name if found.operation is None else found.name
        return f"{name} (rank {found.rank}, stream {stream}, call {self.world.call_of(site)})"

    def rectangle(self, access: Access, other: Access | None = None) -> str:
        """Return "rows 3 to 5 of slot 0 of 'gathered' on rank 1": what both have in common."""
        world = self.world
        buffer = access.buffer
        _, owner, slot = world.storages[access.storage]
        row, row_stop = access.row, access.row_stop
        if other is not None and other.shape == access.shape:
            row, row_stop = max(row, other.row), min(row_stop, other.row_stop)
        slots = world.program_of(access.site).buffer[buffer].slots
        rows = f"row {row}" if row_stop == row + 1 else f"rows {row} to {row_stop - 1}"
        return f"{rows} of {f'slot {slot} of ' if slots > 1 else ''}{buffer!r} on rank {owner}"

    def word(self, number: int) -> str:
        """Return "'gathered.arrived'[2] of rank 0"."""
        word = self.world.flags.word(number)
        slots = self.world.flags.flag[word.flag].slots
        slot = f", slot {word.slot}" if slots > 1 else ""
        return f"{word.flag!r}[{word.position}] of rank {word.home}{slot}"


def _earliness(finding: Finding) -> tuple[list[int], list[int]]:
    """Return what is least for the one that is kept: the earliest calls, then the lowest ranks."""
    calls = sorted((place.call for place in finding.places), reverse=True)
    return calls, [place.rank for place in finding.places]
