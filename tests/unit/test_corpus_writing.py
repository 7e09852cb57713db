"""attnfuzz.corpus.writing: the old file or the new one, whatever happens, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnfuzz.corpus.writing import remove_leftovers, write_atomically


def test_a_full_disk_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    """Half a regression would be refused by every later replay, and the whole one it replaced would be gone."""
    path = tmp_path / "a.json"
    write_atomically(path, b"old")
    script = (
        "import pathlib, resource, sys; from attnfuzz.corpus.writing import write_atomically;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
        "write_atomically(pathlib.Path(sys.argv[1]), b'x' * 4096)"
    )
    run = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=False)
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
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_a_killed_writer_are_removed_but_not_what_is_being_written(tmp_path: Path) -> None:
    """A folder under version control would collect files that nobody knows."""
    (tmp_path / ".a.json.0123.tmp").touch()
    (tmp_path / ".b.json.0123.tmp").touch()
    (tmp_path / "c.json").touch()
    os.utime(tmp_path / ".a.json.0123.tmp", (0, 0))
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.json.0123.tmp", "c.json"]
