"""Every kind of finding: a Program with one mistake, the message, and the evidence."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hand_made import BUFFERS, build, copy, found, kinds, made, put, rows, wait, word

from stretto.schedules.language import (
    Block,
    Body,
    Buffer,
    Capabilities,
    Collective,
    Copy,
    Emit,
    Epoch,
    Extent,
    Fill,
    Fixed,
    FlagRef,
    Gate,
    GatherGemm,
    Gemm,
    Opaque,
    Operation,
    Peer,
    Program,
    Put,
    Reduce,
    RowOp,
    Signal,
    TileGroup,
    Tiling,
    View,
)
from stretto.schedules.verifier import verify

ONE = Epoch(0, 1)


# ---- races ---------------------------------------------------------------------------------------


def test_read_before_it_is_written() -> None:
    finding = found(made(put(), wait(), copy()), "race", calls=1, alone=True)
    assert finding.message == (
        "Rank 1's copy0 may read rows 0 to 1 of 'g' on rank 1 before rank 0's put0 has written "
        "them."
    )
    first, second = finding.places
    assert (first.rank, first.stream, first.operation, first.access) == (0, "send", "put0", "write")
    assert (second.rank, second.stream, second.index) == (1, "compute", 2)
    assert (second.buffer, second.owner, second.rows, second.columns) == ("g", 1, (0, 2), (0, 2))
    assert finding.missing == (
        "nothing orders put0 (rank 0, stream send, call 0) before copy0 (rank 1, stream compute, "
        "call 0)"
    )
    assert finding.alike == 1  # the same on the other rank
    assert verify(made(put(), wait(), copy(after=("wait0",))), calls=1, alone=True).safe


def test_the_same_rows_are_overwritten_by_the_next_call() -> None:
    program = made(put(), wait(), copy(after=("wait0",)))
    finding = found(program, "reuse", alone=True)
    assert finding.message == (
        "Rank 1's put0 of call 1 may overwrite rows 0 to 1 of 'g' on rank 0 before rank 0's copy0 "
        "of call 0 has read them."
    )
    assert [place.call for place in finding.places] == [0, 1]


def test_one_buffer_in_two_shapes() -> None:
    """What one Program writes first need not be what the other one meets."""

    def shaped(columns: int, *operations: Operation) -> Program:
        g = Buffer("g", "workspace", "fp32", Extent(4), Extent(columns), "symmetric")
        return replace(made(*operations, tp=1, buffers=(g,), flags=()), caller_stream="main")

    def filled(id: str, start: int, stop: int, stream: str = "main", after: str = "") -> Fill:
        edges = (after,) if after else ()
        return Fill(id=id, stream=stream, destination=rows("g", start, stop), after=edges)

    first = shaped(2, filled("all", 0, 4, stream="side"), filled("one", 0, 1, after="all"))
    # Rows of twice the bytes: row 1 here is rows 2 and 3 there.
    late = shaped(4, filled("late", 1, 2, stream="other"))
    finding = found([first, late], "reuse", alone=True, calls=1)
    assert [place.operation for place in finding.places] == ["all", "late"]
    assert verify([first, shaped(4, filled("same", 0, 1))], alone=True, calls=1).safe


def test_two_ranks_write_the_same_rows() -> None:
    both = made(put(), put("put1", destination=rows("g", 1, 3, on=2), stream="other"), tp=3)
    finding = found(both, "race", alone=True, calls=1)
    assert re.fullmatch(
        r"Rank \d's put\d and rank \d's put\d both write row 1 of 'g' on rank \d, in an order "
        r"that is open\.",
        finding.message,
    )
    assert {place.access for place in finding.places} == {"write"}


def test_columns_that_do_not_meet_do_not_race() -> None:
    left, right = Fixed(0, 1), Fixed(1, 2)
    halves = [
        Fill(id=f"fill{number}", stream=stream, destination=View("y", columns=columns))
        for number, (stream, columns) in enumerate((("compute", left), ("other", right)))
    ]
    assert verify(made(*halves)).safe
    whole = replace(halves[1], destination=View("y"))
    assert "race" in kinds(verify(made(halves[0], whole)))


def test_a_put_has_landed_only_when_a_signal_of_its_stream_says_so() -> None:
    """An event after the put does not order its data for another rank."""
    silent = put(signal=None)
    told = Signal(id="signal0", stream="other", words=(word(on=1),), after=("put0",))
    reads = (wait(), copy(after=("wait0",)))
    finding = found(made(silent, told, *reads), "race", calls=1, alone=True)
    assert finding.missing is not None
    assert finding.missing.endswith("sets no later signal to say that the data have arrived")
    same_stream = replace(told, stream="send", after=())
    assert verify(made(silent, same_stream, *reads), calls=1, alone=True).safe
    no_order = Capabilities("test", ("put", "signal", "wait"), signal_orders_puts=False)
    program = made(silent, same_stream, *reads)
    assert "race" in kinds(verify(program, calls=1, alone=True, capabilities=no_order))


def test_a_put_to_oneself_has_landed_when_it_ends() -> None:
    own = put(destination=rows("g", 0, 2), signal=None)
    assert verify(made(own, copy(after=("put0",))), alone=True, calls=1).safe


def test_signal_and_data_of_one_put_are_two_things() -> None:
    """The mailbox holds the signal back, the data are written all the same."""
    box = word("mailbox", on=1)
    twice = [put(f"put{number}", signal=box, value=ONE) for number in range(2)]
    waits = [wait(f"wait{number}", words=(word("mailbox"),), value=ONE) for number in range(2)]
    seen = [copy(f"copy{number}", after=(f"wait{number}",)) for number in range(2)]
    finding = found(made(*twice, *waits, *seen), "race", calls=1, alone=True)
    assert "put1 may overwrite rows 0 to 1 of 'g'" in finding.message
    assert "copy0 has read them" in finding.message


@pytest.mark.parametrize(
    "operation",
    [
        Gemm(
            id="own",
            stream="compute",
            a=rows("s", 0, 2),
            b=View("w"),
            out=rows("s", 1, 3),
        ),
        Copy(id="own", stream="compute", source=rows("s", 0, 2), destination=rows("s", 1, 3)),
        Reduce(
            id="own",
            stream="compute",
            inputs=(rows("s", 0, 2), rows("s", 2, 4)),
            out=rows("s", 1, 3),
        ),
        RowOp(
            id="own",
            stream="compute",
            function="add",
            inputs=(rows("s", 0, 2),),
            outputs=(rows("s", 1, 3),),
        ),
    ],
)
def test_an_operation_that_writes_what_it_still_reads(operation: object) -> None:
    finding = found(made(operation), "race")  # type: ignore[arg-type]
    assert "Rank 0's own" in finding.message
    assert "while it still reads there" in finding.message


def test_in_place_work_is_no_race() -> None:
    in_place = (
        Reduce(id="a", stream="compute", inputs=(View("s"), View("s")), out=View("s")),
        RowOp(id="b", stream="compute", function="f", inputs=(View("s"),), outputs=(View("s"),)),
        Gemm(
            id="c", stream="compute", a=View("x"), b=View("w"), out=View("y"), accumulate=View("y")
        ),
    )
    assert verify(made(*in_place)).safe


def test_the_caller_may_use_its_buffers_after_the_call() -> None:
    """A peer that writes an output is not known to the caller's stream."""
    output = Buffer(
        "z", "output", "fp32", Extent(4), Extent(2), "symmetric", initial="zero", reuse="never"
    )
    program = made(put(destination=rows("z", 0, 2, on=1)), buffers=(*BUFFERS, output))
    finding = found(program, "race", calls=1)
    assert finding.message == (
        "Rank 1's caller, after call 0, may read rows 0 to 1 of 'z' on rank 1 before rank 0's put0 "
        "has written them."
    )


