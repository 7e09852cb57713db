"""attnfuzz.isolation.claims: folders of live processes are left alone, those of dead ones are not left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from attnfuzz.isolation.claims import Claim, PrivateFolder, is_claimed

SCRIPT = """
import os, pathlib, signal, sys
from attnfuzz.isolation.claims import PrivateFolder
folder = PrivateFolder(pathlib.Path(sys.argv[1]))
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def make_folder_and_end(parent: Path, how: str) -> list[Path]:
    subprocess.run([sys.executable, "-c", SCRIPT, parent, how], check=False)
    return list(parent.iterdir())


def test_a_claim_ends_with_its_release(tmp_path: Path) -> None:
    """A folder would be taken for that of a live process for ever, or never."""
    claim = Claim(tmp_path)
    assert is_claimed(tmp_path)
    claim.release()
    claim.release()
    assert not is_claimed(tmp_path)


def test_a_folder_goes_with_the_process(tmp_path: Path) -> None:
    """Each campaign would leave a folder behind."""
    assert make_folder_and_end(tmp_path, "ended") == []


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """The folder for temporary files would fill up with every kill; a live process must keep its own."""
    (left,) = make_folder_and_end(tmp_path, "killed")
    mine, young = PrivateFolder(tmp_path), PrivateFolder(tmp_path)
    assert left.exists()  # too young to be sure
    for folder in (left, mine.path):
        os.utime(folder, (0, 0))
    other = PrivateFolder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {folder.path.name for folder in (mine, young, other)}


def test_other_folders_are_not_touched(tmp_path: Path) -> None:
    """Findings that could only be saved among temporary files would be lost."""
    names = ["attnfuzz-findings-1", "attnfuzz-run-notes", "attnfuzz-run-12345678"]  # the last may be read by others
    for name in names:
        (tmp_path / name).mkdir(mode=0o755)
        os.utime(tmp_path / name, (0, 0))
    PrivateFolder(tmp_path).remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
