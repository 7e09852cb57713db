"""Sets attnfuzz on a mutant, through the command line that users have, and looks at what it brings."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from attnfuzz.corpus import Regression, load_regression
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import AttentionCase, Case, encode_case
from tests.quality.mutants import Mutant
from tests.quality.planting import plant

BUDGET_S = 60
_MOST_ROWS = 2


class NotFound(AssertionError):  # noqa: N818 - says what happened
    """The campaign ended without a finding."""


@dataclass(frozen=True)
class Catch:
    """What one campaign made of a mutant. Times are in seconds since the command was started.

    ``shrunk_s`` is None if shrinking was cut off, by its own time limit or by the end of the campaign. ``others``:
    the oracles of findings that were cut off when this one had been shrunk.
    """

    target: str
    regression: Regression
    path: Path
    cases: int
    first_seen_s: float
    shrunk_s: float | None
    others: tuple[str, ...] = ()

    @property
    def case(self) -> Case:
        return self.regression.case

    @property
    def told(self) -> str:
        """All of it in a few lines, for a test that fails."""
        finding = self.regression.finding
        shrunk = "cut off while it was shrunk" if self.shrunk_s is None else f"shrunk after {self.shrunk_s:.1f} s"
        beside = f"; cut off: {', '.join(self.others)}" if self.others else ""
        return (
            f"{finding.oracle} ({finding.kind}): {finding.message}\n"
            f"seen after {self.first_seen_s:.1f} s, {shrunk}, {self.cases} cases{beside}\n"
            f"{encode_case(self.case).decode()}"
        )


def hunt(
    mutant: Mutant, folder: Path, *, seed: int, workers: int, device: str = "cpu", budget_s: int = BUDGET_S
) -> Catch:
    """Explore the mutant until its bug is found and shrunk; raises NotFound if it is not within the budget.

    Raises RuntimeError if the command could not do its work.
    """
    target = plant(mutant, folder)
    summary = folder / "summary.json"
    command = [
        sys.executable,
        "-m",
        "attnfuzz",
        "explore",
        target,
        "--budget",
        f"{budget_s}s",
        "--fail-fast",
        "--pedantic",
    ]
    command += ["--device", device, "--workers", str(workers), "--seed", str(seed)]
    command += ["--save-dir", str(folder / "found"), "--json", str(summary)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * budget_s)
    if done.returncode == 0:
        raise NotFound(f"{mutant.name} was not found:\n{done.stdout}\n{done.stderr}")
    if not summary.exists():
        raise RuntimeError(f"exit {done.returncode} on {mutant.name}:\n{done.stdout}\n{done.stderr}")
    report = json.loads(summary.read_text())
    # several workers may be at symptoms of one bug, and the campaign ends with the first that has been shrunk
    finding, *others = sorted(
        report["kernels"][0]["findings"], key=lambda one: (one["shrunk_s"] is None, one["first_seen_s"])
    )
    path = Path(finding["path"])
    return Catch(
        target=target,
        regression=load_regression(path),
        path=path,
        cases=report["cases"],
        first_seen_s=finding["first_seen_s"],
        shrunk_s=finding["shrunk_s"],
        others=tuple(other["oracle"] for other in others),
    )


def flaws(mutant: Mutant, catch: Catch, runner: Runner) -> list[str]:
    """What is wrong with a catch: another oracle objects, the case is not as small as it could be, or it is no bug.

    A case that needs others before it is saved as it was found.
    """
    found, case = [], catch.case
    oracle = catch.regression.finding.oracle
    if mutant.oracle not in ("any", oracle):
        found.append(f"{oracle} objects, not {mutant.oracle}")
    rows = case.num_seqs if isinstance(case, AttentionCase) else case.num_rows
    fields = msgspec.json.decode(encode_case(case))
    is_small = rows <= _MOST_ROWS and all(fields.get(name) == value for name, value in mutant.minimal.items())
    if not is_small and not catch.regression.preceding:
        found.append(f"not shrunk to {mutant.minimal}: {fields}")
    (correct,) = runner.declarations([mutant.kernel])
    failure = runner.judge(correct, case).failure
    if failure is not None:
        found.append(f"the correct kernel fails too: {failure.message}")
    return found
