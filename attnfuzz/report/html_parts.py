"""What the HTML page of a campaign shows, part by part; plain data and finished drawings for its template."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from markupsafe import Markup

from attnfuzz.campaign.coverage import Coverage, Level, coverage_of
from attnfuzz.campaign.duration import format_duration
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.outcomes import name_of
from attnfuzz.campaign.replay import replay_command
from attnfuzz.campaign.result import CampaignResult, KernelStatistics, Statistics
from attnfuzz.corpus import current_environment, encode_regression
from attnfuzz.oracles.verdict import ends_process
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.report.case_svg import case_svg
from attnfuzz.report.coverage_svg import CoverageMap, PairTable, coverage_map, pair_tables
from attnfuzz.report.drawing import Drawing, draw
from attnfuzz.report.explained_svg import weights_svg
from attnfuzz.report.headline import count, finding_lines, headline, known_since, what_was_found
from attnfuzz.report.histogram import histogram_svg
from attnfuzz.report.inline_scripts import Script
from attnfuzz.report.order import OUT_OF_CONTRACT, Severity, in_order, severity_of
from attnfuzz.report.timeline import devices_of, timeline_svg

__all__ = ["FindingPart", "FindingsPart", "KernelPart", "Page", "Tile", "page_of"]

_CLOSE_TO_THE_BOUND = 0.9
_MAX_HOLES = 80
_ENDS = {
    "interrupted": "It was interrupted before its time was over.",
    "fail_fast": "It ended with its first finding, as it was told to.",
    "workers_lost": "It ended early: every worker was lost.",
    "environment": "It ended early: no kernel could be run any more.",
}
_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Tile:
    """A number that stands for the whole campaign; ``mood`` is "", "bad" or "near"."""

    value: str
    label: str
    mood: str = ""


@dataclass(frozen=True)
class FindingPart:
    """A finding with the picture of its case: ``picture``, or a table of ``drawing.states``.

    ``anchor``: its place on the page, which is its hash. ``status``: whether it is new, where that was asked for.
    ``weights`` is the picture of the weights that the kernel gave to each token. Where these were not measured, it is
    None, and ``weigh`` the command that measures and draws them; empty where there are none.
    """

    number: int
    anchor: str
    finding: Finding
    severity: Severity
    status: str
    script: Script | None
    weights: Markup | None
    weigh: str
    headline: str
    drawing: Drawing
    picture: Markup | None
    details: tuple[str, ...]
    saved: str
    command: str
    deadly: bool


@dataclass(frozen=True)
class FindingsPart:
    """Findings under one heading; ``anchor`` is its place on the page."""

    anchor: str
    title: str
    parts: list[FindingPart]


@dataclass(frozen=True)
class KernelPart:
    """A kernel: how its time was spent (share by part), how close it came to its bounds, what it was tried on.

    ``outside``: what lies outside the contract that it was searched in; ``not_runnable``: how many cases could not run
    here, and why. ``compared``: cases by dtype, each with a histogram. ``holes``: for each pair of axes that has any,
    their names and the pairs of levels, as far as there is room; ``holes_left_out`` counts the others.
    """

    kernel: KernelStatistics
    findings: int
    time: dict[str, float]
    histograms: dict[str, Markup]
    compared: dict[str, int]
    coverage: Coverage | None
    tables: list[PairTable]
    map: CoverageMap | None
    holes: list[tuple[str, str, list[tuple[str, str]]]]
    holes_left_out: int
    outside: str
    not_runnable: dict[str, int]


@dataclass(frozen=True)
class Page:
    """Everything on the page."""

    result: CampaignResult
    title: str
    effort: str
    end: str
    when: str
    versions: dict[str, str]
    tiles: list[Tile]
    timeline: Markup
    devices: list[str]
    mood: str
    findings: list[FindingPart]
    sections: list[FindingsPart]
    has_status: bool
    kernels: list[KernelPart]
    dtypes: list[str]


def page_of(result: CampaignResult, scripts: Sequence[Script] = ()) -> Page:
    """The page of ``result``; ``scripts`` are in the order of its findings, if there are any."""
    statistics = result.statistics
    findings = [
        _finding(number, anchor, finding, script, statistics)
        for number, (finding, anchor, script) in enumerate(_with_anchors(in_order(result), scripts), start=1)
    ]
    kernels = [_kernel(kernel, result) for kernel in statistics.kernels.values()]
    seen = {dtype for kernel in statistics.kernels.values() for dtype in kernel.ratios}
    return Page(
        result=result,
        title=_title(result),
        effort=_effort(result),
        end=_ENDS.get(result.stop_reason, ""),
        when=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        versions=_versions(result),
        tiles=_tiles(result, kernels),
        timeline=timeline_svg(
            statistics.throughput,
            elapsed_s=result.elapsed_s,
            found=[(part.finding.first_seen_s, part.anchor) for part in findings],
        ),
        devices=devices_of(statistics.throughput),
        mood=_mood(result),
        findings=findings,
        sections=_sections(findings, statistics),
        has_status=statistics.against is not None,
        kernels=kernels,
        dtypes=[dtype for dtype in _DTYPES if dtype in seen],
    )


def _versions(result: CampaignResult) -> dict[str, str]:
    """Of the environment that kernels ran in; where there were several, what each is called."""
    statistics = result.statistics
    if result.pythons:
        return {f"environment {n}": name_of(python) for n, python in enumerate(result.pythons, start=1)}
    executors = None if statistics.python is None else statistics.python.versions
    return current_environment(statistics.device_name, executors).versions


def _title(result: CampaignResult) -> str:
    if not result.statistics.cases and not result.findings:
        return "No case was judged"
    found = what_was_found(result)
    return found[:1].upper() + found[1:]


def _mood(result: CampaignResult) -> str:
    """The title's: findings that do not count make it neither bad nor good."""
    if result.fails:
        return "bad"
    return "good" if result.statistics.cases and not result.findings and not result.elsewhere else ""


