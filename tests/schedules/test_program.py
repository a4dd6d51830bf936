"""Program as a value: JSON, equality, calls, and what is derived from it."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.schedules import SCHEDULES
from stretto.schedules.language import (
    ALL_COLLECTIVES,
    ALL_VERBS,
    SCHEMA_VERSION,
    Block,
    Body,
    Capabilities,
    Copy,
    Extent,
    Fixed,
    Flag,
    InvalidInput,
    Operation,
    Peer,
    Phase,
    Program,
    ProgramError,
    View,
    Whole,
    from_json,
    load_json_file,
    to_json,
)

CAPABILITIES = Capabilities("test", ALL_VERBS, ALL_COLLECTIVES, signal_orders_puts=True)


def built(variant: str = "ring", world_size: int = 4, m: int = 9, **options) -> Program:
    cls = SCHEDULES["ag-gemm"][variant]
    return cls(
        world_size=world_size, m=m, n=3, k=5, capabilities=CAPABILITIES, **options
    ).build()  # fmt: skip


@given(
    variant=st.sampled_from(sorted(SCHEDULES["ag-gemm"])),
    world_size=st.integers(1, 12),
    m=st.integers(1, 50),
    dtype=st.sampled_from(["bf16", "fp16", "fp32", "fp8"]),
)
def test_built_programs_survive_json(variant: str, world_size: int, m: int, dtype: str) -> None:
    program = built(variant, world_size, m, dtype=dtype)
    text = to_json(program)
    again = from_json(Program, text)
    assert again == program
    assert hash(again) == hash(program)
    assert to_json(again) == text
    assert built(variant, world_size, m, dtype=dtype) == program


def test_one_of_everything_survives_json(everything: Program) -> None:
    kinds = {
        operation.kind
        for phase in everything.phases
        for body in phase.bodies
        for operation in body.operations
    }
    assert kinds == {
        cls.__dataclass_fields__["op"].default for cls in get_args(get_args(Operation)[0])
    }
    assert {flag.kind for flag in everything.flags} == {"epoch", "counter", "mailbox"}
    for indent in (None, 2):
        again = from_json(Program, to_json(everything, indent=indent))
        assert again == everything
    types = {
        type(interval)
        for phase in again.phases
        for body in phase.bodies
        for operation in body.operations
        for view in (*operation.reads(), *operation.writes())
        for interval in (view.rows, view.columns)
    }
    assert types == {Block, Fixed, Whole}


def paths(value: Any, before: tuple = ()) -> Iterator[tuple]:
    if before:
        yield before
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items if isinstance(value, (dict, list)) else ():
        if isinstance(inner, (dict, list)):
            yield from paths(inner, (*before, key))
        else:
            yield (*before, key)


def test_damaged_json_is_refused_in_one_line_or_is_another_program(everything: Program) -> None:
    random_numbers = random.Random(0)
    originals = [json.loads(to_json(program)) for program in (everything, built())]
    places = [list(paths(document)) for document in originals]
    damage = [-1, 0, 1, 7, 2**40, 1.5, "", "x", "y", "send", None, True, [], {}, [1], "full",
              {"offset": 9, "absolute": True}, {"form": "whole"}]  # fmt: skip
    messages = []
    for turn in range(1200):
        document = copy.deepcopy(originals[turn % 2])
        *way, last = random_numbers.choice(places[turn % 2])
        place = document
        for key in way:
            place = place[key]
        if random_numbers.random() < 0.2:
            del place[last]
        else:
            place[last] = random_numbers.choice(damage)
        try:
            program = from_json(Program, json.dumps(document))
        except InvalidInput as error:
            messages.append(str(error))
        else:
            assert from_json(Program, to_json(program)) == program
    assert len(messages) > 800
    assert all(len(message.splitlines()) == 1 for message in messages)


def test_errors_of_json_name_the_source_and_the_place(everything: Program, tmp_path) -> None:
    document = json.loads(to_json(everything))
    with pytest.raises(InvalidInput, match=r"^the text is not a Program in JSON: Invalid JSON"):
        from_json(Program, "{")
    document["buffers"][0]["colour"] = "red"
    with pytest.raises(InvalidInput, match=r"^p\.json is not a Program .* at buffers\.0\.colour: "):
        from_json(Program, json.dumps(document), source="p.json")
    del document["buffers"][0]["colour"]
    gemm = document["phases"][1]["bodies"][0]["operations"][0]
    gemm["a"]["rows"] = {"form": "fixed", "start": "one", "stop": 2}
    place = r"phases\.1\.bodies\.0\.operations\.0\.gemm\.a\.rows\.fixed\.start: "
    with pytest.raises(InvalidInput, match=place):
        from_json(Program, json.dumps(document))
    document = json.loads(to_json(everything)) | {"schema_version": SCHEMA_VERSION + 1}
    with pytest.raises(ProgramError, match="schema version 3, this Stretto reads version 2"):
        from_json(Program, json.dumps(document))
    file = tmp_path / "program.json"
    file.write_text(to_json(everything))
    assert load_json_file(Program, file) == everything
    file.write_text("[]")
    with pytest.raises(InvalidInput, match=r"program\.json is not a Program in JSON"):
        load_json_file(Program, file)
    with pytest.raises(InvalidInput, match=r"missing\.json cannot be read: No such file"):
        load_json_file(Program, tmp_path / "missing.json")


def test_everything_is_frozen(everything: Program) -> None:
    body = everything.phases[0].bodies[0]
    view = body["put"].source
    for value in (
        everything,
        everything.phases[0],
        body,
        *body.operations,
        *everything.buffers,
        *everything.flags,
        view,
        everything.buffers[0].rows,
        body["put"].tags,
        body["put"].signal,
        body["put"].value,
        body["gathers"].tiling,
        body["gathers"].tiling.order,
        body["gathers"].groups[1],
        *body["gathers"].groups[1].gates,
        *body["gathers"].groups[1].emits,
        CAPABILITIES,
    ):
        name = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)
        hash(value)


def test_calls_phases_and_counts(everything: Program) -> None:
    calls = list(everything.call_sequence(5))
    assert [(call.number, call.phase.name, call.repeat) for call in calls] == [
        (5, "first", 0),
        (6, "second", 0),
        (7, "second", 1),
        (8, "second", 2),
    ]
    assert everything.calls == 4
    assert everything.operations == 7 + 7 + 3 * (6 + 1)
    assert everything.sizes == {"m": 9, "n": 3, "k": 4}
    assert not everything.symmetric
    assert everything.phases[1].body(1).operations == everything.phases[1].bodies[1].operations
    assert everything.buffer["sum"].initial == "zero"
    assert everything.flag["count"].kind == "counter"
    assert everything.slot_period == 2
    flags = (*everything.flags, Flag("more", slots=3))
    assert dataclasses.replace(everything, flags=flags).slot_period == 6
    assert built().repeated(3).repeated(2).calls == 6
    with pytest.raises(ProgramError, match="one phase"):
        everything.repeated(2)


def test_without_takes_out_an_operation_and_the_edges_to_it(everything: Program) -> None:
    less = everything.without("put", "gemm")
    assert less.phases[0].bodies[0]["collective"].after == ("fills",)
    assert "put" not in less.phases[0].bodies[0].index
    assert less.phases[1].bodies[1].operations == ()
    assert everything.without() == everything


def test_bodies_know_their_streams(everything: Program) -> None:
    body = everything.phases[0].bodies[0]
    assert body.streams == ("send", "compute")
    assert body["fills"].kind == "signal"
    assert list(body.index) == [operation.id for operation in body.operations]


# ---- the caller ----------------------------------------------------------------------------------


def test_entries_and_exits_of_the_shipped_schedules() -> None:
    expected = {
        "ring": (("put0",), ("put0",)),  # later puts forward what came, out of the workspace
        "direct": (("put0",), ("put2",)),
        "eager": (("put0",), ("put2",)),
        "unfused": ((), ()),
    }
    for variant, (entries, exits) in expected.items():
        program = built(variant)
        body = program.phases[0].bodies[0]
        assert program.entries(body) == entries
        assert program.exits(body) == exits


def test_entries_and_exits_are_one_a_stream_and_follow_roles(everything: Program) -> None:
    def copy_of(id: str, stream: str, source: str, destination: str) -> Copy:
        return Copy(id=id, stream=stream, source=View(source), destination=View(destination))

    body = Body(
        (
            copy_of("a", "compute", "z", "y"),
            copy_of("b", "left", "z", "sum"),
            copy_of("c", "left", "y", "z"),
            copy_of("d", "right", "sum", "y"),
            copy_of("e", "left", "z", "y"),
            copy_of("f", "left", "z", "sum"),
        )
    )
    program = dataclasses.replace(everything, phases=(Phase("call", (body,)),))
    assert program.entries(body) == ("c", "d")
    assert set(program.exits(body)) == {"e", "d"}
    moved = dataclasses.replace(program, caller_stream="left")
    assert moved.entries(body) == ("a", "d")
    assert program.touches_caller(body["a"])
    assert not program.touches_caller(body["b"])


def test_fused_kernels_write_out_their_parts(everything: Program) -> None:
    body = everything.phases[0].bodies[0]
    kernel = dataclasses.replace(body["gathers"], after=("put",))
    parts = list(kernel.parts())
    assert [(part.id, part.kind) for part in parts] == [
        ("gathers/0.gemm", "gemm"),
        ("gathers/1.gate0", "wait"),
        ("gathers/1.gate1", "wait"),
        ("gathers/1.gemm", "gemm"),
        ("gathers/1.emit0", "signal"),
    ]
    assert [part.after for part in parts] == [("put",), (), (), (), ()]
    assert {part.stream for part in parts} == {"compute"}
    (put,) = [part for part in body["scatters"].parts() if part.kind == "put"]
    assert (put.mode, put.signal, put.destination.on) == ("add", None, Peer(1))
    assert {sync for part in parts for sync in part.waits()} == set(kernel.waits())
    assert {sync for part in parts for sync in part.signals()} == set(kernel.signals())
    written = {view for part in parts for view in part.writes()}
    assert written == set(kernel.writes())
    assert {view for part in parts for view in part.reads()} == set(kernel.reads())
    gates_first = dataclasses.replace(
        kernel, groups=(kernel.groups[1], kernel.groups[0])
    )  # fmt: skip
    assert [part.after for part in gates_first.parts()][:2] == [("put",), ()]


def test_extents_may_be_empty_but_programs_may_not() -> None:
    empty = dataclasses.replace(built(), flags=(), buffers=(), phases=(Phase("c", (Body(()),)),))
    assert empty.operations == 0
    assert Extent(0).valid(0, 3) == 0
    with pytest.raises(ProgramError, match="at least one phase"):
        dataclasses.replace(built(), phases=())
