"""A smallest run that shows a finding, as a Timeline.

From the events that have to happen the run is followed back: what they need, and of alternatives
the one that came first.  Everything else is left out.  Every operation takes one unit of time as
soon as it can; what is still going on when the trouble starts lasts to the end.  The operations
that the finding names are marked, and called what its sentence calls them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from stretto.schedules.language import FlagEvent, Mark, Put, Span, Timeline
from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.play import Run, play
from stretto.schedules.verifier.report import Draft, Reporter
from stretto.schedules.verifier.verdict import Place
from stretto.schedules.verifier.world import World

__all__ = ["can_be_shown", "timeline_of"]

_LENGTH_US = 1.0
_SHORT_US = 0.2
"""Of signals and waits."""


def can_be_shown(draft: Draft) -> bool:
    """Return whether some run shows the finding: it is about operations, not about a declaration.

    A Program that declares too few slots of a flag, or ranks that issue different collectives, are
    wrong before anything runs.
    """
    return bool(draft.goals or draft.finding.places)


def timeline_of(order: Order, draft: Draft) -> Timeline:
    """Return the smallest run that shows the finding, if any run does (`can_be_shown`)."""
    world = order.world
    marked = _marked(world, draft)
    needed = _Needed(order, draft, draft.goals or _goals(order, marked))
    spans = _spans(world, needed, draft)
    program = world.programs[0]
    return Timeline(
        name="+".join(dict.fromkeys(one.name for one in world.programs)),
        variant="+".join(dict.fromkeys(one.variant for one in world.programs)),
        world_size=world.world_size,
        shape=program.shape,
        dtype=program.dtype,
        transport=program.transport,
        origin="counterexample",
        machine="",
        spans=tuple(spans),
        validity="order only",
        notes=(draft.finding.message,),
        marks=tuple(
            _mark(order, site, places, site in draft.open) for site, places in marked.items()
        ),
    )


# ---- what is marked ------------------------------------------------------------------------------


def _marked(world: World, draft: Draft) -> dict[int, list[Place]]:
    """Return the sites that a finding is about, each with what the finding says of it."""
    site_of = {
        (site.rank, world.call_of(number), site.name): number
        for number, site in enumerate(world.sites)
    }
    marked: dict[int, list[Place]] = {}
    for place in draft.finding.places:
        site = site_of[place.rank, place.call, place.operation]
        marked.setdefault(site, []).append(place)
    for site in draft.open:
        marked.setdefault(site, [])
    return marked


def _goals(order: Order, sites: Iterable[int]) -> Sequence[int]:
    """Return events that show the sites, where the finding itself names none."""
    world = order.world
    return [
        world.last[site] if order.executed(world.last[site]) else world.first[site]
        for site in sites
    ]


def _mark(order: Order, site: int, places: Sequence[Place], ongoing: bool) -> Mark:
    world = order.world
    found, call = world.sites[site], world.call_of(site)
    if found.operation is None:
        name = f"caller, {found.name.strip('()')} call {call}"
    else:
        name = f"{found.name} of call {call}" if len(world.turns) > 1 else found.name
    roles = [_role(order, site, place) for place in places]
    return Mark(
        call=call,
        rank=found.rank,
        stream=world.stream_of(world.first[site]),
        operation=found.name,
        name=name,
        role=" and ".join(dict.fromkeys(roles)) if places else "is not over yet",
        ongoing=ongoing,
    )


def _role(order: Order, site: int, place: Place) -> str:
    """Return what an operation does in a finding: "reads rows 0 to 2 of 'g' on rank 1"."""
    world = order.world
    events = range(world.first[site], world.last[site] + 1)
    if place.rows is not None:
        slots = world.program_of(site).buffer[str(place.buffer)].slots
        first, stop = place.rows
        rows = f"row {first}" if stop == first + 1 else f"rows {first} to {stop - 1}"
        where = f"{f'slot {place.slot} of ' if slots > 1 else ''}{place.buffer!r}"
        verb = "adds to" if place.access == "add" else f"{place.access}s"
        return f"{verb} {rows} of {where} on rank {place.owner}"
    if place.access == "signal":
        words = [world.fired[event][0] for event in events if event in world.fired]
        return f"signals {_words(world, words)}" if words else "signals"
    if place.access == "wait":
        awaited = [one for event in events for one in world.awaited.get(event, ())]
        words = [word for word, expected in awaited if order.run.levels[word] < expected]
        words = words or [word for word, _ in awaited]  # none is missing: it is about the order
        return f"waits for {_words(world, words)}" if words else "waits"
    return ""


def _words(world: World, words: Sequence[int]) -> str:
    if len(words) == 1:
        return Reporter(world).word(words[0])
    flags = dict.fromkeys(world.flags.word(word).flag for word in words)
    return f"{len(words)} words of {' and '.join(map(repr, flags))}"


# ---- what is drawn -------------------------------------------------------------------------------


class _Needed:
    """The events that a finding needs, in an order in which they can happen.

    Attributes
    ----------
    events
        What is held back comes last: it has begun when the trouble starts, but not ended.
    """

    def __init__(self, order: Order, draft: Draft, goals: Iterable[int]) -> None:
        self.world = order.world
        held = set(draft.held)
        self.run: Run = play(order.world, order.levels, held=held) if held else order.run
        self._levels = order.levels
        wanted: set[int] = set()
        todo = list(goals)
        while todo:
            event = todo.pop()
            if event in wanted:
                continue
            wanted.add(event)
            todo += [need for need in self._needs(event) if need not in wanted]
        rank_of = self.run.rank_of
        self.events = sorted(wanted, key=lambda event: (rank_of[event] < 0, rank_of[event], event))

    def needs(self, event: int) -> list[int]:
        """Return which events of the run came before `event`, directly."""
        return [need for need in self._needs(event) if self.run.rank_of[need] >= 0]

    def _needs(self, event: int) -> Iterable[int]:
        world = self.world
        if world.place[event] > 1:
            yield world.events_of[world.lane[event]][world.place[event] - 2]
        yield from world.before[event]
        if event in world.meeting_of:
            yield from world.meetings[world.meeting_of[event]]
        fired = world.fired.get(event)
        if fired is not None and world.flags.kind[fired[0]] == "mailbox":
            yield from self._emptied(event, fired[0])
        for word, expected in world.awaited.get(event, ()):
            yield from self._released(event, word, expected)

    def _emptied(self, event: int, word: int) -> Iterable[int]:
        fills, takes = self.run.fills.get(word, []), self.run.takes.get(word, [])
        place = (fills.index(event) if event in fills else len(fills)) + self._levels[word] - 1
        if 0 <= place < len(takes):
            yield takes[place]

    def _released(self, event: int, word: int, expected: int) -> Iterable[int]:
        world, run = self.world, self.run
        kind, level = world.flags.kind[word], self._levels[word]
        if kind == "mailbox":
            fills, takes = run.fills.get(word, []), run.takes.get(word, [])
            place = (takes.index(event) if event in takes else len(takes)) - level
            if 0 <= place < len(fills):
                yield fills[place]
            return
        if level >= expected:
            return
        for signal in run.sequence:
            fired = world.fired.get(signal)
            if fired is None or fired[0] != word:
                continue
            if kind == "counter":
                level += fired[1]
                yield signal
            elif fired[1] >= expected:
                level = expected
                yield signal
            if level >= expected:
                return


def _spans(world: World, needed: _Needed, draft: Draft) -> list[Span]:
    """Place every operation as early as what it needs allows."""
    end_of: dict[int, float] = {}
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    reached: dict[int, float] = {}  # by lane
    touched: dict[int, set[int]] = {}
    for event in needed.events:
        site = world.site[event]
        if world.sites[site].operation is None and site not in draft.open:
            end_of[event] = max((end_of.get(need, 0.0) for need in needed.needs(event)), default=0)
            continue
        start = max((end_of.get(need, 0.0) for need in needed.needs(event)), default=0.0)
        waits = event in world.awaited
        length = _SHORT_US if waits or event in world.fired else _LENGTH_US
        end_of[event] = start + length
        lane_start = reached.get(world.lane[event], 0.0) if waits else start
        begins[site] = min(begins.get(site, lane_start), lane_start)
        ends[site] = max(ends.get(site, 0.0), end_of[event])
        reached[world.lane[event]] = end_of[event]
        touched.setdefault(site, set()).add(event)
    _leave_open(world, draft.open, begins, ends)
    return [
        _span(world, site, begins[site], ends[site], touched[site])
        for site in sorted(begins, key=lambda site: (begins[site], site))
    ]


def _leave_open(
    world: World, left: Collection[int], begins: dict[int, float], ends: dict[int, float]
) -> None:
    """Let what is still going on last until the end of the picture."""
    late = max([*ends.values(), *(begins[site] + 1.5 for site in left if site in begins)])
    for site in left:
        if site in begins:
            ends[site] = late


def _span(world: World, site: int, start: float, end: float, events: set[int]) -> Span:
    found = world.sites[site]
    operation, size = found.operation, world.world_size
    shard = None if operation is None else operation.tags.shard
    peer = None
    if isinstance(operation, Put):
        peer = operation.destination.on.of(found.rank, size)
    return Span(
        operation=found.name,
        kind="opaque" if operation is None else operation.kind,
        rank=found.rank,
        stream=world.stream_of(world.first[site]),
        call=world.call_of(site),
        start_us=round(start, 3),
        end_us=round(end, 3),
        step=None if operation is None else operation.tags.step,
        shard=None if shard is None else shard.of(found.rank, size),
        peer=peer,
        note="caller" if operation is None else operation.tags.note,
        bytes=1 if operation is not None and operation.kind in ("put", "collective") else 0,
        after=() if operation is None else operation.after,
        signalled=tuple(
            _flag_event(world, *world.fired[event])
            for event in sorted(events)
            if event in world.fired
        ),
        awaited=tuple(
            _flag_event(world, *one)
            for event in sorted(events)
            for one in world.awaited.get(event, ())
        ),
    )


def _flag_event(world: World, number: int, value: int) -> FlagEvent:
    word = world.flags.word(number)
    return FlagEvent(word.flag, word.home, word.slot, word.position, value & 0xFFFFFFFF)