def _with_anchors(
    ordered: Sequence[Finding], scripts: Sequence[Script]
) -> Iterable[tuple[Finding, str, Script | None]]:
    """Each finding with a place of its own on the page: two that began with the same case have the same hash."""
    taken = Counter[str]()
    for finding, script in zip_longest(ordered, scripts):
        taken[finding.tag] += 1
        times = taken[finding.tag]
        yield finding, finding.tag if times == 1 else f"{finding.tag}-{times}", script


def _sections(findings: list[FindingPart], statistics: Statistics) -> list[FindingsPart]:
    """What is in the contract, and what is not."""
    inside = [part for part in findings if statistics.in_contract(part.finding)]
    outside = [part for part in findings if not statistics.in_contract(part.finding)]
    sections = (FindingsPart("findings", "Findings", inside), FindingsPart("outside", OUT_OF_CONTRACT, outside))
    return [section for section in sections if section.parts]


def _effort(result: CampaignResult) -> str:
    statistics = result.statistics
    return (
        f"{statistics.cases:,} cases of {count(len(statistics.kernels), 'kernel')} in "
        f"{format_duration(result.elapsed_s)} on {statistics.device_name}, with "
        f"{count(statistics.workers, 'worker')} and seed {statistics.seed}."
    )


def _tiles(result: CampaignResult, kernels: list[KernelPart]) -> list[Tile]:
    statistics = result.statistics
    ratio = max((kernel.max_error_ratio for kernel in statistics.kernels.values()), default=0.0)
    covered = [part.coverage for part in kernels if part.coverage is not None]
    possible = sum(coverage.possible for coverage in covered)
    share = sum(coverage.covered for coverage in covered) / possible if possible else 0.0
    rate = statistics.cases / max(result.elapsed_s, 1e-9)
    mood = "bad" if ratio > 1 and result.fails else "near" if ratio > _CLOSE_TO_THE_BOUND else ""
    return [
        Tile(f"{statistics.cases:,}", "cases"),
        Tile(f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}", "cases a second"),
        Tile(f"{ratio:.3g}", "largest error / bound", mood),
        Tile(f"{100 * share:.1f}%", "feature pairs covered"),
        Tile(f"{100 * statistics.share_compiling():.0f}%", "of the time compiling"),
        Tile(str(statistics.restarts), "restarts of kernel processes"),
    ]


