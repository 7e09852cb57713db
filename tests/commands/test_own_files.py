"""Files that attnfuzz writes and reads."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnfuzz.data_files import is_regular_file, read_data_file, read_head, why_unusable
from attnfuzz.own_files import LinkError, OwnFolder, refuse_links, write_file


def test_a_full_disk_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    """Half a regression would be refused by every later replay, and the whole one it replaced would be gone."""
    path = tmp_path / "a.json"
    OwnFolder(tmp_path).write("a.json", b"old")
    script = (
        "import pathlib, resource, sys; from attnfuzz.own_files import OwnFolder;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
        "OwnFolder(pathlib.Path(sys.argv[1])).write('a.json', b'x' * 4096)"
    )
    run = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert "File too large" in run.stderr
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("old", [False, True])
def test_writing_works_where_files_need_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    """On a network file system, which has no files without a name, nothing could be saved."""
    path = tmp_path / "a.json"
    if old:
        path.write_bytes(b"old")
    monkeypatch.delattr(os, "O_TMPFILE")
    OwnFolder(tmp_path).write("a.json", b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_a_killed_writer_are_removed_but_not_what_is_being_written(tmp_path: Path) -> None:
    """A folder under version control would collect files that nobody knows, or lose one that somebody does."""
    old, young, notes = (tmp_path / f".{name}.tmp" for name in ("a.json.01234567", "b.json.01234567", "c.json.notes"))
    for path in (old, young, notes, tmp_path / "c.json"):
        path.touch()
    for path in (old, notes):
        os.utime(path, (0, 0))
    OwnFolder(tmp_path).remove_leftovers()
    assert {path.name for path in tmp_path.iterdir()} == {young.name, notes.name, "c.json"}


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file in a folder, neither of which anybody asked to have changed."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "a.json").write_bytes(b"precious")
    return folder / "a.json"


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


ACTIONS = {
    "make": lambda folder: folder.make(),
    "make_new": lambda folder: folder.make_new("new"),
    "names": lambda folder: folder.names(),
    "write": lambda folder: folder.write("a.json", b"new"),
    "create": lambda folder: folder.create("new"),
    "open_file": lambda folder: folder.open_file("a.json"),
    "remove": lambda folder: folder.remove("a.json"),
    "remove_empty": lambda folder: folder.remove_empty(),
}


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
@pytest.mark.parametrize("inner", [(), ("more",)])
def test_a_link_in_place_of_a_folder_is_refused(
    tmp_path: Path, precious: Path, action: Callable[[OwnFolder], object], inner: tuple[str, ...]
) -> None:
    """A folder that was handed on would have files written, listed or removed wherever it points."""
    (tmp_path / "mine").symlink_to(precious.parent)
    if inner:
        precious.parent.joinpath(*inner).mkdir()
    before = sorted(precious.parent.iterdir())
    with pytest.raises(OSError, match=r"symbolic link|Not a directory"):
        action(OwnFolder(tmp_path / "mine", below=tmp_path).inner(*inner))
    assert sorted(precious.parent.iterdir()) == before
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("target", ["elsewhere/a.json", "elsewhere/nothing"])
@pytest.mark.parametrize("action", ["write", "create", "open_file"])
def test_a_link_in_place_of_a_file_is_refused(tmp_path: Path, precious: Path, action: str, target: str) -> None:
    """What it points to would be overwritten, or made."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.json").symlink_to(tmp_path / target)
    arguments = ("a.json", b"new") if action == "write" else ("a.json",)
    with pytest.raises(LinkError, match=r"'\S+/mine/a.json' is a symbolic link.*; remove it$"):
        getattr(OwnFolder(tmp_path / "mine"), action)(*arguments)
    assert everything(precious.parent) == {"a.json": b"precious"}


def test_a_link_is_removed_without_what_it_points_to(tmp_path: Path, precious: Path) -> None:
    """Cleaning up would delete somebody's file."""
    (tmp_path / "link").symlink_to(precious)
    OwnFolder(tmp_path).remove("link")
    assert not (tmp_path / "link").is_symlink()
    assert everything(precious.parent) == {"a.json": b"precious"}


def test_links_that_a_user_typed_are_followed(tmp_path: Path, precious: Path) -> None:
    """Findings that are to go to another disk, or a report that is to go to a device, could not be written."""
    (tmp_path / "mine").symlink_to(precious.parent)
    OwnFolder(tmp_path / "mine").write("b.json", b"new")
    (tmp_path / "report.json").symlink_to(precious)
    write_file(tmp_path / "report.json", b"report")
    assert everything(precious.parent) == {"a.json": b"report", "b.json": b"new"}


