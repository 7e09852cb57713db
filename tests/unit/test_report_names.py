"""What a finding is called: the same in the log, on the terminal, on the page, in JUnit, JSON and annotations."""

from __future__ import annotations

import html
import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from attnfuzz.mistake import NARROW_OFFSETS
from attnfuzz.report.ci import github_annotations
from attnfuzz.report.files import write_json
from attnfuzz.report.findings import title_of
from attnfuzz.report.html import html_page
from attnfuzz.report.junit import junit_xml
from attnfuzz.report.progress import describe, panel
from attnfuzz.report.summary import summarise
from attnfuzz.report.terminal import print_result
from attnfuzz.verdict import Cause, Failure
from tests.unit.report_results import DENSE, PAGED, a_finding, a_result

FAR = Failure(
    oracle="page_relocation",
    kind="strides of q",
    message="q is read at the wrong place",
    causes=(Cause(mistake=NARROW_OFFSETS),),
)
OF_ONES_OWN = Failure(oracle="rows_in_range", kind="", message="a row is larger than its values")


@pytest.mark.parametrize(
    ("failure", "name"), [(FAR, "page_relocation/narrow_offsets"), (OF_ONES_OWN, "rows_in_range")], ids=["cause", "own"]
)
def test_a_finding_has_one_name_in_all_that_is_told_of_it(failure: Failure, name: str, tmp_path: Path) -> None:
    """A reader who looks for a line of the log in the report would find another bug there."""
    finding = a_finding(failure=failure)
    result = a_result(finding)
    title = title_of(finding)
    assert title == name or title.startswith(f"{name} [")
    assert title == title_of(finding.regression("a device").finding)

    assert f" {PAGED.target} {name}: " in describe("found", finding)
    live = Console(file=io.StringIO(), width=200)
    live.print(panel(result.statistics, shrinking=[finding], width=200, height=40))
    assert f" {name} #" in live.file.getvalue()  # type: ignore[attr-defined]  # of StringIO
    terminal = Console(file=io.StringIO(), width=200)
    print_result(terminal, result)
    assert f"1. {PAGED.target}  {title}" in terminal.file.getvalue()  # type: ignore[attr-defined]  # of StringIO
    page = html.unescape(html_page(result))
    assert f"<code>{title}</code>" in page
    assert f">{title}</a>" in page
    cases = [case for case in ElementTree.fromstring(junit_xml(result)).iter("testcase") if case.get("name") == title]
    assert [one.get("type") for case in cases for one in case] == [name]
    write_json(tmp_path / "explore.json", summarise(result))
    summary = json.loads((tmp_path / "explore.json").read_bytes())
    assert summary["kernels"][0]["findings"][0]["signature"] == title
    (annotation,) = github_annotations(tmp_path)
    assert title.partition(" [")[0] in annotation


def test_what_a_finding_also_shows_as_is_called_as_findings_are() -> None:
    """A finding that another one stands for would not be known by the name that it had in the log."""
    finding = a_finding()
    finding.also_shows_as(a_finding(DENSE, failure=OF_ONES_OWN))
    assert [one.name for one in finding.also] == ["rows_in_range"]
