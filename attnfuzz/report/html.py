"""The result of a campaign as one HTML page that needs nothing else: no network, no other file, no script to be read.

`page_of` puts together what it shows, as plain data and finished drawings; the template gives it its place.
"""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from markupsafe import Markup

from attnfuzz.campaign.counts import KernelStatistics
from attnfuzz.campaign.draw.coverage import Coverage, coverage_of
from attnfuzz.campaign.environments import name_of
from attnfuzz.campaign.identity.finding import Finding
from attnfuzz.campaign.result import CampaignResult, Statistics
from attnfuzz.campaign.saved.replay import replay_command
from attnfuzz.campaign.stopping import format_duration
from attnfuzz.corpus import current_environment, decode_regression, encode_regression
from attnfuzz.declaration import KernelLoadError
from attnfuzz.oracles.verdict import RELATION_ORACLES, ends_process
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.report.charts import (
    CoverageMap,
    PairTable,
    coverage_map,
    devices_of,
    histogram_svg,
    pair_tables,
    timeline_svg,
)
from attnfuzz.report.drawing import Drawing, case_svg, draw
from attnfuzz.report.explained import weights_svg
from attnfuzz.report.files import rendered, write_file
from attnfuzz.report.findings import (
    CLOSE_TO_THE_BOUND,
    OUT_OF_CONTRACT,
    Severity,
    count,
    finding_lines,
    headline,
    in_order,
    known_since,
    largest_ratio,
    severity_of,
    what_was_found,
)
from attnfuzz.said import text_of

__all__ = [
    "FindingPart",
    "FindingsPart",
    "KernelPart",
    "Page",
    "Script",
    "Tile",
    "html_page",
    "page_of",
    "scripts_of",
    "write_html",
]


_MAX_HOLES = 80
_SCRIPTS_S = 60.0
"""For all of them together."""
_MOST_CHARACTERS, _MOST_CHARACTERS_IN_ALL = 200_000, 4_000_000
"""Of scripts: a page of a hundred megabytes opens nowhere."""
_ENDS = {
    "interrupted": "It was interrupted before its time was over.",
    "fail_fast": "It ended with its first finding, as it was told to.",
    "workers_lost": "It ended early: every worker was lost.",
    "environment": "It ended early: no kernel could be run any more.",
}
_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Script:
    """A repro script, or why there is none."""

    text: str = ""
    why_not: str = ""


def write_html(result: CampaignResult, path: Path) -> None:
    """Write the page, with scripts that show its findings. Raises OSError."""
    write_file(path, html_page(result, scripts_of(result)).encode())


def html_page(result: CampaignResult, scripts: Sequence[Script] = ()) -> str:
    """The page; without ``scripts``, or with one for each finding in the order of all reports."""
    return rendered("campaign.html.jinja", page=page_of(result, scripts))


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
    here, and why. ``compared``: cases by dtype, each with a histogram.
    """

    kernel: KernelStatistics
    findings: int
    time: dict[str, float]
    histograms: dict[str, Markup]
    compared: dict[str, int]
    coverage: Coverage | None
    tables: list[PairTable]
    map: CoverageMap | None
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


def scripts_of(result: CampaignResult) -> list[Script]:
    """Of each finding, in the order of all reports, its script or the sentence that stands in its place.

    They are made when the search is over: that imports torch, which workers would have inherited.
    """
    until, room = time.monotonic() + _SCRIPTS_S, _MOST_CHARACTERS_IN_ALL
    scripts = []
    for finding in in_order(result):
        why_none = _why_no_script(finding, result)
        if not why_none and time.monotonic() >= until:
            why_none = f"there was no time for a script within {_SCRIPTS_S:.0f} s; attnfuzz repro writes it"
        script = Script(why_not=why_none) if why_none else _script(finding, result.statistics.device_name)
        if len(script.text) > min(room, _MOST_CHARACTERS):
            script = Script(
                why_not=f"a script of {len(script.text):,} characters is left out; attnfuzz repro writes it"
            )
        room -= len(script.text)
        scripts.append(script)
    return scripts


def _why_no_script(finding: Finding, result: CampaignResult) -> str:
    """Why none is made."""
    oracle = finding.failure.oracle
    if oracle in RELATION_ORACLES:
        return (
            f"{oracle} compares runs on several inputs, and a script holds only those of the case: use attnfuzz replay"
        )
    if oracle == "sanitizer":
        return "a script compares results, which need not show what compute-sanitizer found: replay it with --sanitizer"
    if result.stop_reason == "interrupted":
        return "the search was interrupted, so no script was made; attnfuzz repro writes it"
    return ""


def _script(finding: Finding, device: str) -> Script:
    from attnfuzz.report.repro import repro_script  # loads torch

    saved = encode_regression(finding.regression(device))
    try:
        return Script(text=repro_script(decode_regression(saved, "report"), finding.declaration))
    except (CaseTooLarge, KernelLoadError) as error:
        return Script(why_not=str(error))
    except Exception as error:  # noqa: BLE001 - told in its place; those of other findings are wanted
        return Script(why_not=f"no script could be made ({text_of(error)}); use attnfuzz replay")


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
    return "good" if result.statistics.cases and not result.findings else ""


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
    ratio = largest_ratio(statistics)
    pairs = sum(part.coverage.met for part in kernels if part.coverage is not None)
    rate = statistics.cases / max(result.elapsed_s, 1e-9)
    mood = "bad" if ratio > 1 and result.fails else "near" if ratio > CLOSE_TO_THE_BOUND else ""
    return [
        Tile(f"{statistics.cases:,}", "cases"),
        Tile(f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}", "cases a second"),
        Tile(f"{ratio:.3g}", "largest error / bound", mood),
        Tile(f"{pairs:,}", "feature pairs met"),
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
    coverage = coverage_of(kernel.declaration, kernel.coverage) if kernel.coverage else None
    return KernelPart(
        kernel=kernel,
        findings=sum(map(result.statistics.in_contract, result.findings_of(kernel.declaration.target))),
        time=_time(kernel),
        histograms={dtype: histogram_svg(counts) for dtype, counts in kernel.ratios.items()},
        compared={dtype: sum(counts.values()) for dtype, counts in kernel.ratios.items()},
        coverage=coverage,
        tables=pair_tables(coverage) if coverage is not None else [],
        map=coverage_map(coverage) if coverage is not None else None,
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
