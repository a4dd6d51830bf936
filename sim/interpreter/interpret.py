"""`interpret`: run the numbers of a Program, for all ranks, in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import numpy as np

from stretto.schedules.language import InvalidInput, Program, SpanKey, Word, require_shareable
from stretto.sim.interpreter.actions import Actions
from stretto.sim.interpreter.caller import Caller, Inputs, Outputs
from stretto.sim.interpreter.engine import Engine
from stretto.sim.interpreter.functions import FUNCTIONS, Function, refuse_unknown
from stretto.sim.interpreter.meetings import Meetings
from stretto.sim.interpreter.memory import Memory, Words
from stretto.sim.interpreter.schedulers import InOrder, Scheduler
from stretto.sim.interpreter.tasks import Task, Turn, check_collectives, enqueued, turns

__all__ = ["Options", "Result", "interpret", "interpret_sequence"]


class Options(TypedDict, total=False):
    """What can be chosen beside the Programs and their inputs.

    Attributes
    ----------
    scheduler
        Who goes next; by default `InOrder`.
    first_call
        The workspace's use count at the first call; words are as that many calls leave them.
    functions
        What named functions compute, beside or instead of `FUNCTIONS`.
    keep_dtypes
        Round every result to the dtype of its buffer, compute in float32 (in float64 where a
        buffer of fp64 takes part).  By default numbers are float64 and never rounded, so that small
        whole numbers come out exactly.
    hostile_caller
        The caller overwrites inputs and outputs with NaN as soon as it may.  On by default.
    poison_released
        A rank's slot holds NaN from the moment at which the rank signals its release.  On by
        default; wrong for a Program whose writers rely on something else than that signal.
    pushed_collectives
        An all-gather writes to all ranks as soon as one begins it.  Off by default; legal where
        the destination is a symmetric workspace with credits.
    run_ahead
        How many calls a host may be ahead of its device; None is no limit.
    fresh_streams
        Streams of one call know nothing of those of the last, the caller's excepted, as when
        calls are replays of a graph.  Off by default.
    """

    scheduler: Scheduler
    first_call: int
    functions: Mapping[str, Function]
    keep_dtypes: bool
    hostile_caller: bool
    poison_released: bool
    pushed_collectives: bool
    run_ahead: int | None
    fresh_streams: bool


@dataclass(frozen=True)
class Result:
    """What came out.

    Attributes
    ----------
    by_call
        Outputs of every execution: name, then rank.  An array holds the rank's valid rows.
    trace
        Operations of all ranks in the order in which they ended.
    progress
        How many operations ended on every stream, by rank and stream.
    words
        What every flag word holds at the end.
    steps
        Number of decisions of the scheduler.
    """

    by_call: tuple[Outputs, ...]
    trace: tuple[SpanKey, ...]
    progress: Mapping[tuple[int, str], int]
    words: Mapping[Word, int]
    steps: int

    @property
    def outputs(self) -> Outputs:
        """Outputs of the last execution: name, then rank."""
        return self.by_call[-1]


def interpret(
    program: Program,
    inputs: Inputs | Callable[[int], Inputs],
    *,
    calls: int = 1,
    **options: Unpack[Options],
) -> Result:
    """Execute `program` `calls` times, back to back, on one workspace.

    The hosts enqueue everything at once.  Between the executions the caller writes new inputs and
    reads outputs on its own stream, and nothing else holds one call apart from the next.

    Parameters
    ----------
    program
        What to run; one execution is ``program.calls`` uses of the workspace.
    inputs
        One array a rank for every buffer that the caller fills, for all executions or by the
        number of the execution, counted from 0.  Weights are taken the first time alone.
    calls
        Number of executions.
    **options
        See `Options`.

    Raises
    ------
    Deadlock
        If operations are left that cannot go on; it names every stuck stream.
    InvalidInput
        If inputs do not fit, or a function is not known.
    """
    return interpret_sequence([program] * calls, inputs, **options)


def interpret_sequence(
    programs: Sequence[Program],
    inputs: Inputs | Callable[[int], Inputs],
    **options: Unpack[Options],
) -> Result:
    """Execute Programs one after another on one workspace, with one use count.

    A slot of the workspace is as large as the largest Program wants it, and every Program sees its
    own buffers in it, byte for byte.  Inputs, outputs and local buffers are a Program's own.

    Parameters
    ----------
    programs
        In the order of execution; the same one may come again.
    inputs
        As for `interpret`.
    **options
        See `Options`.

    Raises
    ------
    Deadlock
        If operations are left that cannot go on; it names every stuck stream.
    InvalidInput
        If the Programs cannot share a workspace, inputs do not fit, or a function is not known.
    """
    if not programs:
        raise InvalidInput("There is no call to interpret; give at least one.")
    distinct = list({id(program): program for program in programs}.values())
    number = {id(program): index for index, program in enumerate(distinct)}
    order = [number[id(program)] for program in programs]
    require_shareable(distinct, alone=True)
    for program in distinct:
        check_collectives(program)
    functions = {**FUNCTIONS, **options.get("functions", {})}
    refuse_unknown(distinct, functions)

    memory = Memory(distinct, keep_dtypes=options.get("keep_dtypes", False))
    first_call = options.get("first_call", 0)
    words = Words(distinct, first_call)
    actions = Actions(
        distinct,
        memory,
        words,
        Meetings(distinct, memory, pushed=options.get("pushed_collectives", False)),
        functions,
        options.get("poison_released", True),
    )
    caller = Caller(
        distinct,
        memory,
        inputs if callable(inputs) else lambda execution: inputs,
        executions=len(order),
        hostile=options.get("hostile_caller", True),
    )
    tasks = _tasks(distinct, order, first_call, options.get("run_ahead"))
    engine = Engine(
        tasks,
        actions,
        caller,
        options.get("scheduler", InOrder()),
        fresh_streams=options.get("fresh_streams", False),
    )
    with np.errstate(all="ignore"):  # poison is NaN, and meets arithmetic everywhere
        engine.run()
    return Result(
        tuple(caller.outputs), tuple(engine.trace), engine.progress, words.values, engine.steps
    )


def _tasks(
    programs: Sequence[Program], order: Sequence[int], first_call: int, run_ahead: int | None
) -> Iterator[Task]:
    behind: deque[Turn] = deque()
    for turn in turns(programs, order, first_call):
        behind.append(turn)
        held_by = None
        if run_ahead is not None and len(behind) > run_ahead + 1:
            held_by = behind.popleft()
        for rank in range(programs[0].world_size):
            yield from enqueued(programs[turn.program], turn, rank, held_by)
