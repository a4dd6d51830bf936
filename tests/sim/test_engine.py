"""The timed engine: against times worked out by hand, against itself, and at its edges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.schedules import SCHEDULES, Program, RingAllGatherGemm, schedule_class
from stretto.schedules.language import (
    ALL_COLLECTIVES,
    ALL_VERBS,
    Capabilities,
    Deadlock,
    Epoch,
    Extent,
    Flag,
    InvalidInput,
    RankBuilder,
    Timeline,
    UnknownName,
    to_json,
)
from stretto.sim import Machine, Skew, simulate
from stretto.sim.engine.fluid import Activity, Resource, max_min_rates
from stretto.sim.machine import Profile

GEMM_US, PUT_US, LATENCY_US, SIGNAL_US, WAIT_US = 100.0, 30.0, 10.0, 2.0, 3.0
RATE_GB_PER_S = 100.0  # of one push after its latency: 2 MB in 20 us
PUSHED = 2_000_000
CAPABILITIES = Capabilities(
    "copy_engine",
    verbs=ALL_VERBS,
    collectives=ALL_COLLECTIVES,
    signal_orders_puts=True,
)


def number(value: float) -> dict[str, object]:
    return {"value": value, "origin": "assumed", "source": "a test"}


def machine(
    *,
    fabric_gb_per_s: float = RATE_GB_PER_S,
    slowdown: float = 0.0,
    queues: int = 4,
    enqueue_us: float = 0.0,
    gemm_us: float = GEMM_US,
    waves: float | None = None,
) -> Machine:
    """Return a machine of round numbers: any GEMM of 1000 rows takes 100 us, a push 30 us."""
    mode = {"eager": number(enqueue_us), "graph": number(0.0)}
    free = {"eager": number(0.0), "graph": number(0.0)}
    profile = {
        "schema_version": 1,
        "name": "round-numbers",
        "description": "for tests",
        "kind": "gpu",
        "domain_size": {"value": 64, "origin": "assumed", "source": "a test"},
        "compute": {
            "peak_tflops": {"bf16": number(1000.0)},
            "sm_count": {"value": 100, "origin": "assumed", "source": "a test"},
            "hbm_gb_per_s": number(1000.0),
            "moved_floor_us": number(0.0),
            "gemm": {
                "bf16": {
                    "tables": [
                        {
                            "origin": "measured",
                            "source": "a test",
                            "sites": [
                                {
                                    "n": 1000,
                                    "k": 1000,
                                    "m": [1000, 2000, 4000],
                                    "us": [gemm_us, 2 * gemm_us, 4 * gemm_us],
                                }
                            ],
                        }
                    ]
                }
            },
        },
        "host": {"enqueue_us": mode, "call_us": free},
        "fabric": {
            "topology": "switch",
            "egress_gb_per_s": number(fabric_gb_per_s),
            "ingress_gb_per_s": number(fabric_gb_per_s),
            "hbm_gb_per_s": number(1000.0),
        },
        "transports": {
            "copy_engine": {
                "capabilities": {
                    "transport": "copy_engine",
                    "verbs": list(ALL_VERBS),
                    "collectives": list(ALL_COLLECTIVES),
                    "signal_orders_puts": True,
                    "verbs_on_sm": ["wait"],
                },
                "put": {
                    "origin": "measured",
                    "source": "a test",
                    "points": [[1, LATENCY_US], [PUSHED, PUT_US]],
                },
                "copy_queues": {"value": queues, "origin": "assumed", "source": "a test"},
                "signal_us": number(SIGNAL_US),
                "wait_us": number(WAIT_US),
                "collectives": {
                    "all_gather": {
                        "2": {
                            "origin": "measured",
                            "source": "a test",
                            "points": [[PUSHED, 60.0], [2 * PUSHED, 80.0]],
                        }
                    }
                },
                "interference": {
                    "gemm_slowdown_beside_put": number(slowdown),
                    "gemm_slowdown_beside_collective": number(0.0),
                    "sms_held": {"value": 0, "origin": "assumed", "source": "a test"},
                }
                | ({} if waves is None else {"gemm_waves_beside_wait": number(waves)}),
            }
        },
        "provenance": {"date": "2026-01-01"},
    }
    import json

    return Machine.from_profile(Profile.model_validate_json(json.dumps(profile)))


def ag_gemm(variant: str, tp: int, *, rows: int = 1000, calls: int = 1) -> Program:
    program = schedule_class("ag-gemm", variant)(
        world_size=tp, m=rows * tp, n=1000, k=1000, capabilities=CAPABILITIES
    ).build()
    return program.repeated(calls) if calls > 1 else program


def span(timeline: Timeline, rank: int, operation: str, call: int = 0) -> tuple[float, float]:
    found = timeline.by_key[(call, rank, operation)]  # type: ignore[index]
    return found.start_us, found.end_us


def test_a_ring_of_two_by_hand() -> None:
    """The credit passes at once (3 us), the push takes 30 and its signal 2; the wait adds 3."""
    timeline = simulate(ag_gemm("ring", 2), machine()).timeline
    put_end = WAIT_US + PUT_US + SIGNAL_US
    for rank in (0, 1):
        assert span(timeline, rank, "gemm0") == (0.0, GEMM_US)
        assert span(timeline, rank, "put0") == (WAIT_US, put_end)
        assert span(timeline, rank, "wait0") == (GEMM_US, GEMM_US + WAIT_US)
        assert span(timeline, rank, "gemm1") == (GEMM_US + WAIT_US, 2 * GEMM_US + WAIT_US)


def test_a_wait_that_comes_late_holds_compute() -> None:
    """With GEMMs shorter than the push, the second one starts when its rows have come."""
    timeline = simulate(ag_gemm("ring", 2), machine(gemm_us=10.0)).timeline
    come = WAIT_US + PUT_US + SIGNAL_US + WAIT_US
    assert span(timeline, 0, "gemm1") == (come, come + 10.0)


def test_unfused_is_the_collective_and_then_the_gemm() -> None:
    timeline = simulate(ag_gemm("unfused", 2), machine()).timeline
    start = WAIT_US  # the credit
    assert span(timeline, 0, "all_gather0") == (start, start + 80.0)
    assert span(timeline, 1, "gemm0") == (start + 80.0, start + 80.0 + 2 * GEMM_US)


def test_a_crowded_receiver_shares_its_ingress() -> None:
    """In `eager` at TP3 two ranks push to each at different times unless one is late."""
    late = Skew(delay_us={0: PUT_US + SIGNAL_US + WAIT_US})
    crowded = simulate(ag_gemm("eager", 3), machine(), skew=late).timeline
    alone = simulate(ag_gemm("eager", 3), machine(fabric_gb_per_s=1000.0), skew=late).timeline
    assert crowded.makespan_us >= alone.makespan_us
    # rank 0's first push (to 1) meets rank 2's second one (to 1): both need longer than alone
    duration = {
        rank: crowded.by_key[(0, rank, name)].duration_us  # type: ignore[index]
        for rank, name in ((0, "put0"), (2, "put1"))
    }
    assert duration[0] == pytest.approx(LATENCY_US + 2 * (PUT_US - LATENCY_US) + SIGNAL_US)
    assert duration[2] == pytest.approx(duration[0])


def test_interference_slows_the_gemm_while_a_push_runs() -> None:
    timeline = simulate(ag_gemm("ring", 2), machine(slowdown=0.5)).timeline
    # 30 us beside a push do 20 us of work
    assert timeline.by_key[(0, 0, "gemm0")].duration_us == pytest.approx(GEMM_US + 10.0)  # type: ignore[index]
    assert timeline.by_key[(0, 0, "gemm1")].duration_us == pytest.approx(GEMM_US)  # type: ignore[index]


def test_a_gemm_that_starts_beside_a_polling_wait_takes_a_wave_more() -> None:
    """At TP3 the first arrival is awaited on a stream of its own, beside the first GEMM."""

    def gemms(variant: str, tp: int, **more: float) -> list[float]:
        timeline = simulate(ag_gemm(variant, tp), machine(**more)).timeline
        return [timeline.by_key[(0, 0, f"gemm{step}")].duration_us for step in range(tp)]  # type: ignore[index]

    # 1000 x 1000 is one wave of 32 tiles; the wait ends when the push has come, after its credit
    come = WAIT_US + PUT_US + SIGNAL_US
    assert come < GEMM_US
    longer = GEMM_US + come
    assert gemms("ring", 3, waves=1.0) == pytest.approx([longer, GEMM_US, GEMM_US])
    assert gemms("ring", 3, waves=0.1) == pytest.approx([1.1 * GEMM_US, GEMM_US, GEMM_US])
    assert gemms("ring", 3) == pytest.approx([GEMM_US] * 3)
    # the last wait is on the compute stream, before its GEMM
    assert gemms("ring", 2, waves=1.0) == pytest.approx([GEMM_US] * 2)
    assert gemms("eager", 3, waves=1.0) == pytest.approx([GEMM_US] * 3)


class TwoSenders(RingAllGatherGemm):
    """Pushes to both neighbours on streams of their own."""

    variant = "two-senders"

    def enqueue(self, rank: RankBuilder) -> None:
        x, gathered = rank.input("x"), rank.workspace("gathered", rows=self.m, columns=self.k)
        one, two, receive = rank.streams("one", "two", "receive")
        rank.put(x[rank], to=rank + 1, into=gathered[rank + 0], on=one)
        rank.put(x[rank], to=rank - 1, into=gathered[rank + 0], on=two)
        rank.wait(gathered[rank - 1], on=receive)
        rank.wait(gathered[rank + 1], on=receive)


@pytest.mark.parametrize(("queues", "second"), [(2, 0.0), (1, PUT_US)])
def test_one_copy_engine_takes_one_push_at_a_time(queues: int, second: float) -> None:
    program = TwoSenders(world_size=3, m=3000, n=1000, k=1000, capabilities=CAPABILITIES).build()
    timeline = simulate(program, machine(queues=queues, fabric_gb_per_s=1000.0)).timeline
    ends = sorted(timeline.by_key[(0, 0, name)].end_us for name in ("put0", "put1"))  # type: ignore[index]
    assert ends[1] - ends[0] == pytest.approx(second)


class RowOperations(RingAllGatherGemm):
    """Work on the rows of y, known and unknown."""

    variant = "row-operations"

    def enqueue(self, rank: RankBuilder) -> None:
        y = rank.output("y")
        (compute,) = rank.streams("compute")
        q = rank.scratch("q", rows=Extent(self.m), columns=self.n, dtype="fp8")
        scale = rank.scratch("scale", rows=Extent(self.m), columns=1, dtype="fp32")
        weight = rank.scratch("weight", rows=Extent(1), columns=self.n, dtype="fp32")
        rank.row_op("rms_norm", (y,), (y,), tables=(weight[0:1],), options={"eps": 0.1}, on=compute)
        rank.row_op("quantise_fp8", (y,), (q[0 : self.m], scale[0 : self.m]), on=compute)
        rank.row_op("add", (y, y, y), (y,), flops_per_row=7.0, bytes_per_row=5e3, on=compute)
        rank.row_op("mine", (y,), (y,), flops_per_row=3.0, bytes_per_row=4e3, on=compute)
        rank.row_op("free", (y,), (y,), on=compute)


def test_row_operations_cost_what_the_table_says_unless_they_say_so_themselves() -> None:
    """2000 rows of 1000 columns in bf16, at 1000 GB/s: a thousand bytes a nanosecond."""
    program = RowOperations(world_size=2, m=2000, n=1000, k=1000, capabilities=CAPABILITIES).build()
    assert program.phases[0].bodies[0]["rms_norm0"].options == (("eps", 0.1),)
    timeline = simulate(program, machine()).timeline
    norm, quantise, add, mine, free = (
        timeline.by_key[(0, 0, f"{name}0")]  # type: ignore[index]
        for name in ("rms_norm", "quantise_fp8", "add", "mine", "free")
    )
    assert norm.bytes == 2000 * (2000 + 2000) + 4 * 1000
    assert norm.flops == 2000 * (4 * 1000 + 3)
    assert norm.duration_us == pytest.approx(norm.bytes / 1e6)
    assert quantise.bytes == 2000 * (2000 + 1000 + 4)
    assert quantise.duration_us == pytest.approx(quantise.bytes / 1e6)
    assert add.flops == 2000 * 7
    assert add.duration_us == pytest.approx(2000 * 5e3 / 1e6)
    assert mine.flops == 2000 * 3
    assert mine.duration_us == pytest.approx(2000 * 4e3 / 1e6)
    assert (free.flops, free.duration_us) == (0.0, 0.0)


def test_the_host_falls_behind() -> None:
    """With 1000 us an operation the last GEMM starts when the host has come to it."""
    timeline = simulate(ag_gemm("ring", 2), machine(enqueue_us=1000.0)).timeline
    start, _ = span(timeline, 0, "gemm1")
    assert start == pytest.approx(5000.0)  # it is the fifth operation that the host enqueues


@pytest.mark.parametrize("variant", SCHEDULES["ag-gemm"])
@pytest.mark.parametrize("tp", [2, 3, 8])
@pytest.mark.parametrize("slowdown", [0.0, 0.3])
def test_one_rank_for_all_is_exact(variant: str, tp: int, slowdown: float) -> None:
    program = ag_gemm(variant, tp, calls=3)
    folded = simulate(program, machine(slowdown=slowdown))
    full = simulate(program, machine(slowdown=slowdown), fold=False)
    assert folded.engine.plan.folded
    assert not full.engine.plan.folded
    assert folded.makespan_us == pytest.approx(full.makespan_us, rel=1e-12)
    ours, theirs = folded.timeline, full.timeline
    assert ours.by_key.keys() == theirs.by_key.keys()
    assert ours.matches == theirs.matches
    assert ours.happens_before == theirs.happens_before
    for key, one in ours.by_key.items():
        other = theirs.by_key[key]
        assert one.start_us == pytest.approx(other.start_us, abs=1e-9), key
        assert replace(one, start_us=0, end_us=0) == replace(other, start_us=0, end_us=0)


def test_uneven_shards_are_not_folded() -> None:
    program = schedule_class("ag-gemm", "ring")(
        world_size=4, m=4001, n=1000, k=1000, capabilities=CAPABILITIES
    ).build()
    assert not simulate(program, machine()).engine.plan.folded


def test_empty_shards_take_no_time_but_signal() -> None:
    program = schedule_class("ag-gemm", "ring")(
        world_size=8, m=9, n=1000, k=1000, capabilities=CAPABILITIES
    ).build()
    timeline = simulate(program, machine()).timeline
    empty = [one for one in timeline.spans if one.kind == "put" and one.shard in (5, 6, 7)]
    assert empty
    assert all(one.bytes == 0 and one.signalled for one in empty)
    assert {one.duration_us for one in empty} == {SIGNAL_US}


def test_shares_add_up_to_the_makespan() -> None:
    result = simulate(ag_gemm("direct", 4), machine(), skew=Skew(slowdown={2: 1.3}))
    for share in result.shares:
        assert sum(share[1:]) == pytest.approx(result.makespan_us)


def test_a_slow_rank_and_jitter_take_longer_and_repeat_exactly() -> None:
    program = ag_gemm("ring", 4)
    even = simulate(program, machine()).makespan_us
    skew = Skew(slowdown={1: 1.5}, jitter=0.05, seed=3)
    first, again = (simulate(program, machine(), skew=skew) for _ in range(2))
    assert first.makespan_us > even
    assert to_json(first.timeline) == to_json(again.timeline)
    other = simulate(program, machine(), skew=replace(skew, seed=4))
    assert other.makespan_us != first.makespan_us


class OneSlotRing(RingAllGatherGemm):
    """The ring on a workspace with a single slot, where every call reuses the last one's rows."""

    variant = "one-slot"
    slots = 1


