"""From reports to findings: which case of a batch it is, in words what the kernel did, and a search for more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attnfuzz.corpus import FindingRecord, Regression, write_regression
from attnfuzz.corpus.regression import current_environment
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.registry import CRASH, EXCEPTION, HANG, SANITIZER
from attnfuzz.problems.cases import Case
from attnfuzz.problems.wording import plural
from attnfuzz.sanitizer.report import SanitizerReport
from attnfuzz.sanitizer.running import Note, Outcome, Sanitizer, TensorBytes
from attnfuzz.sanitizer.tool import Tool
from attnfuzz.verdict import Failure

__all__ = ["Culprit", "SanitizedSearch", "Search", "failure_of", "first_failure", "judge_sanitized"]

_SHOWN_LINES = 12
_NEAR_BYTES = 1 << 20
_WHERE_TO_LOOK = {
    "memcheck": "the first access outside any allocation; each tensor was an allocation of its own",
    "racecheck": "two accesses to shared memory, of which one writes, without a barrier between them",
    "initcheck": "memory that nothing has written: a result, or what the kernel allocated itself",
    "synccheck": "a barrier that not all threads reach that must",
}


@dataclass(frozen=True, slots=True)
class Culprit:
    """What a tool objects to in `case`, once those of `preceding` have run in the same process."""

    case: Case
    failure: Failure
    preceding: tuple[Case, ...] = ()


def judge_sanitized(
    sanitizer: Sanitizer, declaration: Declaration, case: Case, preceding: Sequence[Case] = ()
) -> Failure | None:
    """What the tool objects to in `case`, or in those of `preceding`, which run before it."""
    return failure_of(sanitizer.run(declaration, [*preceding, case]), sanitizer.tool)


def first_failure(sanitizer: Sanitizer, declaration: Declaration, cases: Sequence[Case]) -> Culprit | None:
    """The first of `cases` that the tool objects to. All run in one process, and alone once there is an objection.

    Which one it is does not show in the reports of most tools: halves of the batch are run until one case is left.
    """
    outcome = sanitizer.run(declaration, cases)
    failure = failure_of(outcome, sanitizer.tool)
    if failure is None:
        return None
    if len(cases) == 1:
        return Culprit(cases[0], failure)
    suspect = cases[outcome.last_begun]
    for part in ([suspect], cases[: len(cases) // 2], cases[len(cases) // 2 :]):
        found = first_failure(sanitizer, declaration, part)
        if found is not None:
            return found
    return Culprit(cases[-1], failure, tuple(cases[:-1]))


def failure_of(outcome: Outcome, tool: Tool) -> Failure | None:
    """None for a process in which nothing was wrong."""
    if outcome.reports:
        return _reported(outcome.reports, outcome.notes, tool)
    if outcome.unread:
        return Failure(
            oracle=SANITIZER.name,
            kind=f"{tool}: another report",
            message=f"{tool} objects: {outcome.unread[0]}",
            details=tuple(outcome.unread[1:_SHOWN_LINES]),
        )
    if outcome.raised is not None:
        raised = outcome.raised
        return Failure(
            oracle=EXCEPTION.name, kind=raised.kind, message=f"the kernel raised {raised.kind}: {raised.raised}"
        )
    if outcome.status is None:
        return Failure(oracle=HANG.name, kind=HANG.name, message=f"the kernel did not come back under {tool}")
    if outcome.status:
        said = tuple(outcome.output.splitlines()[-_SHOWN_LINES:])
        message = f"the process ended with status {outcome.status} under {tool}"
        return Failure(oracle=CRASH.name, kind=f"exit {outcome.status}", message=message, details=said)
    return None


def _reported(reports: Sequence[SanitizerReport], notes: Sequence[Note], tool: Tool) -> Failure:
    first = reports[0]
    tensors = [place for note in notes for place in note.tensors]
    others = len(reports) - 1
    more = (f"and {plural(others, 'more report')} of this run",) if others else ()
    return Failure(
        oracle=SANITIZER.name,
        kind=f"{tool}: {first.what}",
        message=" ".join(filter(None, (first.what, _where(first), _by_whom(first), _at(first, tensors)))),
        details=(*first.lines[:_SHOWN_LINES], *more, _WHERE_TO_LOOK[tool]),
    )


def _where(report: SanitizerReport) -> str:
    source = f" ({report.source})" if report.source else ""
    return f"in {report.kernel}{source}" if report.kernel else ""


def _by_whom(report: SanitizerReport) -> str:
    return f"by thread ({report.thread}) of block ({report.block})" if report.thread else ""


def _at(report: SanitizerReport, tensors: Sequence[TensorBytes]) -> str:
    if report.address is None:
        return ""
    near = _nearest(report.address, tensors)
    state = f", which is {report.state}" if report.state else ""
    return f"at {report.address:#x}{state}" + (f": {near}" if near else "")


def _nearest(address: int, tensors: Sequence[TensorBytes]) -> str:
    """Where an address lies, seen from the tensor that is nearest; later cases count first, theirs is the memory."""
    distances = [(_distance(address, place), place) for place in reversed(tensors) if place.nbytes]
    distance, place = min(distances, key=lambda found: abs(found[0]), default=(_NEAR_BYTES, None))
    if place is None or abs(distance) >= _NEAR_BYTES:
        return ""
    if not distance:
        return f"{plural(address - place.start, 'byte')} into {place.name}"
    return f"{plural(abs(distance), 'byte')} {'past the end' if distance > 0 else 'before the start'} of {place.name}"


def _distance(address: int, place: TensorBytes) -> int:
    """Bytes past the last one of a tensor (1 is the first of them), or below 0 before its start."""
    if address < place.start:
        return address - place.start
    return max(0, address - (place.start + place.nbytes) + 1)


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
        from attnfuzz.campaign.draw.sampling import derive_seed, run_round
        from attnfuzz.strategies.cases import case_lists
        from attnfuzz.strategies.sizes import CPU_SIZES

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
