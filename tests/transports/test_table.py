from __future__ import annotations

import subprocess
import sys

import pytest

import stretto.transports as transports
from stretto.schedules.language import Unavailable, UnknownName
from stretto.transports.shared_memory import SharedMemoryTransport


def test_names_are_resolved() -> None:
    assert transports.load_transport("shared_memory") is SharedMemoryTransport


def test_unknown_name_lists_the_known_ones() -> None:
    known = "copy_engine, rccl, shared_memory"
    with pytest.raises(UnknownName, match=f"no transport 'pigeon'; choose one of {known}"):
        transports.load_transport("pigeon")


def test_every_backend_answers_whether_it_is_available() -> None:
    answers = transports.availability()
    assert set(answers) == set(transports.TRANSPORTS)
    assert all(answer.reason for answer in answers.values())
    assert answers["shared_memory"].usable


def test_missing_library_is_an_answer_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> type[transports.Transport]:
        raise ImportError("No module named 'gpu'")

    monkeypatch.setattr(transports, "TRANSPORTS", {"far": load})
    answer = transports.availability()["far"]
    assert not answer.usable
    assert "No module named 'gpu'" in answer.reason
    with pytest.raises(Unavailable, match="'far' cannot be used here"):
        transports.load_transport("far")


def test_names_and_capabilities_agree() -> None:
    for name in transports.TRANSPORTS:
        backend = transports.load_transport(name)
        assert backend.name == backend.offered().transport == name


def test_shared_memory_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from stretto.transports import availability\n"
        "import stretto.transports.conformance\n"
        "print(availability()['shared_memory'].usable)"
    )
    path = [entry for entry in sys.path if entry]
    command = f"import sys; sys.path[:0] = {path!r}\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"


def test_public_names() -> None:
    assert transports.__all__ == [
        "TRANSPORTS",
        "Availability",
        "Transport",
        "availability",
        "load_transport",
    ]
