"""attnfuzz.data_files: nothing but a regular file of the expected size is ever read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from attnfuzz.data_files import is_regular_file, read_data_file, read_head, why_unusable


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
