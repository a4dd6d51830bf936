"""The torch form of every named row operation against the numpy form; sums to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stretto.runtime import row_operations
from stretto.runtime.lowering import lower
from stretto.runtime.row_operations import TORCH_FORMS
from stretto.runtime.tensors import torch_dtype
from stretto.schedules.language import (
    ROW_OPERATIONS,
    Body,
    Buffer,
    Extent,
    Fixed,
    Operation,
    Phase,
    Program,
    Reduce,
    RowOp,
    Unsupported,
    View,
)
from stretto.schedules.language.row_operations import Operand
from stretto.sim.interpreter import FUNCTIONS, interpret
from stretto.sim.interpreter.rounding import rounded

SHAPES = [(1, 1), (1, 7), (3, 5), (9, 64), (4, 129), (2, 1000)]
DTYPES = ["bf16", "fp16", "fp32", "fp64"]
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "fp64": 2.0**-53}
"""Half the distance from 1 to the next number."""

SAME_TO_THE_BIT = {"add", "quantise_fp8", "dequantise_fp8", "top_k"}
"""Those whose forms make the same roundings in the same order."""


def one_operation(
    operation: Operation,
    shapes: Mapping[str, tuple[str, int, int]],
    outputs: Sequence[str],
    *,
    scratch: Sequence[Buffer] = (),
    then: Sequence[Operation] = (),
) -> Program:
    return Program(
        name="one",
        variant="test",
        world_size=1,
        shape=(),
        dtype="fp32",
        transport="test",
        buffers=tuple(
            Buffer(name, "output", dtype, Extent(rows), Extent(columns))
            if name in outputs
            else Buffer(name, "input", dtype, Extent(rows), Extent(columns), initial="caller")
            for name, (dtype, rows, columns) in shapes.items()
        )
        + tuple(scratch),
        flags=(),
        phases=(Phase("call", (Body((operation, *then)),)),),
    )


def by_torch(program: Program, given: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Lower a Program of one rank that needs no transport, launch it, and return the outputs."""
    tensors = {
        buffer.name: torch.from_numpy(given[buffer.name]).to(torch_dtype(buffer.dtype))
        if buffer.name in given
        else torch.full(
            (buffer.rows.size, buffer.columns.size), 99, dtype=torch_dtype(buffer.dtype)
        )
        for buffer in program.buffers
    }
    local = SimpleNamespace(rank=0, world_size=1, device=None)
    executable = lower(program, transport=local, workspace=None, tensors=tensors, gemm=None)
    for lowered in executable.phases[0]:
        lowered.launches[0](0)
    return {one.name: tensors[one.name] for one in program.buffers if one.role == "output"}