def test_a_slow_rank_holds_the_next_call_of_its_sender() -> None:
    """The credit: rank 0 must not push call 1's rows before rank 1 has released call 0's."""
    program = (
        OneSlotRing(world_size=2, m=2000, n=1000, k=1000, capabilities=CAPABILITIES)
        .build()
        .repeated(3)
    )
    slow = Skew(slowdown={1: 20.0})
    timeline = simulate(program, machine(), skew=slow).timeline
    release = timeline.by_key[(0, 1, "release0")].end_us  # type: ignore[index]
    assert timeline.by_key[(1, 0, "put0")].start_us >= release  # type: ignore[index]
    unguarded = simulate(program.without("credit0"), machine(), skew=slow).timeline
    assert unguarded.by_key[(1, 0, "put0")].start_us < release  # type: ignore[index]


def test_a_missing_signal_is_a_deadlock_that_names_everybody() -> None:
    with pytest.raises(Deadlock, match="rank 1, stream compute, operation wait0") as caught:
        simulate(ag_gemm("ring", 2).without("put0"), machine())
    assert "gathered.arrived" in str(caught.value)


class Counting(RingAllGatherGemm):
    """Every rank adds one to a counter of rank 0, which waits for all of them."""

    variant = "counting"

    def enqueue(self, rank: RankBuilder) -> None:
        from stretto.schedules.language import Peer

        counter = rank.flag(Flag("arrivals", kind="counter"))
        (stream,) = rank.streams("compute")
        rank.gemm(rank.input("x")[rank], rank.weight("w"), rank.output("y")[rank], on=stream)
        root = Peer(0, absolute=True)
        rank.signal_words(counter.word(on=root), value=Epoch(0, 1), on=stream)
        if rank.index == 0:
            rank.wait_words(
                counter.word(), value=Epoch(rank.world_size, rank.world_size), on=stream
            )


