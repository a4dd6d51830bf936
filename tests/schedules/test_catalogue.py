"""What SCHEDULE on the command line may stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.schedules import (
    DEFAULT_VARIANT,
    SCHEDULES,
    Program,
    RingAllGatherGemm,
    Schedule,
    load_schedule,
    schedule_class,
)
from stretto.schedules.language import InvalidInput, UnknownName, to_json

USER_FILE = """
from stretto.schedules import Program, RingAllGatherGemm

class Mine(RingAllGatherGemm):
    variant = "mine"

SIZES = {"world_size": 2, "m": 4, "n": 2, "k": 3}
NOT_A_SCHEDULE = 7
"""


def one_sentence(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert len(text.splitlines()) == 1
    assert text.endswith(".")
    return text


def test_shipped_names_and_variants() -> None:
    assert set(DEFAULT_VARIANT) == set(SCHEDULES)
    for name, variants in SCHEDULES.items():
        assert load_schedule(name) is variants[DEFAULT_VARIANT[name]]
        for variant, cls in variants.items():
            assert load_schedule(name, variant) is schedule_class(name, variant) is cls
            assert (cls.name, cls.variant) == (name, variant)
            assert issubclass(cls, Schedule)
            assert cls.__doc__
    assert schedule_class("ag-gemm") is RingAllGatherGemm


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(UnknownName) as error:
        load_schedule("ag-gem")
    text = one_sentence(error)
    assert text.startswith("There is no schedule 'ag-gem'; choose one of ag-gemm, ")
    assert "FILE.py:OBJECT, PROGRAM.json." in text
    with pytest.raises(UnknownName) as error:
        load_schedule("ag-gemm", "rings")
    assert one_sentence(error).startswith(
        "There is no variant of ag-gemm 'rings'; choose one of ring, direct, "
    )


def test_a_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE)
    cls = load_schedule(f"{file}:Mine")
    assert isinstance(cls, type)
    assert (cls.variant, cls.__mro__[1]) == ("mine", RingAllGatherGemm)
    for name in ("NOT_A_SCHEDULE", "Absent", ""):
        with pytest.raises(InvalidInput) as error:
            load_schedule(f"{file}:{name}")
        assert f"{file} has no Schedule class or Program called {name!r}" in one_sentence(error)
    with pytest.raises(InvalidInput) as error:
        load_schedule(str(file))
    assert one_sentence(error) == f"Name the object in {file} too, as {file}:OBJECT."
    with pytest.raises(InvalidInput) as error:
        load_schedule(f"{file}:Mine", "ring")
    assert "--variant chooses among shipped schedules" in one_sentence(error)
    with pytest.raises(InvalidInput) as error:
        load_schedule(f"{tmp_path / 'absent.py'}:Mine")
    assert "absent.py is no file; give FILE.py:OBJECT" in one_sentence(error)
    file.write_text("1 / 0")
    with pytest.raises(InvalidInput) as error:
        load_schedule(f"{file}:Mine")
    assert str(error.value) == (
        f"{file} raised ZeroDivisionError when loaded: division by zero"
    )  # fmt: skip
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_program_in_a_users_file_or_in_json(tmp_path: Path, everything: Program) -> None:
    saved = tmp_path / "program.json"
    saved.write_text(to_json(everything, indent=1))
    assert load_schedule(str(saved)) == everything
    file = tmp_path / "stored.py"
    file.write_text(
        "from pathlib import Path\n"
        "from stretto.schedules.language import Program, load_json_file\n"
        f"STORED = load_json_file(Program, Path({str(saved)!r}))\n"
    )
    assert load_schedule(f"{file}:STORED") == everything
    with pytest.raises(InvalidInput) as error:
        load_schedule(str(saved), "ring")
    assert "program.json is one already." in one_sentence(error)
    with pytest.raises(InvalidInput) as error:
        load_schedule(str(tmp_path / "absent.json"))
    assert "absent.json cannot be read: No such file or directory." in one_sentence(error)
    saved.write_text('{"name": 1}')
    with pytest.raises(InvalidInput, match=r"program\.json is not a Program in JSON: at name"):
        load_schedule(str(saved))