@pytest.mark.parametrize("name", ["", ".", "..", "../elsewhere", "/etc/passwd", "a/b"])
def test_a_name_leads_to_no_other_folder(tmp_path: Path, name: str) -> None:
    """A name that a file has a say in would leave the folder."""
    with pytest.raises(ValueError, match="must be the name of one file"):
        OwnFolder(tmp_path).write(name, b"")
    with pytest.raises(ValueError, match="must be the name of one file"):
        OwnFolder(tmp_path / "..", below=tmp_path).make()
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    """Opening it would wait for ever."""
    os.mkfifo(tmp_path / "state.lock")
    with pytest.raises(OSError, match="it is no file"):
        OwnFolder(tmp_path).open_file("state.lock")


def test_only_a_folder_of_this_process_is_removed_with_what_is_in_it(tmp_path: Path) -> None:
    """What lies in any other may be a user's."""
    made = OwnFolder(tmp_path).make_new("made")
    made.write("a", b"")
    with pytest.raises(RuntimeError, match="was not made by this process"):
        OwnFolder(tmp_path / "made").remove_all()
    assert (tmp_path / "made" / "a").exists()
    made.remove_all()
    assert list(tmp_path.iterdir()) == []


def test_only_links_of_the_project_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where home folders are links, nothing could be saved; where the project brought one along, anything could."""
    (tmp_path / "project" / "sub").mkdir(parents=True)
    (tmp_path / "project" / "pyproject.toml").touch()
    (tmp_path / "home").symlink_to(tmp_path / "project")
    (tmp_path / "project" / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "home" / "sub")
    refuse_links(Path("found", "more"))
    refuse_links(tmp_path / "home" / "sub" / "found")
    for path in (tmp_path / "project" / "link", Path("..", "link", "found")):
        with pytest.raises(LinkError, match="link' is a symbolic link"):
            refuse_links(path)


def unreadable(path: Path) -> str:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - which one is what the tests ask
        read_data_file(path, 10)
    with pytest.raises(type(caught.value)):
        read_head(path, 1)
    assert caught.value.strerror
    return caught.value.strerror


def test_a_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    """Regressions that are linked into a folder would be refused."""
    (tmp_path / "file").write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to("file")
    assert read_data_file(tmp_path / "file", 10) == b"0123456789"
    assert read_data_file(tmp_path / "link", 11) == b"0123456789"
    assert read_head(tmp_path / "link", 3) == b"012"


def test_what_is_no_file_is_named_and_not_waited_for(tmp_path: Path) -> None:
    """A named pipe among the regressions would hold a command up for ever, a device fill the memory."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "terminal").symlink_to("/dev/tty")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        assert unreadable(tmp_path / "pipe") == "it is a named pipe, no file"
        assert unreadable(tmp_path / "zero") == "it is a device, no file"
        assert unreadable(tmp_path) == "it is a folder, no file"
        unreadable(tmp_path / "s")
        unreadable(tmp_path / "terminal")
        assert not any(is_regular_file(path) for path in (tmp_path, *tmp_path.iterdir()))


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A sparse file of a terabyte takes no room on the disk, and all there is in memory."""
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_data_file(tmp_path / "sparse", 10)
    assert read_head(tmp_path / "sparse", 4) == bytes(4)


def test_a_file_that_does_not_say_how_long_it_is_is_cut_off(tmp_path: Path) -> None:
    """Files of /proc have a size of 0, however much there is to read."""
    (tmp_path / "maps").symlink_to("/proc/self/maps")
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_data_file(tmp_path / "maps", 10)


@pytest.mark.parametrize("name", ["a" * 300, "b/" * 3000, "loop", "file/below", "nul\0", "\udcff"])
def test_a_name_that_no_file_can_have_is_an_ordinary_error(name: str, tmp_path: Path) -> None:
    """Python says so with three kinds of exceptions, depending on what is wrong."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    assert unreadable(tmp_path / name) == why_unusable(tmp_path / name)
    assert not is_regular_file(tmp_path / name)


def test_a_name_under_which_something_may_be_written_is_usable(tmp_path: Path) -> None:
    """Output that does not exist yet could not be asked for."""
    assert why_unusable(tmp_path) is None
    assert why_unusable(tmp_path / "new") is None
    assert why_unusable(tmp_path / "new" / "newer") is None
