"""Schedules are traced into Programs: symmetry, credits, releases, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.schedules import SCHEDULES, AllGatherGemm
from stretto.schedules.language import (
    ALL_COLLECTIVES,
    ALL_VERBS,
    SELF,
    Block,
    Body,
    Capabilities,
    Epoch,
    Extent,
    Fixed,
    Flag,
    FlagRef,
    InvalidInput,
    Peer,
    Program,
    ProgramError,
    Put,
    RankBuilder,
    Schedule,
    Unsupported,
    View,
    slot_places,
)

ALL = Capabilities("test", ALL_VERBS, ALL_COLLECTIVES, signal_orders_puts=True)
COLLECTIVES_ONLY = Capabilities("library", ("collective",), ALL_COLLECTIVES)
VARIANTS = SCHEDULES["ag-gemm"]


def build(
    cls: type[Schedule], world_size: int = 4, m: int = 9, capabilities: Capabilities = ALL
) -> Program:
    return cls(world_size=world_size, m=m, n=3, k=5, capabilities=capabilities).build()


def body_of(cls: type[Schedule], **options) -> Body:
    (phase,) = build(cls, **options).phases
    (body,) = phase.bodies
    return body


def traced(enqueue, *, slots: int = 2, world_size: int = 3) -> Program:
    """Build what one function enqueues, with the buffers of an all-gather GEMM."""
    fields = {"variant": "test", "slots": slots, "enqueue": lambda self, rank: enqueue(rank)}
    return build(type("Traced", (AllGatherGemm,), fields), world_size, 3 * world_size)


def gathered(rank: RankBuilder, name: str = "gathered"):
    return rank.workspace(name, rows=9, columns=5)


# ---- symmetry ------------------------------------------------------------------------------------


@given(
    variant=st.sampled_from(sorted(VARIANTS)),
    world_size=st.integers(1, 12),
    m=st.integers(1, 40),
)
def test_shipped_schedules_have_one_body_for_all_ranks(
    variant: str, world_size: int, m: int
) -> None:
    program = build(VARIANTS[variant], world_size, m)
    assert program.symmetric
    assert program.phases[0].body_of == ()
    bodies = program.phases[0].bodies
    steps = [operation.tags.step for operation in bodies[0].operations if operation.kind == "put"]
    expected = [] if variant == "unfused" else list(range(1, world_size))
    assert steps == expected
    assert program.computes == "all_gather_gemm"
    assert program.sizes == {"m": m, "n": 3, "k": 5}


def test_ring_forwards_what_it_received() -> None:
    body = body_of(VARIANTS["ring"])
    puts = [operation for operation in body.operations if isinstance(operation, Put)]
    assert [put.source for put in puts] == [
        View("x", Block(SELF)),
        View("gathered", Block(Peer(-1))),
        View("gathered", Block(Peer(-2))),
    ]
    assert {put.destination.on for put in puts} == {Peer(1)}
    assert [put.after for put in puts] == [(), ("wait0",), ("wait1",)]
    assert [put.signal for put in puts] == [
        FlagRef("gathered.arrived", Peer(offset), Peer(1)) for offset in (0, 3, 2)
    ]
    assert [put.tags.shard for put in puts] == [Peer(0), Peer(3), Peer(2)]


def test_direct_and_eager_push_to_every_peer() -> None:
    for variant, after in (("direct", [(), ("wait0",), ("wait1",)]), ("eager", [(), (), ()])):
        body = body_of(VARIANTS[variant])
        puts = [operation for operation in body.operations if isinstance(operation, Put)]
        assert [put.destination.on for put in puts] == [Peer(1), Peer(2), Peer(3)]
        assert {put.source for put in puts} == {View("x", Block(SELF))}
        assert [put.after for put in puts] == after


def test_a_schedule_that_asks_for_its_number_has_several_bodies() -> None:
    def enqueue(rank: RankBuilder) -> None:
        (compute,) = rank.streams("compute")
        for _ in range(1 + rank.index % 2):
            rank.fill(rank.output("y"), on=compute)

    program = traced(enqueue, world_size=5)
    (phase,) = program.phases
    assert phase.body_of == (0, 1, 0, 1, 0)
    assert [len(phase.body(rank).operations) for rank in range(5)] == [1, 2, 1, 2, 1]
    assert not program.symmetric

    def the_same_for_all(rank: RankBuilder) -> None:
        assert rank.index < rank.world_size
        rank.fill(rank.output("y"), on=rank.streams("compute")[0])

    assert traced(the_same_for_all).symmetric


def test_ranks_must_agree_on_what_they_declare() -> None:
    def buffers(rank: RankBuilder) -> None:
        rank.workspace("b", rows=3 + rank.index, columns=5)

    with pytest.raises(ProgramError, match="ranks declare buffer 'b' differently"):
        traced(buffers)

    def flags(rank: RankBuilder) -> None:
        rank.flag(Flag("f", count=1 + rank.index))

    with pytest.raises(ProgramError, match="ranks declare flag 'f' differently"):
        traced(flags)

    def twice(rank: RankBuilder) -> None:
        gathered(rank)
        rank.workspace("gathered", rows=9, columns=4)

    with pytest.raises(ProgramError, match="'gathered' is declared twice, differently"):
        traced(twice)


# ---- credits and releases ------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["ring", "direct", "eager"])
def test_a_credit_comes_before_a_streams_first_write_into_a_rank(variant: str) -> None:
    operations = body_of(VARIANTS[variant]).operations
    credited: set[Peer] = set()
    for before, operation in pairwise(operations):
        if isinstance(operation, Put) and operation.destination.on not in credited:
            credited.add(operation.destination.on)
            assert before.tags.note == "credit"
            assert before.stream == operation.stream
            own = () if len(credited) > 1 else (FlagRef("slot.released", SELF),)
            assert before.words == (FlagRef("slot.released", operation.destination.on), *own)
            assert before.value == Epoch(1, -1)
    credits_ = [operation for operation in operations if operation.tags.note == "credit"]
    assert len(credits_) == len(credited) == (1 if variant == "ring" else 3)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_credit_is_for_the_slots_last_use(slots: int) -> None:
    cls = type("Slots", (VARIANTS["ring"],), {"slots": slots})
    program = build(cls)
    assert program.buffer["gathered"].slots == slots
    assert program.flag["gathered.arrived"].slots == slots
    credit = program.phases[0].bodies[0]["credit0"]
    release = program.phases[0].bodies[0]["release0"]
    for call in range(slots, 9):  # what is waited for is what call - slots released
        assert credit.value.at(call) == release.value.at(call - slots)
    assert credit.value.at(slots - 1) == 0  # nothing to wait for in the first calls


def test_a_collective_is_credited_by_all_ranks() -> None:
    body = body_of(VARIANTS["unfused"])
    assert [operation.id for operation in body.operations] == [
        "credit0",
        "all_gather0",
        "gemm0",
        "release0",
    ]
    assert {word.index for word in body["credit0"].words} == {Peer(rank) for rank in range(4)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_release_follows_the_last_access(variant: str) -> None:
    body = body_of(VARIANTS[variant])
    *_, release = body.operations
    assert release.id == "release0"
    assert "turn0" not in body.index  # its stream has had a credit, the own word with it
    assert [word.on for word in release.words] == [Peer(1), Peer(2), Peer(3), SELF]
    assert {word.index for word in release.words} == {SELF}
    last: dict[str, str] = {}
    for operation in body.operations[:-1]:
        views = (*operation.reads(), *operation.writes())
        words = operation.waits()
        if any(view.buffer == "gathered" and view.on == SELF for view in views) or any(
            sync.word.flag == "gathered.arrived" for sync in words
        ):
            last[operation.stream] = operation.id
    last.pop(release.stream, None)
    assert set(release.after) == set(last.values())


def test_a_stream_releases_only_after_the_last_release_has_reached_all_ranks() -> None:
    """The own word, which is set last, says so: a credit is for it too."""

    def enqueue(rank: RankBuilder) -> None:
        (send,) = rank.streams("send")
        rank.put(rank.input("x")[rank], to=rank + 1, into=gathered(rank)[rank + 0], on=send)

    program = traced(enqueue)
    credit, _, release = program.phases[0].bodies[0].operations
    assert (credit.id, credit.stream) == ("credit0", release.stream)
    assert FlagRef("slot.released", SELF) in credit.words
    slots = program.buffer["gathered"].slots
    for call in range(slots, slots + 4):
        assert credit.value.at(call) == release.value.at(call - slots)


def test_several_workspaces_are_released_together() -> None:
    def enqueue(rank: RankBuilder) -> None:
        one, two = gathered(rank), gathered(rank, "second")
        send, other = rank.streams("send", "other")
        rank.put(rank.input("x")[rank], to=rank + 1, into=one[rank + 0], on=send)
        rank.put(rank.input("x")[rank], to=rank + 1, into=two[rank + 0], on=other)
        rank.wait(two[rank - 1], on=other)

    program = traced(enqueue)
    body = program.phases[0].bodies[0]
    releases = {
        operation.words[0].flag: (operation.stream, operation.after)
        for operation in body.operations
        if operation.kind == "signal"
    }
    assert releases == {"slot.released": ("other", ())}
    assert [o.id for o in body.operations] == [
        "credit0",
        "put0",
        "credit1",
        "put1",
        "wait0",
        "release0",
    ]
    assert slot_places(program) == {"gathered": 0, "second": 512}


def test_every_rank_releases_even_one_that_only_waits_or_does_nothing() -> None:
    root = Peer(0, absolute=True)

    def broadcast(rank: RankBuilder) -> None:
        x, y, rows = rank.input("x"), rank.output("y"), gathered(rank)
        compute, send, receive = rank.streams("compute", "send", "receive")
        if rank.index == 0:
            rank.put(x[rank], to=Peer(1, absolute=True), into=rows[root], on=send)
        elif rank.index == 1:
            compute.after(rank.wait(rows[root], on=receive))
            rank.gemm(rows[root], rank.weight("w"), y[root], on=compute)

    (phase,) = traced(broadcast).phases
    for rank in range(3):
        release = phase.body(rank)["release0"]
        assert release.stream == ("send", "receive", "compute")[rank]
        assert len(release.words) == 3
    ids = [operation.id for operation in phase.body(1).operations]
    assert ids == ["wait0", "gemm0", "turn0", "release0"]  # a wait alone is no turn
    turn = phase.body(1)["turn0"]
    assert (turn.stream, turn.words) == ("receive", (FlagRef("slot.released", SELF),))
    assert turn.value == Epoch(1, -1)


def test_a_workspace_that_nobody_touches_is_not_released() -> None:
    program = traced(lambda rank: gathered(rank) and None)
    assert program.operations == 0
    assert build(VARIANTS["ring"], world_size=1).flags == ()


def test_a_stream_of_its_own_needs_a_credit_of_its_own() -> None:
    def enqueue(rank: RankBuilder) -> None:
        x, rows = rank.input("x"), gathered(rank)
        left, right = rank.streams("left", "right")
        chunks = [(x[rank].chunk(i, of=2), rows[rank + 0].chunk(i, of=2)) for i in range(2)]
        rank.put(chunks[0][0], to=rank + 1, into=chunks[0][1], on=left)
        rank.put(chunks[1][0], to=rank + 1, into=chunks[1][1], on=right)
        rank.put(chunks[1][0], to=rank - 2, into=chunks[1][1], on=right)

    program = traced(enqueue)
    body = program.phases[0].bodies[0]
    assert [(o.id, o.stream) for o in body.operations if o.tags.note == "credit"] == [
        ("credit0", "left"),
        ("credit1", "right"),  # and none for rank - 2, which is rank + 1
    ]
    assert [put.signal.flag for put in body.operations if isinstance(put, Put)] == [
        "gathered.arrived",
        "gathered.arrived.1",
        "gathered.arrived.1",
    ]


def test_writing_ones_own_slot_needs_ones_own_release() -> None:
    def enqueue(rank: RankBuilder) -> None:
        (compute,) = rank.streams("compute")
        rank.copy(rank.input("x")[rank], gathered(rank)[rank], on=compute)

    operations = traced(enqueue).phases[0].bodies[0].operations
    assert [operation.id for operation in operations] == ["credit0", "copy0", "release0"]
    assert operations[0].words == (FlagRef("slot.released", SELF),)


# ---- events, tags, regions -----------------------------------------------------------------------


def test_after_holds_the_next_operation_alone_and_not_its_credit() -> None:
    def enqueue(rank: RankBuilder) -> None:
        compute, send = rank.streams("compute", "send")
        y = rank.output("y")
        event = rank.fill(y, 1.0, on=compute)
        send.after(event, event)
        rank.put(rank.input("x")[rank], to=rank + 1, into=gathered(rank)[rank + 0], on=send)
        rank.copy(y[0:1], y[1:2], on=send)

    body = traced(enqueue).phases[0].bodies[0]
    assert body["credit0"].after == ()
    assert body["put0"].after == ("fill0",)
    assert body["copy0"].after == ()


def test_flags_of_ones_own_and_scratch() -> None:
    def enqueue(rank: RankBuilder) -> None:
        compute, side = rank.streams("compute", "side")
        done = rank.flag(Flag("done", "counter", count=3))
        small = rank.scratch("small", rows=Extent(9), columns=3, dtype="fp32")
        rank.fill(small[0:9], on=compute)
        rank.signal_words(
            done.word(rank + 0, on=rank - 1), done.word(1, on=rank + 5), value=Epoch(0, 2), on=side
        )
        rank.wait_words(done.word(rank + 1), value=Epoch(2, 2), on=side)
        y = rank.output("y")
        rank.reduce((y, y), y, on=compute)
        rank.row_op("add", (y, y), (y,), on=compute, flops_per_row=2.0)
        rank.opaque("core", (y,), (y,), flops=1.0, moved_bytes=2.0, on=compute)
        rank.fill(y.columns(Fixed(0, 2)), 3.0, on=compute)

    program = traced(enqueue)
    body = program.phases[0].bodies[0]
    assert body["signal0"].words == (
        FlagRef("done", SELF, Peer(2)),
        FlagRef("done", 1, Peer(2)),
    )
    assert body["wait0"].words == (FlagRef("done", Peer(1), SELF),)
    small = program.buffer["small"]
    assert (small.kind, small.slots, small.dtype, small.role) == (
        "local",
        1,
        "fp32",
        "workspace",
    )
    assert body["fill1"].destination == View("y", columns=Fixed(0, 2))
    assert [operation.id for operation in body.operations][-4:-1] == ["reduce0", "add0", "core0"]


def test_what_regions_cannot_be_is_refused() -> None:
    def refused(message: str, use) -> None:
        with pytest.raises(ProgramError, match=message):
            traced(use)

    refused("no input called 'w'", lambda rank: rank.input("w"))
    refused("no output called 'q'", lambda rank: rank.output("q"))
    refused("given as buffer", lambda rank: rank.output("y")[0:4:2])
    refused("given as buffer", lambda rank: rank.output("y")[:4])
    refused("not by 0", lambda rank: rank.output("y")[0])
    refused("index the buffer first", lambda rank: rank.output("y").part(0, 1))
    refused(
        "arrivals are known for blocks",
        lambda rank: rank.wait(gathered(rank)[0:3], on=rank.streams("s")[0]),
    )
    refused(
        "arrivals are known for blocks",
        lambda rank: rank.wait(rank.output("y")[rank], on=rank.streams("s")[0]),
    )
    refused(
        "there is no rank 7 among 3",
        lambda rank: rank.put(
            rank.input("x")[rank],
            to=Peer(7, absolute=True),
            into=gathered(rank)[rank + 0],
            on=rank.streams("s")[0],
        ),
    )


def test_an_operation_made_by_hand_takes_the_events_and_the_credit() -> None:
    def enqueue(rank: RankBuilder) -> None:
        (send,) = rank.streams("send")
        rows = gathered(rank)
        event = rank.fill(rank.output("y"), on=rank.streams("compute")[0])
        send.after(event)
        destination = rows[rank + 0].view(on=Peer(1))
        rank.operation(
            Put(id="mine", stream="send", source=View("x"), destination=destination)
        )  # fmt: skip

    body = traced(enqueue).phases[0].bodies[0]
    assert [operation.id for operation in body.operations][:3] == ["fill0", "credit0", "mine"]
    assert body["mine"].after == ("fill0",)


# ---- sizes and capabilities ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["world_size", "m", "n", "k"])
@pytest.mark.parametrize("size", [0, -1, 2**31])
def test_sizes_that_cannot_be_are_refused(name: str, size: int) -> None:
    sizes = {"world_size": 2, "m": 4, "n": 4, "k": 4} | {name: size}
    word = name.replace("_", " ")
    with pytest.raises(InvalidInput, match=f"^{word} is {size}; give a whole number from 1 to"):
        VARIANTS["ring"](**sizes, capabilities=ALL)


def test_a_transport_that_lacks_a_verb_is_refused_with_an_alternative() -> None:
    for variant in ("ring", "direct", "eager"):
        with pytest.raises(Unsupported) as caught:
            build(VARIANTS[variant], capabilities=COLLECTIVES_ONLY)
        assert str(caught.value) == (
            f"ag-gemm --variant {variant} cannot be carried: transport 'library' has no put; "
            "choose --variant unfused, or another --transport."
        )
    for lacking in ("signal", "wait"):
        verbs = tuple(verb for verb in ALL_VERBS if verb != lacking)
        with pytest.raises(Unsupported, match=f"transport 'test' has no {lacking}; choose"):
            build(VARIANTS["ring"], capabilities=replace(ALL, verbs=verbs))
    with pytest.raises(Unsupported, match="a signal of transport 'test' orders no put; choose"):
        build(VARIANTS["ring"], capabilities=replace(ALL, signal_orders_puts=False))
    with pytest.raises(Unsupported) as caught:
        build(VARIANTS["unfused"], capabilities=replace(ALL, verbs=("put", "signal", "wait")))
    assert "has no collective; choose a variant that pushes, or another --transport." in str(
        caught.value
    )
    some = replace(ALL, collectives=("all_reduce",))
    with pytest.raises(Unsupported, match=r"has no all_gather \(it offers all_reduce\); choose"):
        build(VARIANTS["unfused"], capabilities=some)
    with pytest.raises(Unsupported, match=r"\(it offers none\)"):
        build(VARIANTS["unfused"], capabilities=replace(ALL, collectives=()))


def test_a_single_rank_needs_no_transport() -> None:
    nothing = Capabilities("nothing")
    for cls in VARIANTS.values():
        body = body_of(cls, world_size=1, capabilities=nothing)
        assert [operation.kind for operation in body.operations] == ["gemm"]


def test_a_transport_without_signals_has_neither_credit_nor_release() -> None:
    program = build(VARIANTS["unfused"], capabilities=COLLECTIVES_ONLY)
    assert [o.id for o in program.phases[0].bodies[0].operations] == ["all_gather0", "gemm0"]
    assert program.flags == ()
    assert program.transport == "library"


def test_operations_made_by_hand_are_refused_too() -> None:
    class ByHand(AllGatherGemm):
        variant = "by-hand"

        def enqueue(self, rank: RankBuilder) -> None:
            rows = gathered(rank)[rank + 0].view(on=Peer(1))
            rank.operation(Put(id="mine", stream="send", source=View("x"), destination=rows))

    with pytest.raises(Unsupported, match="'library' has no put"):
        build(ByHand, capabilities=COLLECTIVES_ONLY)
