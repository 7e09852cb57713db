"""The machine-readable summary of a campaign: ``attnfuzz.summary/1``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from attnfuzz.campaign.environments import Ending, EnvironmentOutcome, told_versions
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.floor import sentences_of
from attnfuzz.campaign.result import FORMAT, CampaignResult, Statistics, StopReason
from attnfuzz.campaign.statistics import Count
from attnfuzz.isolation.pythons import Python
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.supports import as_call
from attnfuzz.report.files import write_json
from attnfuzz.report.findings import ToldFinding, kernels_in_order, told_findings, undecided
from attnfuzz.report.remarks import Weight, remarks_on
from attnfuzz.verdict import SourceLine

_MINUTE_S = 60.0


class FindingSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One finding. Times are seconds since the command began; ``shrunk_s`` is null if shrinking was cut off,
    ``path`` if the finding could not be saved. A flaky one tells that it failed in ``failed`` of ``runs`` runs.

    ``cause`` is what the bug is called, in every campaign that finds it; ``hash`` what lines about it are marked with,
    in this one. ``sources``: lines of the kernel that the cause comes from, where they are known. ``cases_seen``:
    failing cases that were put down to it, the first included. Those that are not ``in_contract``, and those that the
    summary of ``--against`` has ``known``, do not count in the exit status. ``undecided``: further
    failing cases that were not told apart from it, the search having ended too early.
    ``signature``: what reports call it. ``entry``: its number in all reports; findings of several kernels that come of
    the same code have the same.
    ``python``: where it was found, if not in the driver's environment; ``outcomes``: what its case came to in each of
    several."""

    oracle: str
    cause: str
    in_contract: bool
    cases_seen: int
    known: bool = False
    undecided: int = 0
    hash: str
    signature: str
    entry: int
    first_seen_s: float
    shrunk_s: float | None
    path: str | None
    message: str
    failed: int = 0
    runs: int = 0
    sources: tuple[SourceLine, ...] = ()
    python: str = ""
    outcomes: tuple[OutcomeSummary, ...] = ()


class QuestionSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A question to the author of a kernel: it is silently wrong in the case at ``path`` (null where that could not be
    saved), and if it was never meant for that, ``declaration``, of ``field``, says so."""

    field: str
    declaration: str
    path: str | None
    message: str


class KernelSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One kernel, which ``target`` loads. ``max_error_ratio`` is the largest finite |error| / bound of any case,
    failing ones included.

    ``inferred`` is the declaration that it was searched under, where its own left out something that it does not take,
    and ``outside_contract`` says what of that it refuses. ``questions`` are the rest of it.
    ``not_runnable``: how many cases, which are not among the ``cases``, could not run on this device, by the reason.
    ``unbuilt``: how far a kernel had come that compiles itself; no more of it was searched. ``never_returned``: why one
    was not searched that never gave a result. ``unsettled``: it was not found out what it takes, and what failed was
    not looked into."""

    name: str
    target: str
    problem: str
    cases: int
    max_error_ratio: float
    findings: tuple[FindingSummary, ...]
    questions: tuple[QuestionSummary, ...] = ()
    inferred: str = ""
    outside_contract: str = ""
    not_runnable: dict[str, Count] = {}
    unbuilt: str = ""
    never_returned: str = ""
    unsettled: bool = False


class RemarkSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A remark that reports make beside the findings. With one that is no ``note``, `explore` ends with 2 where nothing
    was found. ``targets``: the kernels that it is about, all if none is named."""

    weight: Weight
    text: str
    targets: tuple[str, ...] = ()


class Summary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One campaign. ``elapsed_s`` includes the start-up; ``unreached`` names kernels that no case was judged on,
    ``too_few`` says of which too few were judged, and ``idle_oracles`` are those that were asked for by name and apply
    to no case that was drawn. ``first_case_s``: when the first case had been judged, and ``first_minute``: how many had
    been 60 seconds after the command began; ``compiling``: the part of the workers' time that went into compiling
    kernels. ``environments`` are those that kernels ran in, where any were named. ``remarks``: what reports say beside
    the findings.

    Kernels, and findings of each, are in the order of all reports: the worst first."""

    format: str
    stop_reason: StopReason
    elapsed_s: float
    cases: int
    device: str
    kernels: tuple[KernelSummary, ...]
    first_case_s: float | None = None
    first_minute: int = 0
    compiling: float = 0.0
    unreached: tuple[str, ...] = ()
    too_few: tuple[str, ...] = ()
    idle_oracles: tuple[OracleName, ...] = ()
    environments: tuple[EnvironmentSummary, ...] = ()
    remarks: tuple[RemarkSummary, ...] = ()


