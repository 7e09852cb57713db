"""Several environments compared: saved cases, one after the other, and a campaign that is shared out among them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from attnfuzz.campaign.environments import Ending, EnvironmentOutcome, difference
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.request import CampaignRequest
from attnfuzz.campaign.result import CampaignResult, Reporter
from attnfuzz.campaign.saved.replay import Replayed, SavedCase, replay
from attnfuzz.campaign.startup import run_campaign
from attnfuzz.campaign.statistics import KernelStatistics
from attnfuzz.campaign.stopping import Interrupted, Interrupts
from attnfuzz.declaration import KernelLoadError
from attnfuzz.internal_errors import in_one_sentence
from attnfuzz.isolation.outcomes import DeadlinePassed, ExecutorUnavailable, ServiceError
from attnfuzz.isolation.pythons import Python
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.limits import CaseTooLarge

_NOT_JUDGED = (KernelLoadError, CaseTooLarge, ExecutorUnavailable, DeadlinePassed, ServiceError)


@dataclass(frozen=True, slots=True)
class Difference:
    """A saved case whose ``outcomes`` on one kernel differ, and in words how."""

    path: Path
    kernel: str
    outcomes: tuple[EnvironmentOutcome, ...]
    text: str


@contextmanager
def naming(python: Python | None) -> Iterator[None]:
    """Have what cannot be run say in which environment that is."""
    try:
        yield
    except (KernelLoadError, ExecutorUnavailable) as error:
        if python is None:
            raise
        raise type(error)(f"--python {python.path}: {error}") from error


def outcome_of(result: Replayed) -> EnvironmentOutcome:
    """The outcome of a saved case where it ran, which is not the driver's environment."""
    if result.python is None:
        raise ValueError(f"{result.saved.path} ran in the driver's environment, which is compared with no other")
    failure = result.verdict.failure if result.verdict is not None else None
    ending: Ending = "is not judged" if result.verdict is None else "passes" if failure is None else "fails"
    return EnvironmentOutcome(
        python=result.python,
        device=result.device,
        ending=ending,
        symptom=failure.name if failure else "",
        message=failure.message if failure else result.objection or "",
        failed=result.failed_runs if result.runs > 1 else int(result.failed),
        runs=result.runs,
    )


def differences(results: Sequence[Replayed]) -> list[Difference]:
    """Saved cases that ran in several environments and came to something else in one than in another."""
    by_case: dict[tuple[Path, str], list[EnvironmentOutcome]] = {}
    for result in results:
        if result.python is not None:
            by_case.setdefault((result.saved.path, result.kernel.target), []).append(outcome_of(result))
    told = (Difference(*case, tuple(found), difference(found, case[1])) for case, found in by_case.items())
    return [one for one in told if one.text]


def search_across(
    request: CampaignRequest, pythons: Sequence[Python], make_reporter: Callable[[Python], Reporter]
) -> CampaignResult:
    """One campaign in each environment, with the same seed and an equal part of the budget, told as one.

    Then each finding is run in the other environments (`Finding.outcomes`). A campaign that does not spend its budget
    (an interrupt, --fail-fast) is the last. Raises what `run_campaign` raises, if it comes of the first.
    """
    seed = secrets.randbits(32) if request.seed is None else request.seed
    results: list[CampaignResult] = []
    trouble = ""
    for python in pythons:
        started = time.monotonic() if results else request.started
        part = replace(request, python=python, seed=seed, budget_s=request.budget_s / len(pythons), started=started)
        try:
            with naming(python):
                results.append(run_campaign(part, make_reporter(python)))
        except (KernelLoadError, ExecutorUnavailable) as error:
            if not results:
                raise
            trouble = str(error)
            break
        if results[-1].stop_reason != "budget":
            break
    result = _joined(results, pythons)
    if trouble:
        result = replace(result, stop_reason="environment", troubles=(*result.troubles, trouble))
    if result.stop_reason == "interrupted":
        return result
    return _compared(result, request)