def by_numpy(program: Program, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    inputs = {name: [values] for name, values in given.items()}
    outputs = interpret(program, inputs, keep_dtypes=True).outputs
    return {name: values for name, (values,) in outputs.items()}


def numbers(rows: int, columns: int, dtype: str, seed: int) -> np.ndarray:
    """Return numbers of very different sizes, and where there are three rows one of zeros."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, columns)) * np.exp(random.uniform(-4, 4, (rows, 1)))
    if rows > 2:
        values[1] = 0.0
    return rounded(values, dtype)


def cases(name: str) -> list[tuple[int, int, str, dict[str, float]]]:
    entry = ROW_OPERATIONS[name]
    options: list[dict[str, float]] = [{}]
    for option, spec in entry.options:
        options.append({option: spec.default * 3})
    found = []
    for (rows, columns), dtype, chosen in product(SHAPES, DTYPES, options):
        if chosen.get("k", 1) <= columns:
            found.append((rows, columns, dtype, chosen))
    return found


def dtype_of(operand: Operand, dtype: str, others: Mapping[str, str]) -> str:
    allowed = (others[operand.like],) if operand.like else operand.dtypes
    return dtype if dtype in allowed else allowed[0]


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("name", ROW_OPERATIONS)
def test_both_forms_agree(name: str, optional: bool) -> None:
    entry = ROW_OPERATIONS[name]
    for rows, columns, dtype, options in cases(name):
        inputs = (*entry.inputs, *(2 * entry.inputs[-1:] if entry.inputs[-1].repeats else ()))
        tables = [one for one in entry.tables if optional or not one.optional]
        complete = entry.completed(options)
        shapes: dict[str, tuple[str, int, int]] = {}
        named: dict[str, list[str]] = {"input": [], "table": [], "output": []}
        dtypes: dict[str, str] = {}
        for kind, operands in (("input", inputs), ("table", tables), ("output", entry.outputs)):
            for number, operand in enumerate(operands):
                held = dtypes[operand.name] = dtype_of(operand, dtype, dtypes)
                width = columns if operand.columns == "n" else 0
                width = width or int(complete.get(operand.columns, 0)) or int(operand.columns)
                named[kind].append(f"{kind}{number}")
                shapes[f"{kind}{number}"] = (held, 1 if kind == "table" else rows, width)
        operation = RowOp(
            id="op",
            stream="compute",
            function=name,
            inputs=tuple(View(one) for one in named["input"]),
            tables=tuple(View(one) for one in named["table"]),
            outputs=tuple(View(one) for one in named["output"]),
            options=tuple(sorted(options.items())),
        )
        program = one_operation(operation, shapes, named["output"])
        given = {
            one: numbers(shapes[one][1], shapes[one][2], shapes[one][0], seed)
            for seed, one in enumerate((*named["input"], *named["table"]))
        }
        ours, theirs = by_torch(program, given), by_numpy(program, given)
        wide = "fp64" if "fp64" in {held for held, _, _ in shapes.values()} else "fp32"
        for output in named["output"]:
            held = shapes[output][0]
            got = ours[output].to(torch.float64).numpy()
            wanted = theirs[output].astype(np.float64)
            where = f"{output} of {rows} x {columns} {dtype}, {options}"
            if name in SAME_TO_THE_BIT:
                np.testing.assert_array_equal(got, wanted, err_msg=where)
                continue
            # The means differ by n roundings at most, all else by a few, the result by one more.
            unit = (columns + 16) * UNIT[wide] + (2 * UNIT[held] if held != wide else 0.0)
            np.testing.assert_allclose(got, wanted, rtol=unit, atol=0.0, err_msg=where)


def test_every_entry_has_both_forms_and_no_form_is_without_an_entry() -> None:
    assert set(FUNCTIONS) == set(TORCH_FORMS) == set(ROW_OPERATIONS)


def test_options_and_tables_reach_the_torch_form() -> None:
    shapes = {"x": ("fp32", 2, 3), "w": ("fp32", 1, 3), "y": ("fp32", 2, 3)}
    norm = RowOp(
        id="op",
        stream="compute",
        function="rms_norm",
        inputs=(View("x"),),
        outputs=(View("y"),),
        tables=(View("w"),),
        options=(("eps", 0.75),),
    )
    x = np.array([[0.5, 0.5, -0.5], [0.0, 0.0, 0.0]])
    got = by_torch(one_operation(norm, shapes, ["y"]), {"x": x, "w": np.array([[1.0, 2.0, 4.0]])})
    # the mean of squares is 1/4, its root with eps 1
    np.testing.assert_allclose(got["y"].numpy(), [[0.5, 1.0, -2.0], [0.0, 0.0, 0.0]], rtol=1e-6)


def test_a_quantised_row_is_within_half_a_step_of_fp8() -> None:
    shapes = {"x": ("bf16", 9, 200), "q": ("fp8", 9, 200), "scale": ("fp32", 9, 1)}
    quantise = RowOp(
        id="op",
        stream="compute",
        function="quantise_fp8",
        inputs=(View("x"),),
        outputs=(View("q"), View("scale")),
    )
    x = numbers(9, 200, "bf16", 5)
    got = by_torch(one_operation(quantise, shapes, ["q", "scale"]), {"x": x})
    q, scale = got["q"].float().numpy(), got["scale"].numpy()
    largest = np.abs(q).max(axis=1)
    assert set(largest) == {0.0, 448.0}  # of the row of zeros, and of all others
    # a number has 3 fraction bits, or is a multiple of 2 ** -9
    step = np.maximum(np.abs(x) / 16, scale * 2.0**-10)
    assert (np.abs(q * scale - x) <= step * (1 + 1e-6)).all()


@pytest.mark.parametrize("name", ["add", "add_rms_norm", "rms_norm", "silu_mul"])
def test_an_output_may_be_an_input(name: str) -> None:
    """In place: what an output's rectangle held is read before it is written."""
    entry = ROW_OPERATIONS[name]
    inputs = [
        torch.from_numpy(numbers(4, 6, "fp32", seed)).float() for seed in range(len(entry.inputs))
    ]
    apart = [torch.empty(4, 6) for _ in entry.outputs]
    TORCH_FORMS[name](apart, *inputs, **entry.completed({}))
    for number in range(len(entry.outputs)):
        tensors = [one.clone() for one in inputs]
        outputs = [torch.empty(4, 6) for _ in entry.outputs]
        outputs[number] = tensors[0]
        TORCH_FORMS[name](outputs, *tensors, **entry.completed({}))
        for got, wanted in zip(outputs, apart, strict=True):
            assert torch.equal(got, wanted)


def test_fp8_and_scales_in_scratch() -> None:
    """Quantised and dequantised by way of the library's own memory, some rows and columns of it."""
    part = (Fixed(1, 4), Fixed(2, 7))
    q, scale = View("q", *part), View("scale", Fixed(2, 5))
    there = RowOp(
        id="there",
        stream="compute",
        function="quantise_fp8",
        inputs=(View("x"),),
        outputs=(q, scale),
    )
    back = RowOp(
        id="back",
        stream="compute",
        function="dequantise_fp8",
        inputs=(q, scale),
        outputs=(View("y"),),
    )
    shapes = {"x": ("bf16", 3, 5), "y": ("bf16", 3, 5)}
    scratch = (
        Buffer("q", "workspace", "fp8", Extent(6), Extent(8), initial="zero"),
        Buffer("scale", "workspace", "fp32", Extent(5), Extent(1)),
    )
    program = one_operation(there, shapes, ["y"], scratch=scratch, then=[back])
    given = {"x": numbers(3, 5, "bf16", 2)}
    got, wanted = by_torch(program, given)["y"], by_numpy(program, given)["y"]
    np.testing.assert_array_equal(got.float().numpy(), wanted)


def test_a_function_that_is_not_in_the_table_is_refused_by_name() -> None:
    shapes = {"x": ("fp32", 2, 3), "y": ("fp32", 2, 3)}
    mine = RowOp(
        id="op", stream="compute", function="mine", inputs=(View("x"),), outputs=(View("y"),)
    )
    with pytest.raises(Unsupported, match="operation op: row_op 'mine' cannot be executed"):
        by_torch(one_operation(mine, shapes, ["y"]), {"x": np.zeros((2, 3))})


# ---- sums ----------------------------------------------------------------------------------------


def terms_of(count: int, rows: int, columns: int, dtype: str) -> dict[str, np.ndarray]:
    """Return terms that cancel each other in part, so that their order shows, and zeros of both
    signs.
    """
    random = np.random.default_rng(count)
    terms = random.standard_normal((count, rows, columns)) * 2.0 ** random.integers(
        -8, 8, (count, rows, columns)
    )
    terms[1::2] -= terms[: 2 * (count // 2) : 2]
    terms[:, 0, 0] = -0.0
    return {f"t{number}": rounded(term, dtype) for number, term in enumerate(terms)}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(whole[tensor.element_size()])


@pytest.mark.parametrize("chunk", [1 << 16, 8])
@pytest.mark.parametrize("dtype", [*DTYPES, "fp8"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_reduce_is_the_same_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, count: int, dtype: str, chunk: int
) -> None:
    monkeypatch.setattr(row_operations, "_CHUNK", chunk)
    given = terms_of(count, 7, 5, dtype)
    shapes = dict.fromkeys((*given, "y"), (dtype, 7, 5))
    reduce = Reduce(
        id="op", stream="compute", inputs=tuple(View(name) for name in given), out=View("y")
    )
    program = one_operation(reduce, shapes, ["y"])
    (ours,) = by_torch(program, given).values()
    (theirs,) = by_numpy(program, given).values()
    assert torch.equal(bits(ours), bits(torch.from_numpy(theirs).to(ours.dtype)))


def test_a_sum_keeps_the_given_order_and_rounds_once() -> None:
    """In bf16 256 + 1 is 256; in fp32 2 ** 24 + 1 is 2 ** 24."""
    shapes = dict.fromkeys(("a", "b", "c", "y"), ("bf16", 1, 2))
    reduce = Reduce(
        id="op", stream="compute", inputs=(View("a"), View("b"), View("c")), out=View("y")
    )
    one, big = np.ones((1, 1)), np.full((1, 1), 2.0**24)
    given = {
        "a": np.hstack([256 * one, big]),
        "b": np.hstack([one, one]),
        "c": np.hstack([one, -big]),
    }
    program = one_operation(reduce, shapes, ["y"])
    assert by_torch(program, given)["y"].tolist() == [[258.0, 0.0]]
    other = one_operation(replace(reduce, inputs=(View("a"), View("c"), View("b"))), shapes, ["y"])
    assert by_torch(other, given)["y"].tolist() == [[258.0, 1.0]]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_sum_into_one_of_its_terms(dtype: str, place: int) -> None:
    terms = [
        torch.from_numpy(one).to(torch_dtype(dtype)) for one in terms_of(3, 7, 5, dtype).values()
    ]
    apart = torch.empty_like(terms[0])
    row_operations.sum_into(terms, apart)
    row_operations.sum_into(terms, terms[place])
    assert torch.equal(terms[place], apart)


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(SAME_TO_THE_BIT))
def test_a_gpu_gives_the_same_bits(name: str) -> None:
    entry = ROW_OPERATIONS[name]
    shapes = {"n": 129, "1": 1, "k": 1}
    inputs = (*entry.inputs, *(3 * entry.inputs[-1:] if entry.inputs[-1].repeats else ()))
    for dtype, count in product(["bf16", "fp32"], range(len(entry.inputs), len(inputs) + 1)):
        given = []
        for seed, operand in enumerate(inputs[:count]):
            held = dtype_of(operand, dtype, {})
            values = numbers(70, shapes[operand.columns], held, seed)
            given.append(torch.from_numpy(values).to(torch_dtype(held)))
        found = {}
        for device in ("cpu", "cuda"):
            outputs = [
                torch.empty(
                    (70, shapes[one.columns]),
                    dtype=torch_dtype(dtype_of(one, dtype, {"x": dtype})),
                    device=device,
                )
                for one in entry.outputs
            ]
            TORCH_FORMS[name](outputs, *(one.to(device) for one in given), **entry.completed({}))
            found[device] = [bits(one.cpu()) for one in outputs]
        for ours, theirs in zip(found["cpu"], found["cuda"], strict=True):
            assert torch.equal(ours, theirs)
