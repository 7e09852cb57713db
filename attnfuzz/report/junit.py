"""The result of a campaign in the JUnit XML format, which CI systems show.

There is no one standard. What is written here is valid by both of the schemas that are in use: Jenkins's (junit-10.xsd
of its xunit plugin) and Ant's (windyroad/JUnit-Schema), which is stricter.
"""

from __future__ import annotations

import datetime
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from attnfuzz.campaign.result import CampaignResult
from attnfuzz.campaign.statistics import KernelStatistics, pairs_met
from attnfuzz.oracles.registry import EXCEPTION, oracle_of
from attnfuzz.own_files import write_file
from attnfuzz.report.findings import ToldFinding, kernels_in_order, remedy_lines, told_findings
from attnfuzz.report.remarks import Remark, remarks_on
from attnfuzz.untrusted_text import only_printable
from attnfuzz.verdict import Failure

Element = ElementTree.Element

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(result: CampaignResult) -> bytes:
    """One suite a kernel: a test case for the search itself, and one for each finding.

    A finding that does not count is a test case that was skipped, and a kernel of which not enough was judged an error,
    so that a build fails if the command does. A finding that is told with another kernel's, since both come of the same
    code, is skipped: as many fail as there are bugs.
    """
    began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=result.elapsed_s)
    root = ElementTree.Element("testsuites")
    findings, remarks = told_findings(result), [one for one in remarks_on(result) if one.weight != "note"]
    for target in kernels_in_order(result):
        kernel = result.statistics.kernels[target]
        suite = _suite(root, target, kernel.seconds, began)
        _properties(suite, result, kernel)
        _search(suite, kernel, [one for one in remarks if target in one.targets])
        for first in findings:
            for told in (first, *first.others):
                if told.target == target:
                    _finding(suite, told, result, beside=None if told is first else first)
    of_all = [remark for remark in remarks if not remark.targets]
    if of_all or result.stop_reason in ("workers_lost", "environment"):
        _trouble(_suite(root, "attnfuzz", result.elapsed_s, began), result, of_all)
    for suite in root:
        _complete(suite)
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def write_junit(result: CampaignResult, path: Path) -> None:
    """Write the report. Raises OSError."""
    write_file(path, junit_xml(result))


def _suite(root: Element, name: str, seconds: float, began: datetime.datetime) -> Element:
    attributes = {
        "id": str(len(root)),
        "package": "attnfuzz",
        "name": _clean(name),
        "time": f"{seconds:.3f}",
        "timestamp": began.replace(microsecond=0, tzinfo=None).isoformat(),
        "hostname": _clean(platform.node()) or "localhost",
    }
    return ElementTree.SubElement(root, "testsuite", attributes)


def _properties(suite: Element, result: CampaignResult, kernel: KernelStatistics) -> None:
    facts = {
        "problem": str(kernel.declaration.problem),
        "device": result.statistics.device_name,
        "seed": result.statistics.seed,
        "stop_reason": result.stop_reason,
        "cases": kernel.cases,
        "max_error_ratio": f"{kernel.max_error_ratio:.6g}",
        "feature_pairs_met": pairs_met(kernel.coverage),
    }
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", name=name, value=_clean(str(value)))


def _search(suite: Element, kernel: KernelStatistics, remarks: Sequence[Remark]) -> None:
    """Passes if enough was judged, and nothing was left in doubt: what failed has test cases of its own."""
    case = ElementTree.SubElement(
        suite, "testcase", classname=suite.attrib["name"], name="search", time=f"{kernel.seconds:.3f}"
    )
    said = [remark.text for remark in remarks] or ([] if kernel.cases else ["no case was judged; raise --budget"])
    if said:
        report = ElementTree.SubElement(case, "error", type="not judged", message=_clean(said[0]))
        report.text = _clean("\n".join([*said, *(line for remark in remarks for line in remark.details)]))


def _finding(suite: Element, told: ToldFinding, result: CampaignResult, *, beside: ToldFinding | None) -> None:
    finding = told.finding
    until = result.elapsed_s if finding.shrunk_s is None else finding.shrunk_s
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=suite.attrib["name"],
        name=_clean(told.title),
        time=f"{max(0.0, until - finding.first_seen_s):.3f}",
    )
    is_told = "" if beside is None else f"told with {beside.target}, as one of {len(beside.others) + 1} kernels"
    report = _report(case, finding.failure, _why_skipped(told) or is_told)
    replay = told.command or "not saved; its regression file would hold:"
    others = [f"{one.target}: {one.command or one.title}" for one in told.others]
    lines = (
        told.message, *told.lines, told.certainty, told.comparison, f"case: {told.case}", replay, told.saved,
        told.shown_by, *others,
    )  # fmt: skip
    report.text = _clean("\n".join(filter(None, lines)) + "\n")


def _report(case: Element, failure: Failure, why_skipped: str) -> Element:
    """The report on ``case``: an error or a failure, unless there is a reason why that does not count."""
    if why_skipped:
        return ElementTree.SubElement(case, "skipped", message=_clean(f"{why_skipped}: {failure.message}"))
    has_no_result = oracle_of(failure.oracle).ends_process or failure.oracle == EXCEPTION.name
    kind = "error" if has_no_result else "failure"
    return ElementTree.SubElement(case, kind, type=_clean(failure.name), message=_clean(failure.message))


def _why_skipped(told: ToldFinding) -> str:
    """Why a finding does not count; empty if it does."""
    if told.disposition in ("question", "outside"):
        remedy = told.finding.remedy
        lines = () if remedy is None else remedy_lines(remedy.declared(), told.finding.case)
        return ", ".join(("a question" if told.disposition == "question" else "possibly out of contract", *lines))
    return told.status if told.disposition == "known" else ""


def _trouble(suite: Element, result: CampaignResult, remarks: Sequence[Remark]) -> None:
    """The campaign itself failed: a CI system must not show it as passed because no kernel did."""
    ElementTree.SubElement(suite, "properties")
    case = ElementTree.SubElement(suite, "testcase", classname="attnfuzz", name="campaign", time=suite.attrib["time"])
    first = remarks[0].text.splitlines()[-1] if remarks else result.stop_reason
    report = ElementTree.SubElement(case, "error", type=result.stop_reason, message=_clean(first))
    report.text = _clean("\n\n".join(remark.text for remark in remarks))


def _complete(suite: Element) -> None:
    """Set the counts that a suite must state, and end it as it must end."""
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(1 for _ in suite.iter(tag))))
    for name in ("system-out", "system-err"):
        ElementTree.SubElement(suite, name)


def _clean(text: str) -> str:
    """Without the characters that XML 1.0 cannot hold, and those that a page showing it would obey."""
    return _NOT_IN_XML.sub("?", only_printable(text))
