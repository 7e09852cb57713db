"""A search under compute-sanitizer: cases as a campaign draws them, in batches, one process at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attnfuzz.campaign.draw.drawing import derive_seed, run_round
from attnfuzz.corpus import FindingRecord, Regression, write_regression
from attnfuzz.corpus.regression import current_environment
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case
from attnfuzz.sanitizer.judging import Culprit, first_failure
from attnfuzz.sanitizer.running import Sanitizer
from attnfuzz.strategies.cases import case_lists
from attnfuzz.strategies.sizes import CPU_SIZES

__all__ = ["SanitizedSearch", "Search"]

_BATCH = 16
"""Cases of a process: it takes longer to start than a few of them take to run."""


@dataclass(slots=True)
class SanitizedSearch:
    """What came of a search. ``files`` are those of ``culprits``, in their order."""

    cases: int = 0
    culprits: list[tuple[Declaration, Culprit]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)


class Search:
    """Puts small cases to each kernel in turn. One that fails is left out from then on, and its case is not shrunk."""

    def __init__(self, sanitizer: Sanitizer, kernels: Sequence[Declaration], *, seed: int, device_name: str) -> None:
        self._sanitizer = sanitizer
        self._kernels = list(kernels)
        self._seed = seed
        self._device_name = device_name
        self.result = SanitizedSearch(unreached=[declaration.target for declaration in kernels])

    def run(
        self, folder: Path, *, until: float, fail_fast: bool, told: Callable[[Declaration, Culprit, Path], None]
    ) -> SanitizedSearch:
        """Search ``until`` a time on the monotonic clock; the batch that is running then is finished.

        Findings are saved in ``folder``. Raises OSError, and SanitizerUnavailable.
        """
        turn = 0
        while self._kernels and time.monotonic() < until:
            for declaration in list(self._kernels):
                if time.monotonic() >= until:
                    break
                culprit = self._batch(declaration, turn)
                if culprit is not None:
                    self._kernels.remove(declaration)
                    told(declaration, culprit, self._save(declaration, culprit, folder))
                    if fail_fast:
                        return self.result
            turn += 1
        return self.result

    def _batch(self, declaration: Declaration, turn: int) -> Culprit | None:
        cases = self._drawn(declaration, turn)
        self.result.cases += len(cases)
        failure = first_failure(self._sanitizer, declaration, cases)
        if declaration.target in self.result.unreached:
            self.result.unreached.remove(declaration.target)
        return failure

    def _drawn(self, declaration: Declaration, turn: int) -> list[Case]:
        """A list of cases; the first that Hypothesis draws is of the simplest ones, the last one varies most."""
        lists: list[list[Case]] = []

        def keep(cases: list[Case]) -> bool:
            lists.append(cases)
            return True

        strategy = case_lists(
            declaration.problem,
            length=_BATCH,
            supports=declaration.supports,
            options=declaration.options,
            sizes=CPU_SIZES,
        )
        seed = derive_seed(self._seed, declaration.name, turn)
        run_round(strategy, keep, seed_value=seed, until=float("inf"), max_draws=2)
        return lists[-1]

    def _save(self, declaration: Declaration, culprit: Culprit, folder: Path) -> Path:
        regression = Regression(
            problem=declaration.problem,
            kernel=declaration.target,
            case=culprit.case,
            preceding=culprit.preceding,
            finding=FindingRecord.of(culprit.failure),
            environment=current_environment(self._device_name),
        )
        path = write_regression(regression, folder)
        self.result.culprits.append((declaration, culprit))
        self.result.files.append(path)
        return path
