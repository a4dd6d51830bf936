from __future__ import annotations

from collections.abc import Iterator

import pytest
from transport_makers import shared_memory

from stretto.transports.conformance import CASES, Crew, Harness, run_case
from stretto.transports.shared_memory import SharedMemoryTransport


@pytest.fixture(scope="module", params=(1, 2, 4))
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with Crew(request.param) as crew:
        yield crew


@pytest.mark.parametrize("name", CASES)
def test_shared_memory_conforms(crew: Crew, name: str) -> None:
    skipped = CASES[name].skipped(SharedMemoryTransport.offered(), crew.world_size)
    if skipped:
        pytest.skip(skipped)
    run_case(CASES[name], Harness(make=shared_memory), crew)
