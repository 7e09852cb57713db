"""Symbolic links in place of the files and folders that commands write: what they point to must stay as it is."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tests.audit.auditing import Part
from tests.audit.mutating import spliced
from tests.audit.specimens import TINY
from tests.audit.states import state_document
from tests.audit.yard import Fault, Must, Seen, faults_of
from tests.faults.campaigns import KERNELS

_MINE = "mine.py"
_EXPLORE = ("explore", f"{_MINE}:wrong", "--pedantic", "--budget", "60s", "--fail-fast", "--workers", "1")
_RESUME = ("explore", "--resume", "--budget", "4s", "--workers", "1")
_CI = ("ci", f"{_MINE}:right", "--pedantic", "--budget", "1s", "--workers", "1", "--quiet")
_JOURNAL = {**TINY, "finding": {"oracle": "crash", "kind": "journal", "message": "was running"}, "note": "journal"}
_SETTINGS = '[tool.attnfuzz]\nregressions = "kept/cases"\n'


@dataclass(frozen=True, slots=True)
class _Planted:
    """``command`` in a project where ``name`` is a link to ``target``, relative to the folder that must stay."""

    command: tuple[str, ...]
    name: str
    target: str
    must: Must = "refuse"

    def __str__(self) -> str:
        return f"{' '.join(self.command[:2])} with {self.name} -> {self.target}"


_FILE, _NOTHING, _FOLDER = "notes.txt", "nothing", "."


def _planted() -> list[_Planted]:
    state = ".attnfuzz"
    found = [
        _Planted(command, f"{state}/{name}", target)
        for command in (_EXPLORE, _RESUME)
        for name in (".gitignore", "state.lock", "state.json", "findings", "journal-7", "journal-7/announced")
        for target in (_FILE, _NOTHING, _FOLDER)
        if not (command is _RESUME and name == "state.json")  # which is read first
    ]
    found += [_Planted(_EXPLORE, name, _FOLDER) for name in (state, "regressions", "kept", "kept/cases")]
    found += [
        _Planted(_CI, f"attnfuzz-ci{name}", target)
        for name in ("", "/replay.json", "/explore.json", "/junit.xml", "/report.html", "/summary.md", "/findings")
        for target in (_FILE, _NOTHING, _FOLDER)
    ]
    found += [
        _Planted(("merge", "inbox"), "regressions", _FOLDER),
        _Planted(("merge", "inbox", "-o", "out"), "out/passing", _FOLDER),  # TINY passes, and goes there
    ]
    # only read, or removed themselves: what they point to stays
    found += [
        _Planted(("replay", f"{state}/journal-7"), f"{state}/journal-7", "journal-7", "either"),
        _Planted(
            ("replay", f"{state}/journal-7"), f"{state}/journal-7/worker-0.json", "journal-7/worker-0.json", "work"
        ),
        _Planted(("replay",), "regressions", "journal-7", "work"),
        _Planted(("replay", "journal-7"), "journal-7", "journal-7", "work"),
        _Planted((*_EXPLORE, "--save-dir", "out"), "out/.a.json.01234567.tmp", _FILE, "work"),
        _Planted((*_EXPLORE, "--save-dir", "out"), "out/a.json", "precious.json", "work"),
    ]
    return found


class Links(Part):
    """Each input is one link and one command."""

    inputs: ClassVar[int] = len(_planted())
    patience_s: ClassVar[float] = 400.0

    def run(self, numbers: range, dice: random.Random) -> Seen:
        (number,) = numbers
        one, project = _planted()[number], self.yard.project
        (project / _MINE).write_bytes(KERNELS.read_bytes())
        (project / "inbox").mkdir()
        (project / "inbox" / "a.json").write_bytes(spliced(TINY))
        if one.name.startswith("kept"):
            (project / "pyproject.toml").write_text(_SETTINGS)
        if one.command is _RESUME:
            (project / ".attnfuzz").mkdir()
            (project / ".attnfuzz" / "state.json").write_bytes(spliced(state_document()))
        elsewhere = self.yard.room / "elsewhere" / ".attnfuzz"  # of another project, with a journal
        _furnish(elsewhere)
        before = _everything(elsewhere)
        link = project / one.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(elsewhere / one.target, link.parent))
        done = self.yard.command(*one.command, limit_s=240.0)
        seen = faults_of(done, must=one.must, cpu_s=240.0)
        if (now := _everything(elsewhere)) != before:
            names = sorted(name for name in {**before, **now} if before.get(name) != now.get(name))
            seen.faults.append(Fault("foreign", f"touched {', '.join(names[:3])}"))
        if one.must == "refuse" and b"is a symbolic link" not in done.output and b"symbolic link)" not in done.output:
            seen.faults.append(Fault("other", f"refused without a word of the link: {done.output[-200:]!r}"))
        seen.faults += self.yard.faults_in_files()
        seen.faults = [Fault(fault.kind, f"{one}: {fault.text}") for fault in seen.faults]
        return seen


def _furnish(folder: Path) -> None:
    (folder / "journal-7" / "more").mkdir(parents=True)
    (folder / "journal-7" / "worker-0.json").write_bytes(spliced(_JOURNAL))
    (folder / "journal-7" / "notes.txt").write_text("precious\n")
    (folder / "notes.txt").write_text("precious\n")
    (folder / "precious.json").write_bytes(spliced(TINY))
    os.utime(folder / "notes.txt", (0, 0))  # as old as what a killed writer left


def _everything(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """By name: what would tell that it was touched."""
    return {
        os.fspath(path.relative_to(folder)): (
            path.lstat().st_ino, path.lstat().st_ctime_ns, path.read_bytes() if path.is_file() else b"",
        )
        for path in (folder, *folder.rglob("*"))
    }  # fmt: skip
