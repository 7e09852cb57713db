"""attnfuzz.project: where a project ends, and which code is its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnfuzz.config import find_pyproject
from attnfuzz.project import project_root, search_path, why_foreign

STRANGER = 54321


@pytest.fixture
def owned_by_others(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Paths that seem to belong to another user, which only root could arrange otherwise."""
    paths: set[Path] = set()
    stat = Path.stat

    def pretended(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = stat(path, follow_symlinks=follow_symlinks)
        return os.stat_result((*found[:4], STRANGER, *found[5:10])) if path in paths else found

    monkeypatch.setattr(Path, "stat", pretended)
    return paths


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``tmp_path/a/b``, the working directory; nothing above has a marker that counts."""
    folder = tmp_path.resolve() / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_the_root_is_the_nearest_folder_with_a_marker(folder: Path) -> None:
    """From a subfolder a project's own kernels would be strangers, or all that lies above would be its own."""
    assert project_root() == folder
    (folder.parents[1] / "pyproject.toml").touch()
    assert project_root() == folder.parents[1]
    (folder.parent / ".git").touch()  # a file, as in a work tree
    assert project_root() == folder.parent
    assert project_root(folder.parents[1]) == folder.parents[1]


def test_where_a_search_has_run_is_a_project_if_nothing_else_is(folder: Path) -> None:
    """`attnfuzz replay ../x.json` would find no kernel in a folder that has no pyproject.toml, as a newcomer's."""
    (folder.parent / ".attnfuzz").mkdir()
    assert project_root() == folder.parent
    (folder.parents[1] / "pyproject.toml").touch()
    assert project_root() == folder.parents[1]


def test_settings_above_the_root_do_not_count(folder: Path) -> None:
    """A pyproject.toml around a clone would decide what runs in it."""
    (folder.parents[1] / "pyproject.toml").touch()
    assert find_pyproject() == folder.parents[1] / "pyproject.toml"
    (folder.parent / ".git").mkdir()
    assert find_pyproject() is None


@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_a_folder_that_all_can_write_to_is_no_ones_project(mode: int, folder: Path, owned_by_others: set[Path]) -> None:
    """Anybody could plant a pyproject.toml, and with it a project around other people's folders."""
    (folder.parent / "pyproject.toml").touch()
    folder.parent.chmod(mode)
    if mode == 0o777:  # one's own folder may be open to all
        assert project_root() == folder.parent
        owned_by_others.add(folder.parent)
    assert project_root() == folder
    assert find_pyproject() is None


def test_another_users_folder_is_not_searched(folder: Path, owned_by_others: set[Path]) -> None:
    """Whose folder one happens to work in would decide what one runs."""
    (folder.parent / "pyproject.toml").touch()
    owned_by_others.add(folder.parent)
    assert project_root() == folder
    owned_by_others.add(folder)  # a checkout that belongs to another user as a whole, as in many containers
    assert project_root() == folder.parent


def test_in_a_folder_that_all_can_write_to_only_ones_own_settings_count(
    folder: Path, owned_by_others: set[Path]
) -> None:
    """In /tmp itself, somebody else's settings would be taken for one's own, or one's own not be found."""
    folder.chmod(0o1777)
    (folder / "pyproject.toml").touch()
    assert find_pyproject() == folder / "pyproject.toml"
    owned_by_others.add(folder / "pyproject.toml")
    assert find_pyproject() is None


def test_code_is_the_projects_own_if_it_lies_in_there(folder: Path) -> None:
    """What a stranger's file names would run, or nothing that one has written oneself."""
    outside, inside = folder.parent / "k.py", folder / "sub" / "k.py"
    inside.parent.mkdir()
    for file in (outside, inside):
        file.touch()
    assert why_foreign(inside, folder) is None
    assert why_foreign(Path("sub/../sub/k.py"), folder) is None
    assert why_foreign(folder / "not_there.py", folder) is None
    for file in (outside, Path("../k.py"), Path("sub/../../k.py"), folder.with_name("b2") / "k.py"):
        assert f"outside the project's root {folder}" in (why_foreign(file, folder) or "")
    (folder / "linked.py").symlink_to(outside)
    assert "outside" in (why_foreign(Path("linked.py"), folder) or "")
    inside.parent.chmod(0o1777)
    assert "everybody can write" in (why_foreign(inside, folder) or "")


def test_the_projects_folders_come_last_on_the_path(folder: Path) -> None:
    """A file of the project would be taken for an installed module of the same name."""
    (folder.parent / "pyproject.toml").touch()
    assert search_path()[-3:] == [str(folder), str(folder.parent), str(folder.parent / "src")]
