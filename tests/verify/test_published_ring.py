"""The published ring: safe with another collective between two calls, unsafe without."""

from __future__ import annotations

import numpy as np
import pytest
from hand_made import build

from stretto.schedules import published_ring
from stretto.schedules.published_ring import PublishedRing, PublishedRingThenAllReduce
from stretto.schedules.verifier import verify
from stretto.sim.interpreter import Delayed, Random, interpret


@pytest.mark.parametrize("tp", [2, 3, 4, 8, 16])
def test_verdicts(tp: int) -> None:
    for m in (2 * tp, 2 * tp + 1, max(1, tp - 1)):
        assert verify(build(PublishedRingThenAllReduce, tp, m)).safe
        alone = verify(build(PublishedRing, tp, m))
        assert {finding.kind for finding in alone.errors} == {"reuse"}
    assert verify(build(PublishedRing, tp), calls=1).safe


def test_the_counterexample_in_the_documentation_is_what_is_found() -> None:
    verdict = verify(build(PublishedRing, 2, 4))
    (finding,) = verdict.errors
    assert published_ring.__doc__ is not None
    assert finding.message in " ".join(published_ring.__doc__.split())


def test_the_numbers_agree() -> None:
    tp, m = 2, 4
    random = np.random.default_rng(1)
    x = random.integers(-8, 9, (3, tp, m // tp, 2)).astype(float)
    w = random.integers(-8, 9, (tp, 2, 2)).astype(float)
    partial = random.integers(-8, 9, (tp, m, 2)).astype(float)

    def wrong(cls: type[PublishedRing], scheduler: object) -> bool:
        program = build(cls, tp, m)
        given = {"w": list(w)} | ({"partial": list(partial)} if "partial" in program.buffer else {})
        result = interpret(
            program,
            lambda execution: {"x": list(x[execution]), **given},
            calls=3,
            scheduler=scheduler,  # type: ignore[arg-type]
        )
        return any(
            not np.array_equal(y, np.concatenate(list(x[execution])) @ w[rank].T)
            for execution, outputs in enumerate(result.by_call)
            for rank, y in enumerate(outputs["y"])
        )

    late = Delayed(ranks=[0], operations=["gemm1"], calls=[0])
    assert wrong(PublishedRing, late)
    assert not wrong(PublishedRingThenAllReduce, late)
    assert not any(wrong(PublishedRingThenAllReduce, Random(seed)) for seed in range(20))