# ---- bytes nobody wrote, results that are wrong --------------------------------------------------


def test_bytes_that_nobody_wrote() -> None:
    program = made(
        put(), wait(), copy(source=rows("g", 0, 4), destination=rows("y"), after=("wait0",))
    )
    finding = found(program, "unwritten", calls=1, alone=True)
    assert finding.message == (
        "Rank 0's copy0 reads rows 2 to 3 of 'g' on rank 0, which nobody has written."
    )
    assert finding.places[0].rows == (2, 4)


def test_an_output_that_is_not_filled() -> None:
    output = replace(BUFFERS[2], initial="undefined", reuse="caller_stream")
    buffers = (*BUFFERS[:2], output, *BUFFERS[3:])
    fill = Fill(id="fill0", stream="compute", destination=rows("y", 0, 3))
    finding = found(made(fill, buffers=buffers), "unwritten")
    assert "caller, after call 0, who reads row 3 of 'y'" in finding.message


def test_an_input_is_read_after_the_caller_may_have_changed_it() -> None:
    """A copy kept from the last call is not this call's input."""
    program = build("ring", 2, 4)
    (phase,) = program.phases
    keeps = tuple(
        replace(one, a=replace(one.a, slot=1)) if one.id == "gemm1" else one
        for one in phase.bodies[0].operations
    )
    late = replace(program, phases=(replace(phase, bodies=(Body(keeps),)),))
    assert "unwritten" in kinds(verify(late))


