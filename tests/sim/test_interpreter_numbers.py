"""Named functions, and the rounding of numbers to the dtypes of their buffers."""

from __future__ import annotations

from collections.abc import Sequence

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


def row_op(function: str, *inputs: str, outputs: int = 1) -> Program:
    names = [f"y{index}" for index in range(outputs)]
    operation = RowOp(
        id="op",
        stream="compute",
        function=function,
        inputs=tuple(View(name) for name in inputs),
        outputs=tuple(View(name) for name in names),
    )
    buffers = [buffer(name, "input") for name in dict.fromkeys(inputs)]
    return program([*buffers, *[buffer(name, "output") for name in names]], [operation])


def test_named_functions() -> None:
    x, s = np.random.default_rng(0).integers(-9, 10, (2, 3, 2)).astype(float)
    given = {"x": [x], "s": [s]}

    def got(function: str, *inputs: str, **options) -> np.ndarray:
        wanted = {name: given[name] for name in inputs}
        return interpret(row_op(function, *inputs), wanted, **options).outputs["y0"][0]

    np.testing.assert_array_equal(got("scale", "x", "s"), x * s)
    np.testing.assert_array_equal(got("copy", "x"), x)
    rms = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(got("rms_norm", "x"), rms, rtol=1e-12)
    np.testing.assert_allclose(got("rms_norm", "x", "s"), rms * s, rtol=1e-12)
    np.testing.assert_array_equal(got("add", "x", functions={"add": lambda x: -x}), -x)


def test_functions_that_are_not_known_or_return_too_little_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"op needs the function 'router'.* functions="):
        interpret(row_op("router", "x"), {"x": [np.ones((3, 2))]})
    with pytest.raises(Unsupported, match="'add' returned 1 arrays for the 2 outputs"):
        interpret(row_op("add", "x", outputs=2), {"x": [np.ones((3, 2))]})
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
