"""The result of a campaign as one HTML page that needs nothing else: no network, no other file, no script to be read.

The template asks for what it shows: findings as all reports tell them, charts, and pictures of cases.
"""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from attnfuzz.campaign.environments import name_of
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import CampaignResult
from attnfuzz.campaign.statistics import KernelStatistics, by_axis, coverage_of
from attnfuzz.corpus import current_environment, decode_regression, encode_regression
from attnfuzz.declaration import KernelLoadError
from attnfuzz.oracles.registry import HANG, oracle_of
from attnfuzz.own_files import write_file
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.report.charts import coverage_map, devices_of, histogram_svg, timeline_svg
from attnfuzz.report.drawing import case_svg, draw
from attnfuzz.report.explained import weights_svg
from attnfuzz.report.files import rendered
from attnfuzz.report.findings import (
    CLOSE_TO_THE_BOUND,
    OUT_OF_CONTRACT,
    QUESTIONS,
    ToldFinding,
    headline,
    largest_ratio,
    told_findings,
    what_was_found,
)
from attnfuzz.report.remarks import not_all_judged, remarks_on
from attnfuzz.report.scripts import Following, why_no_script
from attnfuzz.untrusted_text import text_of
from attnfuzz.verdict import ends_process

_SCRIPTS_S = 60.0
"""For all of them together."""
_MOST_CHARACTERS, _MOST_CHARACTERS_IN_ALL = 200_000, 4_000_000
"""Most characters of scripts: a page of a hundred megabytes opens nowhere."""
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
    """The page; without ``scripts``, or with one for each of `told_findings`."""
    statistics = result.statistics
    told = told_findings(result)
    anchors = _anchors(told)
    seen = {dtype for kernel in statistics.kernels.values() for dtype in kernel.ratios}
    return rendered(
        "campaign.html.jinja",
        result=result,
        statistics=statistics,
        title=_title(result),
        mood=_mood(result),
        when=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        versions=_versions(result),
        findings=list(zip_longest(told, anchors, scripts)),
        sections={
            "findings": "Findings",
            "question": QUESTIONS,
            "outside": OUT_OF_CONTRACT,
        },
        timeline=timeline_svg(
            statistics.throughput,
            elapsed_s=result.elapsed_s,
            found=[(one.finding.first_seen_s, anchor) for one, anchor in zip(told, anchors, strict=True)],
        ),
        devices=devices_of(statistics.throughput),
        coverage={
            target: coverage_of(kernel.declaration, kernel.coverage)
            for target, kernel in statistics.kernels.items()
            if kernel.coverage
        },
        counting=Counter(
            one.target for first in told for one in (first, *first.others) if one.disposition in ("counts", "known")
        ),
        remarks=remarks_on(result),
        dtypes=[dtype for dtype in _DTYPES if dtype in seen],
        ratio=largest_ratio(statistics),
        near=CLOSE_TO_THE_BOUND,
        by_axis=by_axis,
        case_svg=case_svg,
        coverage_map=coverage_map,
        draw=draw,
        ends_process=ends_process,
        headline=headline,
        histogram_svg=histogram_svg,
        oracle_of=oracle_of,
        time_shares=_time_shares,
        weigh_command=_weigh_command,
        weights_svg=weights_svg,
    )


def scripts_of(result: CampaignResult) -> list[Script]:
    """The script of each of `told_findings`, or the sentence that stands in its place.

    They are made when the search is over: that imports torch, which workers would have inherited.
    """
    until, room = time.monotonic() + _SCRIPTS_S, _MOST_CHARACTERS_IN_ALL
    scripts = []
    with Following(result.statistics.device) as following:
        for finding in (told.finding for told in told_findings(result)):
            why_none = _why_no_script(finding, result)
            if not why_none and time.monotonic() >= until:
                why_none = f"there was no time for a script within {_SCRIPTS_S:.0f} s; attnfuzz repro writes it"
            script = Script(why_not=why_none) if why_none else _script(finding, result, following)
            if len(script.text) > min(room, _MOST_CHARACTERS):
                script = Script(
                    why_not=f"a script of {len(script.text):,} characters is left out; attnfuzz repro writes it"
                )
            room -= len(script.text)
            scripts.append(script)
    return scripts


def _why_no_script(finding: Finding, result: CampaignResult) -> str:
    """Why none is made."""
    if why := why_no_script(finding.failure.oracle):
        return why
    if result.stop_reason == "interrupted":
        return "the search was interrupted, so no script was made; attnfuzz repro writes it"
    return ""


def _script(finding: Finding, result: CampaignResult, following: Following) -> Script:
    from attnfuzz.report.repro import repro_script  # loads torch

    saved = encode_regression(finding.regression(result.statistics.device_name))
    try:
        follow = following.of(finding.declaration)
        return Script(text=repro_script(decode_regression(saved, "report"), finding.declaration, follow=follow))
    except (CaseTooLarge, KernelLoadError) as error:
        return Script(why_not=str(error))
    except Exception as error:  # noqa: BLE001 - told in its place; those of other findings are wanted
        return Script(why_not=f"no script could be made ({text_of(error)}); use attnfuzz replay")


def _versions(result: CampaignResult) -> dict[str, str]:
    """Versions of the environment that kernels ran in; where there were several, the name of each."""
    statistics = result.statistics
    if result.pythons:
        return {f"environment {n}": name_of(python) for n, python in enumerate(result.pythons, start=1)}
    executors = None if statistics.python is None else statistics.python.versions
    return current_environment(statistics.device_name, executors).versions


def _title(result: CampaignResult) -> str:
    if not result.statistics.cases and not result.findings:
        return "No case was judged"
    found = what_was_found(result)
    rest = "" if result.findings or not not_all_judged(result) else "; not all was judged"
    return found[:1].upper() + found[1:] + rest


def _mood(result: CampaignResult) -> str:
    """The title's: findings that do not count, and what was not judged, make it neither bad nor good."""
    if result.fails:
        return "bad"
    is_clear = not result.findings and all(remark.weight == "note" for remark in remarks_on(result))
    return "good" if result.statistics.cases and is_clear else ""


def _anchors(told: Sequence[ToldFinding]) -> list[str]:
    """A place of its own on the page for each: two findings that began with the same case have the same hash."""
    taken = Counter[str]()
    anchors = []
    for one in told:
        taken[one.finding.tag] += 1
        times = taken[one.finding.tag]
        anchors.append(one.finding.tag if times == 1 else f"{one.finding.tag}-{times}")
    return anchors


def _weigh_command(told: ToldFinding) -> str:
    """The command that measures and draws the weights of a case; empty where that has been done, or cannot be.

    A merge has no weights, nor do users' problems; a case that hangs, or needs others before it, is not weighed, nor is
    one to which a relation or an oracle of the kernel's own file objects.
    """
    finding, problem = told.finding, told.finding.declaration.problem
    oracle = oracle_of(finding.failure.oracle)
    if finding.weights or not told.command or problem == "merge_states" or isinstance(problem, OpenProblem):
        return ""
    if oracle is HANG or oracle.is_relation or oracle.is_own or finding.preceding:
        return ""
    return f"{told.command.replace('replay', 'explain', 1)} -o weights.svg"


def _time_shares(kernel: KernelStatistics) -> dict[str, float]:
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