def summarise(result: CampaignResult) -> Summary:
    """The summary of a campaign."""
    statistics = result.statistics
    inferred = {one.target: one for one in result.limited}
    told = [one for first in told_findings(result) for one in (first, *first.others)]
    return Summary(
        format=FORMAT,
        stop_reason=result.stop_reason,
        elapsed_s=round(result.elapsed_s, 3),
        cases=statistics.cases,
        device=statistics.device_name,
        kernels=tuple(
            KernelSummary(
                name=kernel.declaration.name,
                target=target,
                problem=str(kernel.declaration.problem),
                cases=kernel.cases,
                max_error_ratio=kernel.max_error_ratio,
                findings=tuple(
                    _summarise_finding(one, statistics)
                    for one in told
                    if one.target == target and one.disposition != "question"
                ),
                questions=tuple(_question(one) for one in result.questions if one.declaration.target == target),
                inferred=inferred[target].searched if target in inferred else "",
                outside_contract=str(inferred[target]) if target in inferred and inferred[target].settled else "",
                not_runnable=kernel.not_runnable,
                unbuilt=result.unbuilt.get(target, ""),
                never_returned=result.never_returned.get(target, ""),
                unsettled=target in result.unsettled,
            )
            for target, kernel in ((target, statistics.kernels[target]) for target in kernels_in_order(result))
        ),
        first_case_s=None if statistics.first_case_s is None else round(statistics.first_case_s, 3),
        first_minute=statistics.throughput.until(_MINUTE_S),
        compiling=round(statistics.share_compiling(), 3),
        unreached=tuple(statistics.kernels[target].declaration.name for target in result.unreached),
        too_few=sentences_of(result.too_few),
        idle_oracles=result.idle_oracles,
        environments=_environments(result),
        remarks=tuple(RemarkSummary(weight=o.weight, text=o.text, targets=o.targets) for o in remarks_on(result)),
    )


def write_summary(result: CampaignResult, path: Path) -> None:
    """Write the summary as indented JSON. Raises OSError."""
    write_json(path, summarise(result))


def _environments(result: CampaignResult) -> tuple[EnvironmentSummary, ...]:
    statistics = result.statistics
    alone = [] if statistics.python is None else [statistics.python]
    devices = {one.path: statistics.device_name for one in alone}
    return environments_of(result.pythons or alone, result.devices or devices, statistics.kernels)


def _question(finding: Finding) -> QuestionSummary:
    limits = {} if finding.remedy is None else finding.remedy.declared()
    return QuestionSummary(
        field=", ".join(limits),
        declaration=as_call("Supports", limits),
        path=None if finding.path is None else str(finding.path),
        message=finding.failure.message,
    )


def _summarise_finding(told: ToldFinding, statistics: Statistics) -> FindingSummary:
    finding = told.finding
    return FindingSummary(
        oracle=finding.failure.oracle,
        cause=finding.cause,
        in_contract=statistics.in_contract(finding),
        cases_seen=finding.cases_seen,
        known=statistics.is_known(finding),
        undecided=sum(one.cases_seen for one in undecided(finding, statistics)),
        hash=finding.tag,
        signature=told.title,
        entry=told.number,
        first_seen_s=round(finding.first_seen_s, 3),
        shrunk_s=None if finding.shrunk_s is None else round(finding.shrunk_s, 3),
        path=None if finding.path is None else str(finding.path),
        message=finding.failure.message,
        failed=finding.failed if finding.is_flaky else 0,
        runs=finding.runs if finding.is_flaky else 0,
        sources=finding.failure.sources,
        python="" if finding.python is None else str(finding.python.path),
        outcomes=outcomes_of(finding.outcomes),
    )


_ALWAYS_TOLD = ("python", "torch", "triton", "numpy")


class EnvironmentSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where cases ran: the path of an interpreter, its device, and the versions of Python, torch, Triton and NumPy and
    of whatever else is not the same in all environments that matters to the kernels."""

    python: str
    device: str
    versions: dict[str, str]


class OutcomeSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The outcome of a case in the environment ``python``; ``message`` says of a failure or a case not judged more.

    It failed in ``failed`` of ``runs`` runs.
    """

    python: str
    outcome: Ending
    symptom: str = ""
    message: str = ""
    failed: int = 0
    runs: int = 1


def environments_of(
    pythons: Sequence[Python], devices: Mapping[Path, str], targets: Collection[str]
) -> tuple[EnvironmentSummary, ...]:
    """Each environment; ``devices`` by the interpreter's path, ``targets``: the kernels that ran there."""
    named = {*_ALWAYS_TOLD, *(name for target in targets for name in told_versions(pythons, target))}
    return tuple(
        EnvironmentSummary(
            python=str(python.path),
            device=devices.get(python.path, ""),
            versions={name: text for name, text in sorted(python.versions.items()) if name in named},
        )
        for python in pythons
    )


def outcomes_of(outcomes: Sequence[EnvironmentOutcome]) -> tuple[OutcomeSummary, ...]:
    """One of each environment."""
    return tuple(
        OutcomeSummary(
            python=str(one.python.path),
            outcome=one.ending,
            symptom=one.symptom,
            message=one.message,
            failed=one.failed,
            runs=one.runs,
        )
        for one in outcomes
    )