def test_a_product_over_no_columns_is_zero() -> None:
    buffers = (
        Buffer("x", "input", "fp32", Extent(4, "shard"), Extent(0), initial="caller"),
        Buffer("w", "weight", "fp32", Extent(2), Extent(0), initial="caller", reuse="never"),
        Buffer("y", "output", "fp32", Extent(4), Extent(2)),
    )
    gemm = Gemm(id="gemm0", stream="compute", a=View("x"), b=View("w"), out=View("y"))
    product = made(gemm, tp=1, buffers=buffers, flags=())
    assert verify(replace(product, computes="all_gather_gemm")).findings == ()


def test_a_wrong_result_is_told_in_rows() -> None:
    program = build("unfused", 2, 4)
    (phase,) = program.phases
    operations = tuple(
        replace(one, a=replace(one.a, rows=Fixed(1, 4)), out=replace(one.out, rows=Fixed(0, 3)))
        if one.id == "gemm0"
        else one
        for one in phase.bodies[0].operations
    )
    last = Gemm(
        id="gemm1",
        stream="compute",
        a=View("gathered", Fixed(0, 1)),
        b=View("w"),
        out=View("y", Fixed(3, 4)),
    )
    place = [one.id for one in operations].index("gemm0") + 1
    operations = (*operations[:place], last, *operations[place:])
    shifted = replace(program, phases=(replace(phase, bodies=(Body(operations),)),))
    finding = found(shifted, "wrong_result")
    assert finding.message == (
        "After call 0 of ag-gemm there are rows 1 to 3 of x as of execution 0 times w of rank 0 in "
        "rows 0 to 2 of 'y' on rank 0, and not rows 0 to 2 of x as of execution 0 times w of rank "
        "0, as all_gather_gemm says."
    )


# ---- deadlocks -----------------------------------------------------------------------------------


def test_a_cycle_of_waits_is_told_as_a_cycle() -> None:
    first = wait(stream="compute")
    then = Signal(id="signal0", stream="compute", words=(word(on=1),))
    finding = found(made(first, then), "deadlock", calls=1)
    assert finding.message == (
        "2 operations wait for each other: "
        "wait0 (rank 0, stream compute, call 0) waits for epoch 'epoch'[0] of rank 0 to reach 1; "
        "wait0 (rank 1, stream compute, call 0) waits for epoch 'epoch'[0] of rank 1 to reach 1."
    )
    assert [place.rank for place in finding.places] == [0, 1]
    assert verify(made(then, first), calls=1).safe


def test_a_signal_that_nobody_gives() -> None:
    finding = found(made(wait()), "deadlock")
    assert finding.message == (
        "It waits for ever: wait0 (rank 0, stream receive, call 0) waits for epoch 'epoch'[0] of "
        "rank 0 to reach 1, which no call up to this one does."
    )


def test_a_call_that_needs_the_next_one_never_ends() -> None:
    """What the last call waits for would come with one more."""
    signal = Signal(id="signal0", stream="send", words=(word(on=1),))
    assert "deadlock" in kinds(verify(made(signal, wait(value=Epoch(1, 2)))))


