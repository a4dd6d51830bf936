"""Paths that are refused before a long run, and files that are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stretto.figures import check_figure_path, check_trace_path
from stretto.figures.files import write_whole
from stretto.schedules.language import InvalidInput

CHECKS = [check_figure_path, check_trace_path]


@pytest.mark.parametrize("name", ["a.gif", "a", "a.png.txt", ".png", "png"])
def test_other_endings_name_the_three(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match=r"\.png, \.svg or \.pdf") as caught:
        check_figure_path(tmp_path / name)
    assert str(caught.value).count(".\n") == 0


@pytest.mark.parametrize("name", ["a.png", "b.SVG", "c d.pdf"])
def test_the_three_endings_are_taken_and_nothing_is_created(tmp_path: Path, name: str) -> None:
    assert check_figure_path(tmp_path / name) == name.lower().rpartition(".")[2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("check", CHECKS)
def test_a_missing_directory_is_named(tmp_path: Path, check: object) -> None:
    with pytest.raises(InvalidInput, match=r"no directory .*absent.*create it first"):
        check(tmp_path / "absent" / "a.png")  # type: ignore[operator]


@pytest.mark.parametrize("check", CHECKS)
def test_a_file_where_a_directory_should_be(tmp_path: Path, check: object) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="no directory"):
        check(tmp_path / "file" / "a.png")  # type: ignore[operator]


@pytest.mark.parametrize("check", CHECKS)
def test_a_directory_is_no_file(tmp_path: Path, check: object) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(InvalidInput, match="is a directory"):
        check(tmp_path / "a.png")  # type: ignore[operator]


@pytest.mark.parametrize("check", CHECKS)
def test_a_pipe_is_not_replaced(tmp_path: Path, check: object) -> None:
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(InvalidInput, match="no regular file"):
        check(tmp_path / "a.png")  # type: ignore[operator]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["x" * 300 + ".png", "nul\0.png"])
def test_impossible_names(tmp_path: Path, check: object, name: str) -> None:
    with pytest.raises(InvalidInput, match="cannot name a file"):
        check(tmp_path / name)  # type: ignore[operator]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("refused", ["directory", "file"])
def test_no_permission(
    tmp_path: Path, check: object, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By a stand-in for os.access, since a superuser is refused nothing.
    target = tmp_path / "a.png"
    target.touch()
    no = {"directory": tmp_path, "file": target}[refused].resolve()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != no)
    with pytest.raises(InvalidInput, match="no permission"):
        check(target)  # type: ignore[operator]


@pytest.mark.skipif(os.geteuid() == 0, reason="a superuser is refused nothing")
def test_no_permission_in_fact(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InvalidInput, match="no permission"):
            check_figure_path(tmp_path / "a.png")
    finally:
        tmp_path.chmod(0o700)


def test_a_relative_name_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_figure_path(Path("a.png"))
    write_whole(Path("a.png"), b"data")
    assert (tmp_path / "a.png").read_bytes() == b"data"


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"old")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InvalidInput, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_written_through(tmp_path: Path) -> None:
    real, link = tmp_path / "real.png", tmp_path / "link.png"
    real.write_bytes(b"old")
    link.symlink_to(real)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_others_may_read_it_as_the_umask_says(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    write_whole(tmp_path / "a.png", b"")
    assert (tmp_path / "a.png").stat().st_mode == plain.stat().st_mode
