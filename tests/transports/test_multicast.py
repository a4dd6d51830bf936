"""NVLink multicast is switched off before anything can bind it, in children too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stretto.transports
from stretto.transports.multicast import MULTICAST_OFF, switch_multicast_off

# A process that starts clean, launches ranks, and lets each say what torch would have seen.
CHILD = """
import os, sys
for name in {names!r}:
    os.environ.pop(name, None)
from stretto.runtime.launcher import launch

def report(rank):
    return {{name: os.environ.get(name) for name in {names!r}}}

if __name__ == "__main__":
    print(launch(report, 2))
"""

# A stand-in for the driver that refuses every multicast call.
STAND_IN = """
import sys, types

class Driver(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("cuMulticast"):
            raise AssertionError(f"{name} was called")
        raise AttributeError(name)

cuda, bindings = types.ModuleType("cuda"), types.ModuleType("cuda.bindings")
cuda.__path__, bindings.__path__ = [], []
bindings.driver = Driver("cuda.bindings.driver")
bindings.nvrtc = types.ModuleType("cuda.bindings.nvrtc")
sys.modules.update({
    "cuda": cuda,
    "cuda.bindings": bindings,
    "cuda.bindings.driver": bindings.driver,
    "cuda.bindings.nvrtc": bindings.nvrtc,
})
import os
from stretto.transports import availability
print(availability()["copy_engine"])
print({name: os.environ.get(name) for name in NAMES})
"""


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in MULTICAST_OFF}


def test_the_switch_overrides_what_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MULTICAST_OFF:
        monkeypatch.setenv(name, "wrong")
    switch_multicast_off()
    assert {name: os.environ[name] for name in MULTICAST_OFF} == dict(MULTICAST_OFF)


def test_ranks_inherit_it_from_a_scrubbed_environment(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="launching ranks needs torch")
    path = tmp_path / "child.py"
    path.write_text(CHILD.format(names=list(MULTICAST_OFF)))
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, env=clean(), timeout=100, check=True
    )
    assert done.stdout.strip() == str([dict(MULTICAST_OFF)] * 2)


def test_probing_calls_no_multicast_and_switches_it_off() -> None:
    code = f"NAMES = {list(MULTICAST_OFF)!r}\n" + STAND_IN
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=clean(),
        timeout=100,
        check=True,
    )
    answer, seen = done.stdout.strip().splitlines()
    assert "usable=" in answer
    assert seen == str(dict(MULTICAST_OFF))


def test_no_source_names_a_multicast_call() -> None:
    """The only multicast in the transports is the word that says there is none."""
    folder = Path(stretto.transports.__file__).parent
    for path in folder.rglob("*.py"):
        text = path.read_text()
        for word in ("cuMulticast", "multimem.", "multimem_"):
            assert word not in text.replace("multimem_reduce", ""), (path, word)
