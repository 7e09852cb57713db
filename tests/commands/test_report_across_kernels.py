"""One mistake that several kernels show is one entry in every report, and one finding of each kernel in the JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import CampaignResult
from attnfuzz.report.ci import github_annotations, summary_in_markdown
from attnfuzz.report.findings import are_of_one_place, told_findings, what_was_found
from attnfuzz.report.html import html_page
from attnfuzz.report.junit import junit_xml
from attnfuzz.report.summary import write_summary
from attnfuzz.report.terminal import print_result
from attnfuzz.verdict import Cause, SourceLine
from tests.common.named_features import named
from tests.common.report_results import DENSE, MERGE, PAGED, a_finding, a_result

LINE = SourceLine(file="engine/ops.py", line=431, text="tl.load(table + page)")
CALLS = ("engine.ops:attend",)
REPLAY = "attnfuzz replay"


def shown(declaration: Any, *, calls: tuple[str, ...] = (), **fields: Any) -> Finding:
    """A finding of a kernel that calls functions of an engine, in a file of its own."""
    called = msgspec.structs.replace(declaration, calls=calls)
    found = a_finding(called, path=Path(f"{declaration.name}.json"), features=named("window"))
    found.failure = msgspec.structs.replace(found.failure, **fields)
    return found


def of_one_line() -> CampaignResult:
    return a_result(*(shown(one, sources=(LINE,)) for one in (PAGED, DENSE, MERGE)), shown(PAGED, kind="lse:value"))


def printed(result: CampaignResult) -> str:
    console = Console(file=(file := io.StringIO()), width=140, highlight=False, markup=False, color_system=None)
    print_result(console, result)
    return file.getvalue()


WINDOW, OTHER_WAY = Cause(mistake="window", way="left out"), Cause(mistake="window", way="one too long")


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({"sources": (LINE,)}, {"sources": (LINE,), "causes": ()}, True),
        ({"sources": (LINE,)}, {"sources": (msgspec.structs.replace(LINE, line=7),), "calls": CALLS}, False),
        (
            {"calls": CALLS, "causes": (WINDOW,)},
            {"calls": CALLS, "causes": (OTHER_WAY, WINDOW), "kind": "lse:inf"},
            True,
        ),
        ({"calls": CALLS, "causes": (WINDOW,)}, {"calls": CALLS, "causes": (OTHER_WAY,)}, False),
        ({"calls": CALLS, "causes": (WINDOW,)}, {"calls": ("engine.ops:merge",), "causes": (WINDOW,)}, False),
        ({"calls": CALLS, "causes": ()}, {"calls": CALLS, "causes": ()}, True),
        ({"calls": CALLS, "causes": ()}, {"calls": CALLS, "causes": (), "kind": "lse:nan"}, False),
        ({"causes": (WINDOW,)}, {"causes": (WINDOW,)}, False),
    ],
)
def test_what_comes_of_one_place_is_told_from_what_looks_alike(
    first: dict[str, Any], second: dict[str, Any], same: bool
) -> None:
    """One unmasked load would be four findings, or two kernels of two projects be told as one bug."""
    a, b = shown(PAGED, **first), shown(DENSE, **second)
    assert are_of_one_place(a, b) is same
    assert are_of_one_place(b, a) is same
    assert len(told_findings(a_result(a, b))) == (1 if same else 2)


def test_two_bugs_of_one_kernel_stay_two() -> None:
    """A line that two mistakes are made on would hide one of them."""
    both = [shown(PAGED, sources=(LINE,), kind=kind) for kind in ("out:value", "lse:value")]
    first, second = told_findings(a_result(*both, shown(DENSE, sources=(LINE,))))
    assert (len(first.others), second.others) == (1, ())


def test_the_terminal_tells_it_once() -> None:
    """A maintainer would read three reports of one line, and the last sentence count three bugs."""
    result = of_one_line()
    text = printed(result)
    assert text.count("out[seq 0, head 3, dim 5]") == 2  # once of the other bug
    assert "shown by 3 kernels, which all run engine/ops.py:431; the others:\n      dense  accuracy/out:value" in text
    assert [f"{REPLAY} {one.name}.json" in text for one in (PAGED, DENSE, MERGE)] == [True] * 3
    assert what_was_found(result) == "2 findings"
    rows = {line.split()[0]: line.split()[-1] for line in text.splitlines()[1:5] if line.split()}
    assert (rows["dense"], rows["merge"]) == ("1", "1")  # of each kernel, all that it shows


def test_the_page_tells_it_once() -> None:
    """The index would have three rows, and filtering by the second kernel hide the one that is left."""
    page = html_page(of_one_line())
    assert page.count('<article class="finding"') == 2
    assert "It is shown by 3 kernels, which all run engine/ops.py:431; the others:" in page
    assert f"{REPLAY} dense.json" in page
    assert "[&#34;my kernels.py:paged&#34;, &#34;dense&#34;, &#34;merge&#34;]" in page


def test_a_ci_system_shows_one_failure() -> None:
    """A dashboard would count a bug as often as there are kernels that show it."""
    suites = {suite.get("name"): suite for suite in ElementTree.fromstring(junit_xml(of_one_line()))}
    counts = {name: (suite.get("failures"), suite.get("skipped")) for name, suite in suites.items()}
    assert counts == {PAGED.target: ("2", "0"), "dense": ("0", "1"), "merge": ("0", "1")}
    text = next(suites[PAGED.target].iter("failure")).text or ""
    assert f"dense: {REPLAY} dense.json" in text
    assert next(suites["dense"].iter("skipped")).get("message", "").startswith(f"told with {PAGED.target}, as one of 3")


def test_the_document_has_one_finding_of_each_kernel_and_says_which_belong_together(tmp_path: Path) -> None:
    """Scripts that read the findings of a kernel would miss one, or no script could count bugs."""
    write_summary(of_one_line(), tmp_path / "explore.json")
    kernels = json.loads((tmp_path / "explore.json").read_text())["kernels"]
    entries = {kernel["name"]: [finding["entry"] for finding in kernel["findings"]] for kernel in kernels}
    assert entries == {"paged": [1, 2], "dense": [1], "merge": [1]}


def test_github_is_told_once(tmp_path: Path) -> None:
    """A pull request would have three annotations at one line."""
    write_summary(of_one_line(), tmp_path / "explore.json")
    first, second = github_annotations(tmp_path)
    assert first.startswith("::error file=engine/ops.py,line=431,title=paged%3A accuracy/out%3Avalue")
    assert first.endswith("; dense, merge show it, too")
    assert "show it" not in second
    text = summary_in_markdown(tmp_path, 1, title="search")
    assert "2 new findings" in text
    assert "shown by 3 kernels:" in text
    assert all(f"{REPLAY} {name}.json" in text for name in ("paged", "dense", "merge"))