def _finding(number: int, anchor: str, finding: Finding, script: Script | None, statistics: Statistics) -> FindingPart:
    failure, regression = finding.failure, finding.regression(statistics.device_name)
    drawing = draw(finding.case, failure.blame)
    return FindingPart(
        number=number,
        anchor=anchor,
        finding=finding,
        severity=severity_of(finding),
        status=_status(finding, statistics),
        script=script,
        weights=weights_svg(finding.weights) if finding.weights else None,
        weigh=_weigh(finding),
        headline=headline(finding.case),
        drawing=drawing,
        picture=case_svg(drawing) if drawing.sequences else None,
        details=tuple(filter(None, (*finding_lines(regression.finding, finding.case), finding.comparison()))),
        saved=encode_regression(regression).decode().rstrip(),
        command=replay_command(finding.path, finding.declaration.target, finding.python)
        if finding.path is not None
        else "",
        deadly=ends_process(failure),
    )


def _status(finding: Finding, statistics: Statistics) -> str:
    if statistics.against is None:
        return ""
    return known_since(statistics) if statistics.is_known(finding) else "new"


def _weigh(finding: Finding) -> str:
    """A merge has no weights, nor do users' problems; a case that hangs, or needs others before it, is not weighed."""
    problem = finding.declaration.problem
    if finding.weights or finding.path is None or problem == "merge_states" or isinstance(problem, OpenProblem):
        return ""
    if finding.failure.oracle == "hang" or finding.preceding:
        return ""
    replay = replay_command(finding.path, finding.declaration.target, finding.python)
    return f"{replay.replace('replay', 'explain', 1)} -o weights.svg"


def _kernel(kernel: KernelStatistics, result: CampaignResult) -> KernelPart:
    coverage = None
    if kernel.coverage:
        coverage = coverage_of(kernel.declaration, kernel.coverage, device=result.statistics.device)
    holes = list(coverage.holes()) if coverage is not None else []
    return KernelPart(
        kernel=kernel,
        findings=sum(map(result.statistics.in_contract, result.findings_of(kernel.declaration.target))),
        time=_time(kernel),
        histograms={dtype: histogram_svg(counts) for dtype, counts in kernel.ratios.items()},
        compared={dtype: sum(counts.values()) for dtype, counts in kernel.ratios.items()},
        coverage=coverage,
        tables=pair_tables(coverage) if coverage is not None else [],
        map=coverage_map(coverage) if coverage is not None else None,
        holes=_by_axes(holes[:_MAX_HOLES]),
        holes_left_out=max(0, len(holes) - _MAX_HOLES),
        outside=next((str(one) for one in result.limited if one.target == kernel.declaration.target), ""),
        not_runnable=kernel.not_runnable,
    )


def _time(kernel: KernelStatistics) -> dict[str, float]:
    """Shares of the time spent on the kernel, the rest included."""
    parts = {
        "compiling": kernel.compile_s,
        "kernel": kernel.kernel_s,
        "reference": kernel.reference_s,
        "building": kernel.build_s,
    }
    total = max(kernel.seconds, sum(parts.values()))
    if not total:
        return {}
    return {name: seconds / total for name, seconds in parts.items()} | {"rest": 1 - sum(parts.values()) / total}


def _by_axes(holes: Iterable[tuple[Level, Level]]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Pairs of levels, grouped by their axes."""
    ordered = sorted(holes, key=lambda hole: (hole[0][0], hole[1][0]))
    return [
        (one, other, [(first[1], second[1]) for first, second in group])
        for (one, other), group in groupby(ordered, key=lambda hole: (hole[0][0], hole[1][0]))
    ]
