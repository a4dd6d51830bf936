"""Verification before first use: once for each class of shapes."""

from __future__ import annotations

import time

import pytest
from hand_made import CAPABILITIES, VARIANTS, build, made

from stretto.schedules import verified
from stretto.schedules.language import Buffer, Extent, Fill, InvalidInput, Program, Unsafe, View
from stretto.schedules.published_ring import PublishedRing
from stretto.schedules.verifier.admission import _ShapeClass, _verdict
from stretto.schedules.verifier.mutants import mutants


def sized(variant: str, tp: int, m: int, n: int = 8, k: int = 8) -> Program:
    return VARIANTS[variant](world_size=tp, m=m, n=n, k=k, capabilities=CAPABILITIES).build()


def test_what_is_safe_passes_and_what_is_not_raises() -> None:
    for variant in VARIANTS:
        verified(build(variant, 3))
    with pytest.raises(Unsafe) as caught:
        verified(build(PublishedRing, 2, 4))
    text = str(caught.value)
    assert text.startswith(
        "ag-gemm published-ring at TP2 is not safe to run: Rank 1's put0 of call 1"
    )
    assert "--no-verify" in text
    assert isinstance(caught.value, InvalidInput)
    assert caught.value.exit_code == 2


def test_alone_there_is_no_contract_to_keep() -> None:
    creditless = build("ring", 3).without("credit0")
    verified(creditless, alone=True)
    with pytest.raises(Unsafe):
        verified(creditless)


def test_sizes_of_one_class_are_verified_once() -> None:
    _verdict.cache_clear()
    start = time.perf_counter()
    verified(sized("ring", 8, 8192))
    first = time.perf_counter() - start
    start = time.perf_counter()
    verified(sized("ring", 8, 4096, 100, 7))
    again = time.perf_counter() - start
    assert _verdict.cache_info().misses == 1
    assert _verdict.cache_info().hits == 1
    assert again < first
    verified(sized("ring", 8, 4097))  # the last shard is short
    verified(sized("ring", 8, 9))  # some are empty
    verified(sized("eager", 8, 8192))
    assert _verdict.cache_info().misses == 4


def test_what_is_empty_says_nothing_about_what_is_not() -> None:
    def sized_by_hand(m: int, columns: int) -> Program:
        g = Buffer("g", "workspace", "fp32", Extent(m, "padded"), Extent(columns), "symmetric")
        fills = [Fill(id=id, stream=id, destination=View("g")) for id in ("one", "other")]
        return made(*fills, buffers=(g,), flags=())

    for empty in (sized_by_hand(0, 2), sized_by_hand(4, 0)):
        verified(empty, alone=True)
        with pytest.raises(Unsafe):
            verified(sized_by_hand(4, 2), alone=True)


def test_what_names_rows_by_number_is_a_class_of_its_own() -> None:
    for mutant in mutants(sized("unfused", 2, 8)):
        if mutant.family == "rows" and mutant.program is not None:
            other = [
                one.program for one in mutants(sized("unfused", 2, 12)) if one.what == mutant.what
            ]
            assert _ShapeClass(mutant.program) not in [_ShapeClass(one) for one in other if one]
    assert _ShapeClass(sized("unfused", 2, 8)) == _ShapeClass(sized("unfused", 2, 12))
    assert _ShapeClass(sized("unfused", 2, 8)) != _ShapeClass(sized("unfused", 3, 12))
    assert _ShapeClass(sized("unfused", 2, 8)) != "something else"
