"""Collectives: where ranks meet, what is moved, and when it may already be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from by_hand import caller, numbers, program, sharded, symmetric

from stretto.schedules.language import (
    Buffer,
    Collective,
    Copy,
    Deadlock,
    Extent,
    Fixed,
    Flag,
    FlagRef,
    ProgramError,
    View,
    Wait,
)
from stretto.sim.interpreter import HOSTILE, InOrder, Manner, Random, Scheduler, Step, interpret

SCHEDULERS: list[Scheduler] = [InOrder(), InOrder(HOSTILE), *(Random(seed) for seed in range(12))]


class BeginFirst(InOrder):
    """Takes the first step of one operation, then all of the others, then the rest of it."""

    def __init__(self, operation: str, manner: Manner, *, rank: int = 0) -> None:
        super().__init__(manner)
        self.operation, self.rank, self.begun = operation, rank, False

    def pick(self, steps: Sequence[Step]) -> int:
        for place, step in enumerate(steps):
            named = step.operation == self.operation
            if not self.begun and named and step.rank == self.rank:
                self.begun = True
                return place
        first = [place for place, step in enumerate(steps) if step.kind == "caller"]
        if first and not self.begun:
            return first[0]
        others = [place for place, step in enumerate(steps) if step.operation != self.operation]
        return (others or [0])[0]


@pytest.mark.parametrize(("world_size", "rows"), [(1, 3), (2, 4), (3, 7), (8, 9), (4, 1)])
def test_collectives_with_short_and_empty_blocks(world_size: int, rows: int) -> None:
    block = -(-rows // world_size)
    parts = [slice(rank * block, (rank + 1) * block) for rank in range(world_size)]
    whole, many = numbers(rows, 2), numbers(world_size, rows, 2, seed=1)
    one = [
        Collective(
            id="c", stream="compute", collective=kind, source=View("x"), destination=View("y")
        )
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    full_x, full_y = caller("x", rows), caller("y", rows, role="output")
    shard_x, shard_y = sharded("x", rows, role="input"), sharded("y", rows, role="output")
    for operation, x, y, given, expected in (
        (one[0], shard_x, full_y, [whole[part] for part in parts], [whole] * world_size),
        (one[1], full_x, shard_y, list(many), [many.sum(0)[part] for part in parts]),
        (one[2], full_x, full_y, list(many), [many.sum(0)] * world_size),
    ):
        for scheduler in SCHEDULERS:
            outputs = interpret(
                program(world_size, [x, y], [], [operation]), {"x": given}, scheduler=scheduler
            ).outputs
            for got, wanted in zip(outputs["y"], expected, strict=True):
                np.testing.assert_array_equal(got, wanted)


def test_an_all_reduce_may_be_in_place() -> None:
    buffers = [Buffer("y", "output", "fp32", Extent(2), Extent(2), initial="caller")]
    reduce = Collective(
        id="c", stream="compute", collective="all_reduce", source=View("y"), destination=View("y")
    )
    many = numbers(3, 2, 2)
    for scheduler in SCHEDULERS:
        result = interpret(
            program(3, buffers, [], [reduce]), {"y": list(many)}, scheduler=scheduler
        )
        np.testing.assert_array_equal(result.outputs["y"], [many.sum(0)] * 3)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_a_collective_writes_before_all_are_there(rank: int) -> None:
    gather = Collective(
        id="c", stream="compute", collective="all_gather", source=View("x"), destination=View("z")
    )
    copy = Copy(id="copy", stream="side", source=View("z"), destination=View("y"))
    z = symmetric("z", 3, initial="zero", reuse="caller_stream")
    buffers = [sharded("x", 3, role="input"), z, caller("y", 3, role="output")]
    racy = program(3, buffers, [], [gather, copy])
    x = numbers(3, 2)

    def early(manner: Manner, **options) -> list[np.ndarray]:
        begun = BeginFirst("c", manner, rank=rank)
        given = {"x": [x[i : i + 1] for i in range(3)]}
        return interpret(racy, given, scheduler=begun, **options).outputs["y"]

    for place, got in enumerate(early(Manner())):
        assert not got.any(), place
    for place, got in enumerate(early(HOSTILE)):
        assert np.isnan(got).all() if place == rank else not got.any()
    for place, got in enumerate(early(Manner(), pushed_collectives=True)):
        pushed = np.zeros((3, 2))
        if place != rank:
            pushed[rank] = x[rank]
        np.testing.assert_array_equal(got, pushed)


def test_ranks_that_do_not_meet() -> None:
    gather = Collective(
        id="c", stream="compute", collective="all_reduce", source=View("x"), destination=View("y")
    )
    never = Wait(id="never", stream="compute", words=(FlagRef("f"),))
    buffers = [caller("x", 2), caller("y", 2, role="output"), caller("z", 2)]
    given = {name: [np.ones((2, 2))] * 3 for name in "xz"}
    late = program(3, buffers, [Flag("f")], [gather], [never, gather], [gather])
    with pytest.raises(Deadlock) as caught:
        interpret(late, given, scheduler=Random(0))
    assert "operation c of call 0 waits for collective c, at which rank 1 has not" in str(
        caught.value
    )
    other = replace(gather, source=View("z"))
    for issued in ([], [other], [gather, replace(gather, id="d")]):
        with pytest.raises(ProgramError, match=r"rank 1: .*all ranks must issue the same") as error:
            interpret(program(3, buffers, [], [gather], issued, [gather]), given)
        assert error.value.rank == 1


def test_a_collective_whose_blocks_do_not_fill_its_destination_is_refused() -> None:
    gather = Collective(
        id="c",
        stream="compute",
        collective="all_gather",
        source=View("x"),
        destination=View("y", rows=Fixed(0, 3)),
    )
    buffers = [sharded("x", 4, role="input"), caller("y", 4, role="output")]
    with pytest.raises(ProgramError, match="gives 4 x 2 numbers, its destination has 3 x 2"):
        interpret(program(2, buffers, [], [gather]), {"x": [np.ones((2, 2))] * 2})
