"""Which provider of GEMMs is taken, and what it computes."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from stretto.runtime.gemm import GemmShape, MeasuredGemm, TorchGemm


class Named:
    """A provider that only has a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def prepare(self, a: Any, b: Any, out: Any, accumulate: Any | None) -> Any:
        return lambda: self.name


def shape(m: int, n: int = 8) -> GemmShape:
    return GemmShape(m, n, 16, "torch.bfloat16")


def test_the_nearest_measured_rows_decide() -> None:
    slow, fast = Named("slow"), Named("fast")
    measured = MeasuredGemm([slow, fast])
    assert measured.choice(shape(100)) is slow  # nothing is known yet
    measured.note(shape(64), {"slow": 10.0, "fast": 8.0})
    measured.note(shape(1024), {"slow": 10.0, "fast": 12.0})
    assert measured.knows(shape(64))
    assert not measured.knows(shape(65))
    assert [measured.choice(shape(m)).name for m in (1, 64, 250, 260, 10**6)] == [
        "fast", "fast", "fast", "slow", "slow",
    ]  # fmt: skip
    assert measured.choice(shape(64, n=9)) is slow
    assert measured.choice(shape(0)) is slow


def test_a_lead_within_the_noise_changes_nothing() -> None:
    measured = MeasuredGemm([Named("first"), Named("second")])
    measured.note(shape(64), {"first": 100.0, "second": 99.5})
    assert measured.choice(shape(64)).name == "first"
    measured.note(shape(64), {"first": 100.0, "second": 98.0})
    assert measured.choice(shape(64)).name == "second"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("library", [None, "cublas"])
def test_torch_multiplies_accumulates_and_puts_the_choice_back(library: Any) -> None:
    import torch
    from torch.backends.cuda import preferred_blas_library

    before = preferred_blas_library()
    a, b = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    out, addend = torch.empty((2, 4)), torch.ones((2, 4))
    provider = TorchGemm(library)
    provider.prepare(a, b, out, None)()
    assert torch.equal(out, a @ b.t())
    provider.prepare(a, b, out, addend)()
    assert torch.equal(out, a @ b.t() + 1)
    provider.prepare(a[:0], b, out[:0], None)()
    assert preferred_blas_library() == before
