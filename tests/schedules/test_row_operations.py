"""The table of named row operations: what a RowOp of each name may take, and what a row costs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from stretto.schedules.language import (
    ROW_OPERATIONS,
    Body,
    Buffer,
    Extent,
    Fixed,
    Phase,
    Program,
    ProgramError,
    RowOp,
    View,
    from_json,
    options_of,
    to_json,
)

OPERANDS: Mapping[str, tuple[str, int, int]] = {
    "a": ("bf16", 4, 6),
    "b": ("fp32", 4, 6),
    "narrow": ("bf16", 4, 5),
    "q": ("fp8", 4, 6),
    "scale": ("fp32", 4, 1),
    "whole": ("int32", 4, 6),
    "two": ("bf16", 4, 2),
    "two32": ("fp32", 4, 2),
    "columns": ("int32", 4, 2),
    "w": ("bf16", 1, 6),
    "y": ("bf16", 4, 6),
    "z": ("fp32", 4, 6),
}
"""dtype, rows and columns of every buffer."""


def program(
    function: str,
    inputs: str,
    outputs: str,
    tables: str = "",
    options: tuple[tuple[str, float], ...] = (),
) -> Program:
    """Return a Program of one row operation on two ranks; names are parted by blanks."""
    operation = RowOp(
        id="op",
        stream="compute",
        function=function,
        inputs=tuple(View(name) for name in inputs.split()),
        outputs=tuple(View(name) for name in outputs.split()),
        tables=tuple(View(name) for name in tables.split()),
        options=options,
    )
    return Program(
        name="one",
        variant="test",
        world_size=2,
        shape=(),
        dtype="bf16",
        transport="test",
        buffers=tuple(
            Buffer(name, "workspace", dtype, Extent(rows), Extent(columns), initial="zero")
            for name, (dtype, rows, columns) in OPERANDS.items()
        ),
        flags=(),
        phases=(Phase("call", (Body((operation,)),)),),
    )


GOOD = [
    ("add", "a", "y", "", ()),
    ("add", "a b q", "z", "", ()),
    ("rms_norm", "a", "y", "", ()),
    ("rms_norm", "a", "z", "w", (("eps", 1e-5),)),
    ("add_rms_norm", "a b", "b y", "w", ()),
    ("silu_mul", "a b", "y", "", ()),
    ("quantise_fp8", "a", "q scale", "", ()),
    ("dequantise_fp8", "q scale", "y", "", ()),
    ("top_k", "a", "two columns", "", (("k", 2.0),)),
    ("mine", "a two", "scale", "b", (("beta", -1.0), ("zeta", 3.0))),
    ("mine", "", "y", "", ()),
]


@pytest.mark.parametrize("case", GOOD, ids=lambda case: " ".join(case[:4]))
def test_what_the_table_allows(case: tuple) -> None:
    made = program(*case)
    assert from_json(Program, to_json(made)) == made


BAD = [
    ("add", "", "y", "", (), "'add' takes at least 1 input, not 0"),
    ("add", "a b", "y z", "", (), "'add' gives 1 output, not 2"),
    ("add", "a narrow", "y", "", (), "input 'x' of 'add' has 5 columns; it must have 6"),
    ("add", "a a", "narrow", "", (), "output 'y' of 'add' has 5 columns; it must have 6"),
    ("add", "a whole", "y", "", (), "input 'x' of 'add' is int32; it must be bf16 or fp16 or "),
    ("add", "a b", "y", "w", (), "'add' takes 0 tables, not 1"),
    ("add", "a b", "y", "", (("eps", 1.0),), "'add' has no option 'eps'; it has no options"),
    ("rms_norm", "a w", "y", "", (), "views differ in rows"),
    ("rms_norm", "a b", "y", "", (), "'rms_norm' takes 1 input, not 2"),
    ("rms_norm", "a", "y", "w w", (), "'rms_norm' takes 0 to 1 tables, not 2"),
    ("rms_norm", "a", "y", "b", (), "table 'w' of 'rms_norm' has 4 rows; it must have 1"),
    ("rms_norm", "narrow", "narrow", "w", (), "table 'w' of 'rms_norm' has 6 columns; it must h"),
    ("rms_norm", "a", "y", "", (("eps", -1.0),), "'eps' is -1; it must be at least 0 and at most"),
    ("rms_norm", "a", "y", "", (("eps", 2.0),), "'eps' is 2; it must be at least 0 and at most 1"),
    ("rms_norm", "a", "y", "", (("eps", float("nan")),), "'eps' is nan; it must be a finite numb"),
    ("rms_norm", "a", "y", "", (("epsilon", 1.0),), "no option 'epsilon'; it has eps"),
    ("add_rms_norm", "a b", "y", "", (), "'add_rms_norm' gives 2 outputs, not 1"),
    ("silu_mul", "a", "y", "", (), "'silu_mul' takes 2 inputs, not 1"),
    ("quantise_fp8", "a", "y scale", "", (), "output 'q' of 'quantise_fp8' is bf16; it must be f"),
    ("quantise_fp8", "a", "q two32", "", (), "output 'scale' of .* has 2 columns; it must have 1"),
    ("dequantise_fp8", "a scale", "y", "", (), "input 'q' of .* is bf16; it must be fp8"),
    ("top_k", "a", "two columns", "", (), "output 'v' of 'top_k' has 2 columns; it must have 1"),
    ("top_k", "a", "two32 columns", "", (("k", 2.0),), "output 'v' of 'top_k' is fp32; it must "),
    ("top_k", "a", "two columns", "", (("k", 1.5),), "option 'k' is 1.5; it must be a whole numb"),
    ("top_k", "a", "two columns", "", (("k", 7.0),), "'k' is 7; 'top_k' of 6 columns takes at mo"),
    ("top_k", "a", "two columns", "", (("k", 0.0),), "option 'k' is 0; it must be at least 1"),
    ("mine", "a", "y", "", (("b", 1.0), ("a", 1.0)), "options must be sorted by name, each given"),
    ("mine", "a", "y", "", (("a", 1.0), ("a", 2.0)), "options must be sorted by name, each given"),
    ("mine", "a", "y", "", (("a", float("inf")),), "option 'a' is inf; it must be a finite number"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[5])
def test_what_the_table_refuses(case: tuple) -> None:
    with pytest.raises(ProgramError, match=case[5]) as caught:
        program(*case[:5])
    assert (caught.value.rank, caught.value.operation) == (0, "op")


def test_the_rank_that_differs_is_named() -> None:
    """A shard of the columns: rank 1 has one column less."""
    whole = program("add", "a", "y")
    (operation,) = whole.phases[0].bodies[0].operations
    shard = Buffer("y", "workspace", "bf16", Extent(4), Extent(11, "shard"), initial="zero")
    buffers = tuple(shard if one.name == "y" else one for one in whole.buffers)
    with pytest.raises(ProgramError, match="output 'y' of 'add' has 5 columns") as caught:
        Program(
            name="one",
            variant="test",
            world_size=2,
            shape=(),
            dtype="bf16",
            transport="test",
            buffers=buffers,
            flags=(),
            phases=(Phase("call", (Body((operation,)),)),),
        )
    assert caught.value.rank == 1


def test_tables_are_read_and_options_have_defaults() -> None:
    norm = RowOp(
        id="n",
        stream="s",
        function="rms_norm",
        inputs=(View("a"),),
        outputs=(View("y"),),
        tables=(View("w", Fixed(0, 1)),),
    )
    assert norm.reads() == (View("a"), View("w", Fixed(0, 1)))
    assert options_of(norm) == {"eps": 1e-6}
    mine = RowOp(id="m", stream="s", function="mine", inputs=(), outputs=(), options=(("a", 2.0),))
    assert options_of(mine) == {"a": 2.0}


@pytest.mark.parametrize(
    ("name", "inputs", "options", "flops"),
    [
        ("add", 3, {}, 2 * 64),
        ("rms_norm", 1, {}, 4 * 64 + 3),
        ("add_rms_norm", 2, {}, 5 * 64 + 3),
        ("silu_mul", 2, {}, 5 * 64),
        ("quantise_fp8", 1, {}, 3 * 64 + 2),
        ("dequantise_fp8", 2, {}, 64),
        ("top_k", 1, {}, 64),
        ("top_k", 1, {"k": 8.0}, 4 * 64),
    ],
)
def test_cost_of_a_row(name: str, inputs: int, options: dict, flops: float) -> None:
    assert ROW_OPERATIONS[name].flops_per_row(64, inputs, options) == flops


def test_bytes_of_a_row() -> None:
    moved = ROW_OPERATIONS["quantise_fp8"].bytes_per_row([(64, "bf16"), (64, "fp8"), (1, "fp32")])
    assert moved == 2 * 64 + 64 + 4