def test_a_rank_that_does_not_come_to_a_collective() -> None:
    blocks = Buffer("h", "workspace", "fp32", Extent(4, "padded"), Extent(2), "symmetric")
    shard = Buffer("p", "input", "fp32", Extent(4, "shard"), Extent(2), initial="caller")
    buffers = (*BUFFERS, blocks, shard)
    gather = Collective(
        id="gather0",
        stream="compute",
        collective="all_gather",
        source=View("p"),
        destination=View("h"),
    )
    fill = Fill(id="fill0", stream="compute", destination=View("s"))
    finding = found(made(gather, others=(fill,), buffers=buffers), "collective_mismatch")
    assert finding.message == (
        "Rank 1, call 0: it issues 0 collectives in the call, rank 0 issues 1."
    )
    reduced = Buffer("r", "output", "fp32", Extent(4), Extent(2))
    reduce = Collective(
        id="reduce0",
        stream="compute",
        collective="all_reduce",
        source=View("x"),
        destination=View("r"),
    )
    buffers = (*buffers, reduced)
    mixed = made(gather, reduce, others=(reduce, gather), buffers=buffers)
    finding = found(mixed, "collective_mismatch")
    assert finding.message.startswith(
        "Rank 1, call 0: its collective number 1 of the call is all_r"
    )
    assert verify(made(gather, reduce, buffers=buffers)).safe
    part = replace(reduce, source=rows("x", 0, 2), destination=rows("r", 0, 2))
    sizes = made(reduce, others=(part,), buffers=buffers)
    assert "should be of 4 rows to 4" in found(sizes, "collective_mismatch").message


def test_collectives_in_an_open_order_are_advised_against() -> None:
    reduced = Buffer("r", "output", "fp32", Extent(4), Extent(2))
    one = Collective(
        id="one", stream="compute", collective="all_reduce", source=View("x"), destination=View("r")
    )
    other = replace(one, id="other", stream="side", source=View("s"), destination=View("s"))
    program = made(one, other, buffers=(*BUFFERS, reduced))
    verdict = verify(program, calls=1)
    assert verdict.safe
    (advice,) = [item for item in verdict.advice if item.kind == "collective_mismatch"]
    assert "are collectives in an order that is open" in advice.message
    ordered = made(one, replace(other, after=("one",)), buffers=(*BUFFERS, reduced))
    assert not verify(ordered, calls=1).advice


# ---- signals -------------------------------------------------------------------------------------


def test_an_epoch_that_is_set_back() -> None:
    low = Signal(id="low", stream="send", words=(word(on=1),), value=Epoch(1, 1))
    high = Signal(id="high", stream="other", words=(word(on=1),), value=Epoch(1, 2))
    late = wait(value=Epoch(1, 2))
    finding = found(made(low, high, late), "lost_signal", calls=1, alone=True)
    assert finding.message == (
        "low (rank 1, stream send, call 0) may set 'epoch'[0] of rank 0 back to 1 before wait0 "
        "(rank 0, stream receive, call 0) has seen it reach 2: that then waits for ever."
    )
    assert verify(made(low, replace(high, after=("low",)), late), calls=1, alone=True).safe


def test_two_waits_may_lose_their_signals_together_only() -> None:
    """Each is rescued by a signal that comes after the other's: alone, neither would hang."""
    first = wait(stream="compute", value=Epoch(1, 1))
    again = Signal(id="again", stream="compute", words=(word(on=1),))
    other = Signal(id="other", stream="side", words=(word(on=1),))
    verdict = verify(made(first, again, other), calls=2, alone=True)
    assert kinds(verdict) == {"lost_signal"}


def test_a_counter_whose_threshold_is_not_all_adds() -> None:
    add = Signal(id="add0", stream="send", words=(word("counter", on=1),), value=ONE)
    more = replace(add, id="add1")
    one = wait(words=(word("counter"),), value=Epoch(2, 1))
    finding = found(made(add, more, one), "ambiguous_counter", calls=1)
    assert "to reach 1, but adds of up to 2 may precede it" in finding.message
    both = wait(words=(word("counter"),), value=Epoch(2, 2))
    # Nothing keeps a rank from adding for its next call before this one's wait has looked.
    assert kinds(verify(made(add, more, both))) == {"ambiguous_counter"}
    back = Signal(id="back", stream="receive", words=(word(index=1, on=1),))
    credit = wait("credit", stream="send", words=(word(index=1),), value=Epoch(1, 0))
    counted = made(credit, add, more, both, back)
    assert verify(counted, alone=True).safe
    # Calls of others add nothing, and still count.
    finding = found(counted, "deadlock")
    assert finding.message.startswith(
        "If the calls before were those of other schedules: 2 operations wait"
    )