def _joined(results: Sequence[CampaignResult], pythons: Sequence[Python]) -> CampaignResult:
    """The result of campaigns that ran one after the other: sums, and findings of all with times since the first."""
    first, last = results[0], results[-1]
    statistics = replace(
        first.statistics,
        kernels={},
        budget_s=sum(one.statistics.budget_s for one in results),
        deadline=last.statistics.deadline,
        python=None,
    )
    findings: list[Finding] = []
    for result in results:
        for target, kernel in result.statistics.kernels.items():
            sums = statistics.kernels.setdefault(target, KernelStatistics(declaration=kernel.declaration))
            sums.add(kernel)
        late_s = result.statistics.started - statistics.started
        for finding in result.findings:
            finding.first_seen_s += late_s
            finding.shrunk_s = None if finding.shrunk_s is None else finding.shrunk_s + late_s
            findings = _with_finding(findings, finding)
        if result is not first:
            statistics.throughput.add_later(result.statistics.throughput, late_s)
    statistics.findings = findings
    return CampaignResult(
        stop_reason=last.stop_reason,
        elapsed_s=last.statistics.started - statistics.started + last.elapsed_s,
        statistics=statistics,
        findings=tuple(findings),
        unconfirmed=tuple(finding for result in results for finding in result.unconfirmed),
        troubles=tuple(dict.fromkeys(trouble for result in results for trouble in result.troubles)),
        of_problems=frozenset[str]().union(*(result.of_problems for result in results)),
        signal=last.signal,
        inferred=tuple({one.target: one for result in results for one in result.inferred}.values()),
        pythons=tuple(pythons),
        unbuilt={target: how for result in results for target, how in result.unbuilt.items()},
        never_returned={target: why for result in results for target, why in result.never_returned.items()},
        unsettled={target: how for result in results for target, how in result.unsettled.items()},
        missed=frozenset(target for result in results for target in result.unreached),
        devices={python.path: one.statistics.device_name for python, one in zip(pythons, results, strict=False)},
    )


def _with_finding(findings: list[Finding], later: Finding) -> list[Finding]:
    """``findings`` and one of a later campaign, unless an earlier one has the same file.

    One whose file it has replaced goes: what is told is what lies in the files.
    """
    for earlier in findings:
        if earlier.path is not None and earlier.path == later.path:
            earlier.cases_seen += later.cases_seen
            return findings
        if earlier.path is not None and earlier.path == later.replaces:
            later.first_seen_s = earlier.first_seen_s
            later.cases_seen += earlier.cases_seen
            later.replaces = earlier.replaces
            return [later if one is earlier else one for one in findings]
    return [*findings, later]


def _compared(result: CampaignResult, request: CampaignRequest) -> CampaignResult:
    """Run each finding in the environments that it was not found in; an interrupt ends that."""
    try:
        with Interrupts(raising=True):
            for python in result.pythons if result.findings else ():
                _add_outcomes(python, result.findings, request, result.devices.get(python.path, ""))
    except Interrupted as interrupted:
        return replace(result, stop_reason="interrupted", signal=interrupted.number)
    return result


def _add_outcomes(python: Python, findings: Sequence[Finding], request: CampaignRequest, device: str) -> None:
    """Note what each finding comes to in ``python``, where some of them were found."""
    with ExitStack() as stack:
        runner: Runner | None = None
        for finding in findings:
            if finding.python == python:
                symptom = finding.failure.name
                outcome = EnvironmentOutcome(
                    python, device, "fails", symptom, finding.failure.message, finding.failed, max(1, finding.runs)
                )
            else:
                try:
                    if runner is None:
                        oracles, tolerance = request.judging_oracles, request.tolerance
                        made = Runner(device=request.device, oracles=oracles, tolerance=tolerance, python=python.path)
                        runner = stack.enter_context(made)
                    saved = SavedCase(finding.path or Path("case"), finding.regression(runner.device_name))
                    (result, *_) = replay([saved], runner, kernels=[finding.declaration.target])
                    outcome = outcome_of(replace(result, python=python, device=runner.device_name))
                except _NOT_JUDGED as error:
                    outcome = EnvironmentOutcome(python, device, "is not judged", message=in_one_sentence(str(error)))
            finding.outcomes = (*finding.outcomes, outcome)
