"""Named functions, and the rounding of numbers to the dtypes of their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt

import numpy as np
import pytest

from stretto.schedules.language import (
    Body,
    Buffer,
    Collective,
    Extent,
    Fill,
    Gemm,
    Opaque,
    OperationBase,
    Phase,
    Program,
    Reduce,
    RowOp,
    Unsupported,
    View,
)
from stretto.sim.interpreter import interpret
from stretto.sim.interpreter.rounding import rounded

FLOATS = ("bf16", "fp32", "fp64")


def buffer(name: str, role: str, dtype: str = "fp32", rows: int = 3, columns: int = 2) -> Buffer:
    initial = "undefined" if role == "output" else "caller"
    return Buffer(name, role, dtype, Extent(rows), Extent(columns), initial=initial)


def program(
    buffers: Sequence[Buffer], operations: Sequence[OperationBase], world_size: int = 1
) -> Program:
    return Program(
        name="by-hand",
        variant="test",
        world_size=world_size,
        shape=(),
        dtype="fp32",
        transport="test",
        buffers=tuple(buffers),
        flags=(),
        phases=(Phase("call", (Body(tuple(operations)),)),),
    )


def row_op(
    function: str,
    *inputs: str,
    outputs: int = 1,
    tables: Sequence[str] = (),
    **options: float,
) -> Program:
    """Return a Program of one row operation: inputs [3, 2], tables [1, 2], outputs [3, 2]."""
    names = [f"y{index}" for index in range(outputs)]
    operation = RowOp(
        id="op",
        stream="compute",
        function=function,
        inputs=tuple(View(name) for name in inputs),
        outputs=tuple(View(name) for name in names),
        tables=tuple(View(name) for name in tables),
        options=tuple(sorted(options.items())),
    )
    buffers = [buffer(name, "input") for name in dict.fromkeys(inputs)]
    buffers += [buffer(name, "input", rows=1) for name in tables]
    return program([*buffers, *[buffer(name, "output") for name in names]], [operation])


X, S = np.random.default_rng(0).integers(-9, 10, (2, 3, 2)).astype(float)
W = np.array([[3.0, -2.0]])
GIVEN = {"x": [X], "s": [S], "w": [W]}


def outputs_of(whole: Program, **options) -> list[np.ndarray]:
    """Interpret, and return the outputs in their order."""
    names = [one.name for one in whole.buffers]
    given = {name: values for name, values in GIVEN.items() if name in names}
    outputs = interpret(whole, given, **options).outputs
    return [outputs[name][0] for name in names if name in outputs]


def normed(x: np.ndarray, weight: Sequence[float] = (1.0, 1.0), eps: float = 1e-6) -> list:
    rows = []
    for a, b in x:
        root = sqrt((a * a + b * b) / 2 + eps)
        rows.append([a / root * weight[0], b / root * weight[1]])
    return rows


def test_sums_and_norms() -> None:
    (total,) = outputs_of(row_op("add", "x", "s", "x"))
    np.testing.assert_array_equal(total, 2 * X + S)
    (plain,) = outputs_of(row_op("rms_norm", "x"))
    np.testing.assert_allclose(plain, normed(X), rtol=1e-12)
    (weighted,) = outputs_of(row_op("rms_norm", "x", tables="w", eps=0.5))
    np.testing.assert_allclose(weighted, normed(X, (3.0, -2.0), 0.5), rtol=1e-12)
    total, weighted = outputs_of(row_op("add_rms_norm", "x", "s", outputs=2, tables="w", eps=0.5))
    np.testing.assert_array_equal(total, X + S)
    np.testing.assert_allclose(weighted, normed(X + S, (3.0, -2.0), 0.5), rtol=1e-12)


def test_the_gate() -> None:
    (gated,) = outputs_of(row_op("silu_mul", "x", "s"))
    wanted = [g / (1 + exp(-g)) * u for g, u in zip(X.flat, S.flat, strict=True)]
    np.testing.assert_allclose(gated.ravel(), wanted, rtol=1e-12)


def fp8_program(*, back: bool) -> Program:
    """Return x quantised into q and scale and, with `back`, these dequantised into y."""
    operations = [
        RowOp(
            id="there",
            stream="compute",
            function="quantise_fp8",
            inputs=(View("x"),),
            outputs=(View("q"), View("scale")),
        ),
        RowOp(
            id="back",
            stream="compute",
            function="dequantise_fp8",
            inputs=(View("q"), View("scale")),
            outputs=(View("y"),),
        ),
    ]
    buffers = [
        buffer("x", "input", "bf16", 3, 4),
        buffer("q", "output", "fp8", 3, 4),
        buffer("scale", "output", "fp32", 3, 1),
        buffer("y", "output", "bf16", 3, 4),
    ]
    return program(buffers if back else buffers[:3], operations if back else operations[:1])


def test_fp8_has_a_scale_a_row() -> None:
    x = np.array([[7.0, -3.5, 0.3, 1.75], [0.0, 0.0, 0.0, 0.0], [0.015625, 448.0, -1.0, 100.0]])
    kept = interpret(fp8_program(back=True), {"x": [x]}, keep_dtypes=True).outputs
    scales = np.array([[7 / 448], [2.0**-126], [1.0]])
    np.testing.assert_array_equal(kept["scale"][0], scales)
    # 0.3 is 0.30078125 in bf16, 64 times that 19.25, which lies between 18 and 20 of fp8
    q = [[448.0, -224.0, 20.0, 112.0], [0.0] * 4, [0.015625, 448.0, -1.0, 96.0]]
    np.testing.assert_array_equal(kept["q"][0], q)
    np.testing.assert_array_equal(kept["y"][0], np.array(q) * scales)


def test_what_is_quantised_and_not_rounded_comes_back() -> None:
    x = np.random.default_rng(1).standard_normal((3, 4))
    exact = interpret(fp8_program(back=True), {"x": [x]}).outputs
    np.testing.assert_allclose(exact["y"][0], x, rtol=1e-15)
    np.testing.assert_allclose(np.abs(exact["q"][0]).max(1), 448, rtol=1e-15)


def test_top_k_takes_the_first_of_equals() -> None:
    x = np.array([[1.0, 3.0, 3.0, 2.0], [0.0, -1.0, 0.0, 0.0]])
    operation = RowOp(
        id="op",
        stream="compute",
        function="top_k",
        inputs=(View("x"),),
        outputs=(View("v"), View("j")),
        options=(("k", 3.0),),
    )
    buffers = [
        buffer("x", "input", "bf16", 2, 4),
        buffer("v", "output", "bf16", 2, 3),
        buffer("j", "output", "int32", 2, 3),
    ]
    outputs = interpret(program(buffers, [operation]), {"x": [x]}, keep_dtypes=True).outputs
    assert outputs["v"][0].tolist() == [[3.0, 3.0, 2.0], [0.0, 0.0, 0.0]]
    assert outputs["j"][0].tolist() == [[1, 2, 3], [0, 2, 3]]


def test_functions_of_the_caller() -> None:
    (mine,) = outputs_of(row_op("add", "x"), functions={"add": lambda x: -x})
    np.testing.assert_array_equal(mine, -X)
    table = {"clip": lambda x, w, *, low: np.maximum(x * w, low)}
    (clipped,) = outputs_of(row_op("clip", "x", tables="w", low=-4.0), functions=table)
    np.testing.assert_array_equal(clipped, np.maximum(X * W, -4))


def test_functions_that_are_not_known_or_return_too_little_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"op needs the function 'router'.* functions="):
        interpret(row_op("router", "x"), {"x": [np.ones((3, 2))]})
    with pytest.raises(Unsupported, match="'whole' returned 1 arrays for the 2 outputs"):
        interpret(
            row_op("whole", "x", outputs=2),
            {"x": [np.ones((3, 2))]},
            functions={"whole": lambda x: x},
        )
    both = {"split": lambda x: (x + 1, x - 1)}
    outputs = interpret(
        row_op("split", "x", outputs=2), {"x": [np.zeros((3, 2))]}, functions=both
    ).outputs
    assert set(outputs["y0"][0].flat) == {1}
    assert set(outputs["y1"][0].flat) == {-1}
    opaque = Opaque(
        id="core",
        stream="compute",
        function="attention",
        inputs=(View("x"),),
        outputs=(View("y"),),
        flops=1.0,
        moved_bytes=1.0,
    )
    whole = program([buffer("x", "input"), buffer("y", "output")], [opaque])
    with pytest.raises(Unsupported, match="'attention'"):
        interpret(whole, {"x": [np.ones((3, 2))]})
    result = interpret(whole, {"x": [np.ones((3, 2))]}, functions={"attention": lambda x: 3 * x})
    assert set(result.outputs["y"][0].flat) == {3}


def test_results_are_rounded_to_the_dtype_of_their_buffer_once() -> None:
    outs = ("bf16", "fp16", "fp32", "fp8", "int32")
    buffers = [buffer(name, "input", "bf16", 1, 3) for name in "ab"]
    buffers += [buffer(dtype, "output", dtype, 1, 1) for dtype in outs]
    operations = [
        Gemm(id=dtype, stream="compute", a=View("a"), b=View("b"), out=View(dtype))
        for dtype in outs
    ]
    whole = program(buffers, operations)
    given = {"a": [np.array([[1.0, 1.0, 2.0**-9]])], "b": [np.array([[16.0, 0.55, 1.0]])]}
    exact = interpret(whole, given).outputs
    kept = interpret(whole, given, keep_dtypes=True).outputs
    assert {float(exact[dtype][0][0, 0]) for dtype in outs} == {16.55 + 2.0**-9}
    assert {kept[dtype][0].dtype for dtype in outs} == {np.dtype(np.float32)}
    b = 0.55078125  # 0.55 in bf16
    assert float(kept["fp32"][0][0, 0]) == 16 + b + 2.0**-9
    assert float(kept["bf16"][0][0, 0]) == 16.5
    assert float(kept["fp16"][0][0, 0]) == 16.546875
    assert float(kept["fp8"][0][0, 0]) == 16.0
    assert float(kept["int32"][0][0, 0]) == 17.0


def test_sums_are_rounded_once_at_their_end() -> None:
    # 256 + 1 is a tie in bf16 and would fall back to 256 if every addition were rounded.
    x = [np.full((1, 1), value) for value in (256.0, 1.0, 1.0)]
    names = [buffer(name, "input", "bf16", 1, 1) for name in "abc"]
    y = buffer("y", "output", "bf16", 1, 1)
    add = Reduce(
        id="r", stream="compute", inputs=(View("a"), View("b"), View("c")), out=View("y")
    )  # fmt: skip
    given = {name: [value] for name, value in zip("abc", x, strict=True)}
    got = interpret(program([*names, y], [add]), given, keep_dtypes=True).outputs["y"]
    assert float(got[0][0, 0]) == 258.0
    everyone = Collective(
        id="c", stream="compute", collective="all_reduce", source=View("a"), destination=View("y")
    )
    got = interpret(program([names[0], y], [everyone], 3), {"a": x}, keep_dtypes=True).outputs["y"]
    assert [float(value[0, 0]) for value in got] == [258.0] * 3


def test_fp64_is_computed_in_fp64_and_all_else_in_fp32() -> None:
    """2 ** 24 + 1 is a number of fp64 and none of fp32; 256 + 1 is none of bf16."""
    buffers = [buffer(f"{name}{dtype}", "input", dtype, 1, 1) for dtype in FLOATS for name in "ab"]
    buffers += [buffer(dtype, "output", dtype, 1, 1) for dtype in FLOATS]
    operations = [
        Reduce(
            id=dtype,
            stream="compute",
            inputs=(View(f"a{dtype}"), View(f"b{dtype}"), View(f"b{dtype}")),
            out=View(dtype),
        )
        for dtype in FLOATS
    ]
    given = {f"b{dtype}": [np.full((1, 1), 1.0)] for dtype in FLOATS}
    given |= {f"a{dtype}": [np.full((1, 1), 2.0**24)] for dtype in FLOATS}
    given["abf16"] = [np.full((1, 1), 256.0)]
    kept = interpret(program(buffers, operations), given, keep_dtypes=True).outputs
    found = {dtype: float(kept[dtype][0][0, 0]) for dtype in FLOATS}
    assert found == {"bf16": 258.0, "fp32": 2.0**24, "fp64": 2.0**24 + 2}


def test_a_fill_is_rounded_too() -> None:
    fill = Fill(id="fill", stream="compute", destination=View("y"), number=0.55)
    whole = program([buffer("y", "output", "bf16")], [fill])
    assert set(interpret(whole, {}, keep_dtypes=True).outputs["y"][0].flat) == {0.55078125}


def float8(code: int) -> float:
    """Return what an e4m3 code stands for: 1 sign, 4 exponent and 3 fraction bits."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = code >> 3 & 0xF, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (8 + fraction) * 2.0 ** (exponent - 10)