def test_a_mailbox_that_two_fill() -> None:
    fills = [
        Signal(id=f"fill{number}", stream=stream, words=(word("mailbox", on=1),), value=ONE)
        for number, stream in enumerate(("send", "other"))
    ]
    waits = [wait(f"wait{number}", words=(word("mailbox"),), value=ONE) for number in range(2)]
    finding = found(made(*fills, *waits), "ambiguous_mailbox", calls=1)
    assert "both signal mailbox 'mailbox'[0] of rank" in finding.message
    ordered = [fills[0], replace(fills[1], after=("fill0",)), *waits]
    assert verify(made(*ordered), calls=1).safe


def test_a_mailbox_that_two_empty() -> None:
    fills = [
        Signal(id=f"fill{number}", stream="send", words=(word("mailbox", on=1),), value=ONE)
        for number in range(2)
    ]
    waits = [
        wait(f"wait{number}", stream=stream, words=(word("mailbox"),), value=ONE)
        for number, stream in enumerate(("receive", "other"))
    ]
    finding = found(made(*fills, *waits), "ambiguous_mailbox", calls=1)
    assert "both wait for mailbox" in finding.message


def test_two_mailboxes_in_one_wait() -> None:
    fills = Signal(
        id="fill", stream="send", words=(word("mailbox", on=1), word("mailbox", 1, on=1)), value=ONE
    )
    both = wait(words=(word("mailbox"), word("mailbox", 1)), value=ONE)
    finding = found(made(fills, both), "ambiguous_mailbox")
    assert "waits for 2 mailboxes at once" in finding.message


def test_a_mailbox_that_nobody_empties() -> None:
    fill = Signal(id="fill", stream="send", words=(word("mailbox", on=1),), value=ONE)
    finding = found(made(fill), "unawaited", calls=1)
    assert finding.message == (
        "Nobody waits for the mailbox 'mailbox'[0] of rank 1 that fill (rank 0, stream send, call "
        "0) fills: the next signal into it will not come through."
    )
    # In two calls it does not.
    assert "mailbox 'mailbox'[0] of rank 1 to be emptied" in found(made(fill), "deadlock").message


def test_an_epoch_that_nobody_awaits_is_advice() -> None:
    verdict = verify(made(Signal(id="signal0", stream="send", words=(word(on=1), word()))))
    assert verdict.safe
    (advice,) = verdict.advice
    assert advice.kind == "unawaited"
    assert advice.message.startswith("2 of 2 words that signal0 signals are awaited by nobody")


# ---- the device ----------------------------------------------------------------------------------


def test_the_hosts_order_matters_on_one_hardware_queue() -> None:
    waits_first = (wait(), Signal(id="signal0", stream="send", words=(word(on=1),)))
    verdict = verify(made(*waits_first), calls=1)
    assert verdict.safe
    (advice,) = [item for item in verdict.advice if item.kind == "hardware_queue"]
    assert advice.message.startswith("With 1 hardware queue a rank: ")
    assert "wait0" in advice.message
    finding = found(made(*waits_first), "hardware_queue", calls=1, hardware_queues=1)
    assert finding.places
    assert verify(made(*waits_first), calls=1, hardware_queues=2).safe
    assert verify(made(*waits_first[::-1]), calls=1, hardware_queues=1).safe


