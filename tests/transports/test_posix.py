"""The parts below shared_memory, in one process."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest

from stretto.schedules.language import InvalidInput, RunFailed, Unsupported, WorkspaceLayout
from stretto.transports.interface import Memory
from stretto.transports.posix.copying import copier, from_bf16, summer, to_bf16, view
from stretto.transports.posix.futex import SharedWord, fence, probe
from stretto.transports.posix.gate import Gate
from stretto.transports.posix.workspace import Plan


def _memory(array: np.ndarray) -> Memory:
    return Memory(
        array.ctypes.data, array.shape[0], array.shape[1] * array.itemsize, array.strides[0]
    )


def test_futex_works_here() -> None:
    assert probe() is None
    fence()


@pytest.mark.parametrize("addend", [0, 1, 2047, 2048, 2049, 70_001, 2**30, 2**31 - 1, 0x55555555])
def test_adders_add_exactly(addend: int) -> None:
    word = ctypes.c_uint32(2**32 - 3)
    for add in SharedWord(ctypes.addressof(word)).adder(addend):
        add()
    assert word.value == (2**32 - 3 + addend) % 2**32


@pytest.mark.parametrize("addend", [-1, 2**31])
def test_addend_beyond_cyclic_comparison_is_refused(addend: int) -> None:
    word = ctypes.c_uint32(0)
    with pytest.raises(InvalidInput, match="adds 0 to"):
        SharedWord(ctypes.addressof(word)).adder(addend)


def test_unaligned_word_is_refused() -> None:
    with pytest.raises(InvalidInput, match="divisible by 4"):
        SharedWord(4097)


def test_block_ends_at_a_wake_at_a_change_and_at_the_limit() -> None:
    cell = ctypes.c_uint32(7)
    word = SharedWord(ctypes.addressof(cell))
    start = time.monotonic()
    word.block(6, 10.0)
    assert time.monotonic() - start < 1
    word.block(7, 0.05)
    assert 0.04 < time.monotonic() - start < 1

    def change() -> None:
        time.sleep(0.05)
        cell.value = 8
        word.wake()

    thread = threading.Thread(target=change)
    thread.start()
    word.block(7, 10.0)
    thread.join()
    assert time.monotonic() - start < 2


def test_bf16_rounds_to_nearest_even() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    wide = from_bf16(every)
    numbers = ~np.isnan(wide)
    np.testing.assert_array_equal(to_bf16(wide)[numbers], every[numbers])
    assert np.isnan(from_bf16(to_bf16(wide[~numbers]))).all()
    low = from_bf16(np.arange(0x3F80, 0x4080, dtype=np.uint16))  # 1 to 4
    for between, up in ((0x7FFF, False), (0x8001, True)):
        given = (low.view(np.uint32) + np.uint32(between)).view(np.float32)
        expected = np.arange(0x3F80, 0x4080) + up
        np.testing.assert_array_equal(to_bf16(given), expected)
    ties = (low.view(np.uint32) + np.uint32(0x8000)).view(np.float32)
    assert not (to_bf16(ties) & 1).any()
    assert to_bf16(np.float32([np.inf, -np.inf, 3.4e38])).tolist() == [0x7F80, 0xFF80, 0x7F80]
    low_nan = np.array([0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(from_bf16(to_bf16(low_nan))).all()


def test_bf16_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    numbers = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    theirs = torch.from_numpy(numbers).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(to_bf16(numbers), theirs)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_overflowing_sums_are_infinite_without_a_warning(dtype: str) -> None:
    stored = np.float16 if dtype == "fp16" else np.uint16
    big = np.full((1, 4), 60000, np.float16) if dtype == "fp16" else np.full((1, 4), 0x7F7F, stored)
    out = np.zeros((1, 4), stored)
    summer([_memory(big)] * 3, _memory(out), dtype)()
    assert (out.view(np.uint16) == (0x7C00 if dtype == "fp16" else 0x7F80)).all()


@pytest.mark.parametrize("dtype", ["fp8", "int32"])
def test_other_types_are_not_added(dtype: str) -> None:
    memory = _memory(np.zeros((1, 4), np.int32))
    with pytest.raises(Unsupported, match="it adds fp32, fp64, fp16, bf16"):
        summer([memory], memory, dtype)


def test_part_of_an_element_is_refused() -> None:
    memory = _memory(np.zeros((1, 6), np.uint8))
    with pytest.raises(InvalidInput, match="whole number of fp32"):
        summer([memory], memory, "fp32")


def test_unaligned_addresses_are_summed() -> None:
    raw = np.zeros(4 * 5 + 1, np.uint8)
    memory = Memory(raw.ctypes.data + 1, 1, 20, 20)
    view(memory, np.float32)[:] = [1, 2, 3, 4, 5]
    summer([memory, memory], memory, "fp32")()
    assert view(memory, np.float32).tolist() == [[2, 4, 6, 8, 10]]


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (Memory(4096, 1, 8, 8), Memory(8192, 1, 9, 9)),
        (Memory(4096, 2, 8, 4), Memory(8192, 2, 8, 8)),
        (Memory(4096, -1, 8, 8), Memory(8192, -1, 8, 8)),
    ],
)
def test_wrong_rectangles_are_refused(source: Memory, destination: Memory) -> None:
    with pytest.raises(InvalidInput):
        copier(source, destination)


def test_plan_keeps_slots_apart_and_aligned() -> None:
    plan = Plan(WorkspaceLayout(3, (("a", 1000, 2), ("b", 1, 1), ("c", 0, 1)), ()))
    assert plan.slots["a", 0] == (256, 1256)
    assert plan.slots["a", 1] == (1280, 2280)
    assert plan.slots["b", 0] == (2304, 2305)
    plan.check_inside(2304, 1)
    for offset, size in ((0, 4), (1256, 1), (1255, 2), (2305, 1), (plan.staging_offset, 4)):
        with pytest.raises(InvalidInput):
            plan.check_inside(offset, size)


def test_gate_waits_for_those_inside_and_refuses_the_next() -> None:
    gate, inside, go = Gate("workspace"), threading.Event(), threading.Event()

    def body(call: int) -> tuple[int]:
        inside.set()
        go.wait()
        return (call,)

    launch = gate.guarded(body)
    thread = threading.Thread(target=launch, args=(5,))
    thread.start()
    inside.wait()
    assert not gate.shut(0.05)
    go.set()
    assert gate.shut(5)
    thread.join()
    with pytest.raises(RunFailed, match="has closed the workspace"):
        launch(6)
    with pytest.raises(RunFailed, match="has closed the workspace"), gate.inside():
        pass
