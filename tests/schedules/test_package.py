"""The public names, and the walls: what imports without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stretto
from stretto import schedules
from stretto.schedules import language

FOLDERS = ("schedules", "sim", "figures")
PACKAGE = Path(stretto.__file__).parent

SCHEDULES_NAMES = """
DEFAULT_VARIANT SCHEDULES AllGatherGemm Capabilities DirectAllGatherGemm EagerAllGatherGemm Program
RingAllGatherGemm Schedule Timeline UnfusedAllGatherGemm Verdict check_timeline load_schedule
schedule_class verified verify
"""

LANGUAGE_NAMES = """
ALL_COLLECTIVES ALL_VERBS Block Body Buffer BufferHandle COMMUNICATION_KINDS COMPUTE_KINDS Call
Capabilities CheckFailed Collective CollectiveKind Comparison Copy DTYPE_BYTES DType Deadlock Emit
Epoch Event Extent Fill Fixed Flag FlagEvent FlagHandle FlagRef FusedGemm Gate GatherGemm Gemm
GemmAllReduce GemmReduceScatter Interval InvalidInput KernelAccess KindError Mark Opaque Operation
OperationBase Peer PeerLost Phase ProfileError Program ProgramError Put RELEASED ROW_OPERATIONS
RankBuilder RankShare Rectangle Reduce Region RowOp RowOperation RunFailed SCHEMA_VERSION SELF SLOT
Schedule Signal Span SpanKey Stream StrettoError Sync TIMELINE_VERSION Tags TileGroup TileOrder
Tiling Timeline Unavailable UnknownName Unsafe Unsupported Verb View WHOLE Wait WaitTimeout Whole
Word WorkspaceLayout ceil_div compare_timelines cyclic_reached digest_of exposed_intervals from_json
in_slot is_own is_symmetric load_json_file merged options_of own_names require_shareable slot_bytes
slot_places to_json
"""

WITHOUT_TORCH = """
import importlib
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "cutlass", "cuda", "triton", "pynvml"):
            raise ModuleNotFoundError(f"{name} is kept away", name=name)

sys.meta_path.insert(0, NoTorch())
try:
    importlib.import_module("torch")
except ModuleNotFoundError as error:
    assert "kept away" in str(error)
else:
    raise SystemExit("torch is not kept away")
for name in sys.argv[1:]:
    importlib.import_module(name)
print(len(sys.argv) - 1)
"""


@pytest.mark.parametrize(
    ("package", "names"), [(schedules, SCHEDULES_NAMES), (language, LANGUAGE_NAMES)]
)
def test_public_names_are_pinned(package, names: str) -> None:
    assert sorted(package.__all__) == sorted(names.split())
    assert len(set(package.__all__)) == len(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None


def modules(folder: str) -> list[str]:
    """Return the modules of a folder, as files say."""
    names = []
    for file in sorted((PACKAGE / folder).rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        names.append(".".join(("stretto", *parts)))
    return names


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_without_torch(folder: str) -> None:
    names = modules(folder)
    if not names:
        pytest.skip(f"{folder} has no modules here")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, *names],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(names)


def test_schedules_need_neither_simulation_nor_figures() -> None:
    code = (
        "import sys, stretto.schedules; "
        "print(sorted({'simpy', 'matplotlib', 'numpy', 'stretto.sim', 'stretto.runtime'} "
        "& set(sys.modules)))"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        check=True,
    )
    assert done.stdout.strip() == "[]"