def test_fp8_is_e4m3() -> None:
    every = np.array([float8(code) for code in range(256)], np.float32)
    np.testing.assert_array_equal(rounded(every, "fp8"), every)
    positive = every[:0x7F].astype(np.float64)
    middle = ((positive[:-1] + positive[1:]) / 2).astype(np.float32)
    even = np.where(np.arange(len(middle)) % 2 == 0, positive[:-1], positive[1:])
    np.testing.assert_array_equal(rounded(middle, "fp8"), even)  # the code is even, so is the bit
    np.testing.assert_array_equal(rounded(np.nextafter(middle, np.inf), "fp8"), positive[1:])
    np.testing.assert_array_equal(rounded(np.nextafter(middle, -np.inf), "fp8"), positive[:-1])
    large = np.array([463.9, 465.0, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(rounded(large, "fp8"), [448, np.nan, np.nan, np.nan])


def test_bf16_is_the_upper_half_of_a_float() -> None:
    codes = np.arange(2**16, dtype=np.uint32)
    every = (codes << np.uint32(16)).view(np.float32)
    finite = every[np.isfinite(every)]
    np.testing.assert_array_equal(rounded(finite, "bf16"), finite)
    np.testing.assert_array_equal(rounded(np.array([np.nan], np.float32), "bf16"), [np.nan])
    low = codes[:0x7F7F]
    middle = ((low << np.uint32(16)) | np.uint32(0x8000)).view(np.float32)
    even = ((low + (low & np.uint32(1))) << np.uint32(16)).view(np.float32)
    np.testing.assert_array_equal(rounded(middle, "bf16"), even)
    infinite = np.array([3.4e38, -3.4e38], np.float32)
    np.testing.assert_array_equal(rounded(infinite, "bf16"), [np.inf, -np.inf])


def test_fp16_overflows_and_fp32_stays() -> None:
    values = np.array([65504.0, 65520.0, 1 / 3], np.float32)
    np.testing.assert_array_equal(rounded(values, "fp16"), [65504, np.inf, np.float16(1 / 3)])
    np.testing.assert_array_equal(rounded(values, "fp32"), values)