def kernel(
    *gates: int | None, workers: int, emits: int | None = None, tiles: int = 1
) -> GatherGemm:
    """Return a fused kernel of one group a gate; one group may signal its own rank."""
    groups = []
    for number, gate in enumerate(gates):
        emit = ()
        if emits == number:
            emit = (Emit(word=FlagRef("epoch", 1), value=Epoch(1, 1)),)
        groups.append(
            TileGroup(
                a=rows("x", number, number + 1),
                out=rows("y", number, number + 1),
                gates=() if gate is None else (Gate(FlagRef("epoch", gate), Epoch(1, 1)),),
                emits=emit,
            )
        )
    return GatherGemm(
        id="kernel",
        stream="compute",
        b=View("w"),
        tiling=Tiling(1, 2 // tiles, workers),
        groups=tuple(groups),
    )


def test_tiles_that_wait_for_tiles_behind_them() -> None:
    """The first group's gate opens when the last one is done: with one worker, never."""
    behind = {"workers": 1, "emits": 1}
    finding = found(made(kernel(1, None, **behind)), "residency")
    assert "a later group of tiles of kernel" in finding.message
    assert "waits for one of its 1 workers" in finding.message
    assert verify(made(kernel(1, None, workers=2, emits=1))).safe
    assert verify(made(kernel(None, 1, workers=1, emits=0))).safe
    # A group of two tiles takes two workers while it waits.
    assert not verify(made(kernel(1, None, workers=2, emits=1, tiles=2))).safe
    assert verify(made(kernel(1, None, workers=3, emits=1, tiles=2))).safe


def test_a_kernel_that_waits_on_every_multiprocessor() -> None:
    opens = Fill(id="fill", stream="side", destination=View("s"))
    signal = Signal(id="signal0", stream="side", words=(word(),))
    program = made(kernel(0, workers=8), opens, signal)
    assert verify(program, alone=True).safe
    assert verify(program, alone=True, sms=9).safe
    finding = found(program, "residency", alone=True, sms=8)
    assert finding.message == (
        "kernel (rank 0, stream compute, call 0) may hold all 8 multiprocessors and wait for fill "
        "(rank 0, stream side, call 0), which then cannot start."
    )
    first = made(opens, signal, replace(kernel(0, workers=8), after=("signal0",)))
    assert verify(first, alone=True, sms=8).safe


def test_waits_on_multiprocessors() -> None:
    on_sm = Capabilities("test", ("put", "signal", "wait"), verbs_on_sm=("wait", "signal"))
    waits = [
        wait("wait0", stream="receive"),
        wait("wait1", stream="other", words=(word(),)),
    ]
    signal = Signal(id="signal0", stream="send", words=(word(),))
    program = made(*waits, signal)
    assert verify(program, calls=1, sms=3, capabilities=on_sm).safe
    finding = found(program, "residency", calls=1, sms=2, capabilities=on_sm)
    assert {place.operation for place in finding.places} == {"wait0", "wait1", "signal0"}
    assert verify(program, calls=1, sms=2).safe


def test_groups_of_a_kernel_run_side_by_side() -> None:
    """What one group writes another may read only by a gate."""
    groups = kernel(None, None, workers=8).groups
    chained = replace(groups[1], a=rows("y", 0, 1))
    assert "race" in kinds(
        verify(made(replace(kernel(None, None, workers=8), groups=(groups[0], chained))))
    )


# ---- what else a proof covers --------------------------------------------------------------------


def test_adds_commute_with_adds_alone() -> None:
    emits = [
        TileGroup(
            a=rows("x", number, number + 1),
            out=rows("s", number, number + 1),
            emits=(Emit(rows("s", number, number + 1), rows("z", 0, 1, on=1), mode=mode),),
        )
        for number, mode in enumerate(("add", "add"))
    ]
    target = Buffer("z", "workspace", "fp32", Extent(4), Extent(2), "symmetric", initial="zero")
    scatter = GatherGemm(
        id="kernel", stream="compute", b=View("w"), tiling=Tiling(1, 2, 8), groups=tuple(emits)
    )
    assert verify(made(scatter, buffers=(*BUFFERS, target)), calls=1).safe
    one_sets = replace(emits[1], emits=(replace(emits[1].emits[0], mode="set"),))
    broken = replace(scatter, groups=(emits[0], one_sets))
    assert "race" in kinds(verify(made(broken, buffers=(*BUFFERS, target)), calls=1))


def test_opaque_work_is_looked_at_too() -> None:
    core = Opaque(
        id="core",
        stream="side",
        function="attention",
        inputs=(View("s"),),
        outputs=(View("s"),),
        flops=1.0,
        moved_bytes=1.0,
    )
    use = Copy(id="copy0", stream="compute", source=View("s"), destination=View("y"))
    assert "race" in kinds(verify(made(core, use), calls=1))
    assert "reuse" in kinds(verify(made(core, replace(use, after=("core",)))))


def test_blocks_of_short_shards_do_not_meet() -> None:
    """Nine rows on eight ranks: blocks of 2, 2, 2, 2, 1, 0, 0, 0."""
    gathered = Buffer("h", "workspace", "fp32", Extent(9, "padded"), Extent(2), "symmetric")
    shard = Buffer("p", "input", "fp32", Extent(9, "shard"), Extent(2), initial="caller")
    sends = Put(
        id="put0",
        stream="send",
        source=View("p"),
        destination=View("h", Block(Peer(0)), on=Peer(1)),
        signal=word(on=1),
    )
    program = made(sends, wait(), tp=8, buffers=(*BUFFERS, gathered, shard))
    assert verify(program, alone=True).safe