def test_a_counter_opens_with_the_last_add() -> None:
    program = Counting(world_size=4, m=4000, n=1000, k=1000, capabilities=CAPABILITIES).build()
    timeline = simulate(program.repeated(2), machine(), skew=Skew(slowdown={3: 2.0})).timeline
    assert span(timeline, 0, "wait0")[1] == pytest.approx(2 * GEMM_US + SIGNAL_US + WAIT_US)


class Mail(RingAllGatherGemm):
    """A depth-one mailbox: two letters a call, taken one by one."""

    variant = "mail"

    def enqueue(self, rank: RankBuilder) -> None:
        box = rank.flag(Flag("box", kind="mailbox"))
        send, compute = rank.streams("send", "compute")
        for _ in range(2):
            rank.signal_words(box.word(on=rank + 1), value=Epoch(0, 1), on=send)
        rank.gemm(rank.input("x")[rank], rank.weight("w"), rank.output("y")[rank], on=compute)
        for _ in range(2):
            rank.wait_words(box.word(), value=Epoch(0, 1), on=compute)


def test_a_mailbox_holds_one_letter() -> None:
    program = Mail(world_size=2, m=2000, n=1000, k=1000, capabilities=CAPABILITIES).build()
    timeline = simulate(program, machine()).timeline
    assert span(timeline, 0, "signal0")[1] == pytest.approx(SIGNAL_US)
    # the second letter is written when the first has been taken, after the GEMM
    assert span(timeline, 0, "wait1")[1] > GEMM_US + WAIT_US


def test_more_ranks_than_the_domain_are_refused() -> None:
    with pytest.raises(InvalidInput, match="at most 64 ranks"):
        simulate(ag_gemm("ring", 65), machine())


def test_unknown_transport_names_those_there_are() -> None:
    program = replace(ag_gemm("ring", 2), transport="pigeon")
    with pytest.raises(UnknownName, match="copy_engine"):
        simulate(program, machine())


def test_max_min_rates_are_fair() -> None:
    """The textbook case: a link of 10 shared by three, one of which is held elsewhere to 2."""
    wide, narrow = Resource(10.0), Resource(2.0)

    def activity(*uses: tuple[Resource, float]) -> Activity:
        return Activity(1.0, uses, None)  # type: ignore[arg-type]

    free, other, held = (
        activity((wide, 10.0)),
        activity((wide, 10.0)),
        activity((wide, 10.0), (narrow, 10.0)),
    )
    rates = max_min_rates([free, other, held])
    assert rates[held] == pytest.approx(0.2)
    assert rates[free] == rates[other] == pytest.approx(0.4)


def test_an_extent_of_no_rows_is_allowed() -> None:
    assert Extent(0, "shard").valid(0, 4) == 0
