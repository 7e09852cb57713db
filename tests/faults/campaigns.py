"""A campaign as its user runs it, in a process of its own, and what must hold of its files whatever happened."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from attnfuzz.corpus import Regression, load_regression
from tests.faults.families import Family

KERNELS = Path(__file__).with_name("faulty_kernels.py")
_COMMAND = (sys.executable, "-m", "attnfuzz")


class Campaign:
    """``attnfuzz explore`` in ``folder``. Killed on the way out if it must be."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        kernels: str = "right wrong",
        workers: int = 2,
        prefix: Sequence[str] = (),
        output: int | None = None,
        temporary: Path | None = None,
    ) -> None:
        """``prefix`` is a command that runs it, ``output`` a descriptor that takes what it prints instead of a log.

        ``kernels`` are targets, or names in `KERNELS`.

        The log and temporary files are in ``temporary``, ``folder/tmp`` by default.
        """
        self.family = Family()
        self.folder = folder
        self.temporary = (temporary or folder) / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self._log = self.temporary.with_name(f"log-{self.family.mark}")
        targets = [name if ":" in name else f"{KERNELS}:{name}" for name in kernels.split()]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*prefix, *_COMMAND, "explore", *targets, "--pedantic", "--workers", str(workers), *arguments],
                cwd=folder,
                env={**self.family.environment(), "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=log if output is None else output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, *texts: str, timeout_s: float = 120.0) -> None:
        """Wait until a line has been printed that holds all of ``texts``."""
        deadline = time.monotonic() + timeout_s
        while not any(all(text in line for text in texts) for line in self.output.splitlines()):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"{texts!r} was not printed:\n{self.output}")
            time.sleep(0.02)

    def wait_for_cases(self, number: int, *, timeout_s: float = 120.0) -> None:
        """Wait until so many cases more have been judged, as it says every few seconds."""
        enough = self._cases() + number
        deadline = time.monotonic() + timeout_s
        while self._cases() < enough:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"fewer than {enough} cases were judged:\n{self.output}")
            time.sleep(0.1)

    def end(self) -> None:
        """Have it end in order; its output is whole after that."""
        self.process.terminate()  # Ctrl-C would be ignored where these tests run in the background of a shell
        self.wait()

    def _cases(self) -> int:
        said = re.findall(r"^\S+: (\d+) cases? \(", self.output, re.MULTILINE)
        return int(said[-1]) if said else 0

    def wait(self, timeout_s: float = 120.0) -> int:
        """The exit status, minus the signal's number if one killed it."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the campaign did not end within {timeout_s} s:\n{self.output}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self.family.members():
            member.kill()
        self.process.wait()


def saved(folder: Path) -> list[Regression]:
    """What can be loaded from the save folder, all of which must be."""
    return [load_regression(path) for path in sorted((folder / "regressions").glob("*.json"))]


def assert_nothing_half_written(folder: Path) -> None:
    """Every saved file loads, and no temporary file was left beside it."""
    saved(folder)
    assert [path.name for path in (folder / "regressions").glob(".*")] == []
    assert list(folder.rglob("*.tmp")) == []
