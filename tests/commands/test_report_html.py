"""attnfuzz.report.html: the page is whole, offline, and shows what was found and what was tried."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.declaration_inference import Inferred, LeftOut
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import Earlier
from attnfuzz.campaign.statistics import coverage_of
from attnfuzz.explaining.explanation import WeightBox, WeightedRow
from attnfuzz.problems.supports import Supports
from attnfuzz.report.findings import QUESTIONS
from attnfuzz.report.html import Script, html_page, write_html
from attnfuzz.verdict import Blame, Failure
from tests.common.report_results import DENSE, MERGE, PAGED, a_finding, a_result

VOID = {"meta", "br", "hr", "img", "input", "link", "source", "wbr"}


class Page(HTMLParser):
    """Tags with attributes and text; raises where a tag is closed that is not the one that is open."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((tuple(name for name, _ in self.open), data))

    @property
    def text(self) -> str:
        """What a reader sees."""
        return " ".join(data for path, data in self.texts if not {"style", "script"} & set(path))

    def having(self, tag: str, css_class: str) -> list[dict[str, str | None]]:
        return [
            attributes
            for name, attributes in self.tags
            if name == tag and css_class in (attributes.get("class") or "").split()
        ]


def page(*findings: Finding, **fields: Any) -> Page:
    return Page(html_page(a_result(*findings, **fields)))


def test_the_page_is_well_formed_and_needs_nothing_else() -> None:
    """A page that loads something from elsewhere shows nothing on a plane, and tells others that it is read."""
    text = html_page(a_result(a_finding(), a_finding(DENSE), a_finding(MERGE), devices=("0", "1")))
    shown = Page(text)
    for tag, attributes in shown.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form", "button", "input", "select"}
        assert not {"src", "srcset", "data", "action", "onclick", "onload", "background"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"https?:|//\w|@import|url\(", text)
    policies = [attributes for _, attributes in shown.tags if attributes.get("http-equiv") == "Content-Security-Policy"]
    assert [(one["content"] or "").startswith("default-src 'none';") for one in policies] == [True]


def test_every_link_leads_somewhere() -> None:
    """A number in the time line is there to be clicked."""
    first, second = a_finding(), a_finding(DENSE)
    shown = page(first, second, a_finding())  # the last has the hash of the first
    places = Counter(attributes["id"] for _, attributes in shown.tags if "id" in attributes)
    assert set(places.values()) == {1}
    links = {attributes["href"] for tag, attributes in shown.tags if tag == "a"}
    assert links >= {f"#{first.tag}", f"#{second.tag}", f"#{first.tag}-2", "#findings", "#coverage", "#coverage-1"}
    assert {(link or "")[1:] for link in links} <= set(places)


def test_it_follows_the_readers_light_or_dark() -> None:
    """A white page at night is closed again."""
    text = html_page(a_result())
    assert "@media (prefers-color-scheme: dark)" in text
    style = text[text.index("<style>") : text.index("</style>")]
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    dark, rest = dark.split("* {", maxsplit=1)
    variables = set(re.findall(r"(--[\w-]+):", light)) - {"--mono"}
    assert variables == set(re.findall(r"(--[\w-]+):", dark))
    assert not re.search(r"#[0-9a-f]{3,6}\b", rest)  # every colour is one that changes


def test_what_others_wrote_is_text() -> None:
    """A kernel's message could run a script in the browser of whoever opens the report."""
    failure = msgspec.structs.replace(
        a_finding().failure, message="</pre><script>alert(1)</script>", kind='"><img src=x onerror=alert(1)>'
    )
    troubles = ("<script>alert(2)</script>",)
    shown = page(a_finding(failure=failure), unconfirmed=(a_finding(failure=failure),), troubles=troubles)
    assert not any("alert" in data for path, data in shown.texts if path and path[-1] == "script")
    assert shown.text.count("alert(1)") >= 4
    assert "<script>alert(2)</script>" in shown.text


def test_a_finding_is_shown_with_its_picture() -> None:
    """The page that fails is seen faster than any sentence about it is read."""
    shown = page(a_finding())
    for words in ("my kernels.py:paged", "accuracy", "out[seq 0, head 3, dim 5] = 16.0", "is dropped", "412"):
        assert words in shown.text
    assert "attnfuzz replay 'a folder/a.json'" in shown.text
    assert "24 steps" in shown.text
    assert len(shown.having("svg", "case")) == 1
    assert len(shown.having("rect", "fails")) == 2  # the page and the slot
    assert len(shown.having("path", "needle")) == 1
    assert len(shown.having("rect", "token")) == 16 + 39
    assert len(shown.having("circle", "dead")) == 15 + 8
    assert shown.text.count("unused block-table entries") == 3


def test_states_of_a_merge_are_a_table() -> None:
    """They have no pages to draw, and the pair that fails must be marked all the same."""
    failure = msgspec.structs.replace(a_finding().failure, message="output is 1.0", blame=Blame(rows=((1, 0),)))
    shown = page(a_finding(MERGE, failure=failure))
    assert shown.having("svg", "case") == []
    assert shown.text.count("✗ fails") == 1
    assert len(shown.having("tr", "bad")) == 1


def test_doubts_are_told() -> None:
    """Flaky, cut off, not saved, never seen again, an error of the framework: each changes what a reader does next."""
    flaky = a_finding(failed=3, runs=20, path=None, shrunk_s=None)
    shown = page(flaky, a_finding(DENSE), unconfirmed=(a_finding(MERGE),), troubles=("worker 0 ended early",))
    for words in ("flaky: 3 of 20 runs", "shrinking was cut off", "could not be saved", "attnfuzz.regression/1"):
        assert words in shown.text
    for words in ("Not confirmed: merge", "worker 0 ended early"):
        assert words in shown.text
    titles = [data.strip() for path, data in shown.texts if path[-1:] == ("h3",) and data.strip()]
    assert titles[:2] == ["dense", "my kernels.py:paged"]  # what fails every time comes first


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "Nothing found"),
        ({"stop_reason": "interrupted"}, "interrupted before its time was over"),
        ({"stop_reason": "workers_lost"}, "every worker was lost"),
    ],
)
def test_the_end_of_a_campaign_is_told(fields: dict[str, Any], words: str) -> None:
    """ "Nothing found" within the first minute of ten would be taken for ten."""
    assert words in page(**fields).text


def test_coverage_is_that_of_the_cases() -> None:
    """A hole that is none sends a maintainer on a wild goose chase, and a missing one is never looked at."""
    result = a_result()
    text = html_page(result)
    kernel = result.statistics.kernels[PAGED.target]
    coverage = coverage_of(PAGED, kernel.coverage)
    shown = Page(text)
    assert f"{coverage.met:,} pairs" in shown.text
    first_map = text[text.index('class="map"') : text.index("</svg>", text.index('class="map"'))]
    cells = {shade: path.count("M") for path, shade in re.findall(r'<path d="([^"]*)" class="(\w+)">', first_map)}
    pairs = itertools.combinations(coverage.levels, 2)
    never = [pair for pair in pairs if pair[0].field != pair[1].field and not coverage.cases(*pair)]
    assert cells["hole"] == len(never)
    assert cells["s3"] > 100  # every case was this one, 11 times
    assert set(cells) == {"hole", "s3"}


def test_a_kernel_without_a_case_says_so() -> None:
    """It would look as if everything about it were known."""
    text = html_page(a_result())
    summary = text[text.index('<span class="name">merge</span>') :]
    assert "no case" in summary[: summary.index("</details>")]


def test_errors_over_bounds_are_drawn_by_dtype() -> None:
    """How close a kernel comes to its bounds is told even if nothing fails."""
    shown = page()
    assert len(shown.having("svg", "histogram")) == 2
    assert "11 cases" in shown.text
    over = [one["d"] for one in shown.having("path", "over")]
    assert [(path or "").count("M") for path in over] == [1, 0]


def test_devices_are_told_apart() -> None:
    """One GPU of eight that is slower than the others is what the drawing is for."""
    shown = page(devices=("0", "1"))
    assert "GPU 0" in shown.text
    assert "GPU 1" in shown.text
    assert [len(shown.having("path", f"d{i}")) for i in range(3)] == [1, 1, 0]


def rows_of_index(shown: Page) -> list[dict[str, str | None]]:
    return shown.having("tr", "entry")


def test_an_index_tells_kernel_name_cases_severity_and_file() -> None:
    """Of sixty findings, nobody reads all to see what there is."""
    shown = page(a_finding(cases_seen=1234), a_finding(DENSE, failed=1))
    entries = [(json.loads(one["data-kernels"] or ""), one["data-severity"]) for one in rows_of_index(shown)]
    assert entries == [([PAGED.target], "wrong or no result"), (["dense"], "flaky")]
    assert json.loads(shown.having("article", "finding")[0]["data-kernels"] or "") == [PAGED.target]
    cells = [data.strip() for path, data in shown.texts if "td" in path and "tbody" in path and data.strip()]
    first = cells[: cells.index("2")]
    assert first[:2] == ["1", PAGED.target]
    assert first[2].startswith("accuracy/out:value [")
    assert first[3:] == ["1,234", "wrong or no result", "a folder/a.json"]


def test_what_a_declaration_ends_stands_apart_and_is_not_counted() -> None:
    """The title would count what the exit status does not."""
    outside = a_finding(remedy=Supports(strides="contiguous"))
    shown = page(outside, a_finding(DENSE))
    titles = [data.strip() for path, data in shown.texts if path[-1:] == ("h1",)]
    assert titles == ["1 finding; 1 question"]
    heads = [data.strip() for path, data in shown.texts if path[-1:] in (("h2",), ("h3",)) and data.strip()]
    assert heads.index("dense") < heads.index(QUESTIONS) < heads.index(PAGED.target) < heads.index("Cases a second")
    assert shown.having("h1", "bad")
    alone = page(outside)
    assert not alone.having("h1", "bad")
    assert not alone.having("li", "bad")
    assert shown.having("li", "bad")
    assert "Nothing found within what they were found to take; 1 question" in alone.text
    assert {"#question"} <= {one["href"] for tag, one in alone.tags if tag == "a"}


def test_known_and_new_findings_are_told_apart() -> None:
    """Only the new ones made the command fail."""
    result = a_result(a_finding(), a_finding(DENSE))
    assert "known or new" not in Page(html_page(result)).text
    known = ("target", DENSE.target, "cause", result.findings[1].cause)
    result.statistics.against = Earlier("last.json", frozenset({known}))
    shown = Page(html_page(result))
    assert "1 new finding, 1 known from last.json" in shown.text
    cells = [data.strip() for path, data in shown.texts if path[-1:] == ("td",) and data.strip()]
    assert [cell for cell in cells if cell in ("new", "known from last.json")] == ["new", "known from last.json"]


def test_what_was_not_searched_is_told() -> None:
    """A kernel would seem to be right on what it was never tried on."""
    left_out = LeftOut("strides", "contiguous", ("q",), "raises", "it raised")
    inferred = Inferred(DENSE.target, Supports(strides="contiguous"), (left_out,), probes=9, works=True)
    result = a_result(inferred=(inferred,))
    result.statistics.kernels[PAGED.target].not_runnable |= {"no <inline> assembly": 3, "no barriers": 1}
    shown = Page(html_page(result))
    assert str(inferred) in shown.text
    assert "Not runnable here: " + PAGED.target in shown.text
    assert "3 cases: no <inline> assembly" in shown.text


def test_a_page_is_not_green_where_the_command_is_not() -> None:
    """ "Nothing found" in green would be believed of a kernel that was judged on two cases."""
    result = a_result()
    for kernel in result.statistics.kernels.values():
        kernel.cases = 100
    assert "good" in html_page(result).partition("Nothing found</h1>")[0].rpartition("<h1")[2]
    result.statistics.kernels[DENSE.target].cases = 2
    shown = html_page(result)
    assert "only 2 cases were judged of dense" in Page(shown).text
    assert "good" not in shown.partition("Nothing found; not all was judged</h1>")[0].rpartition("<h1")[2]


def test_scripts_are_inline_or_told_why_not() -> None:
    """Whoever has only the page could not run anything; and a script is somebody's source, no part of the page."""
    made = Script(text="print('</pre><script>alert(3)</script>')\n")
    shown = Page(html_page(a_result(a_finding(), a_finding(DENSE)), [made, Script(why_not="the case has 9 GiB")]))
    assert made.text in shown.text
    assert not any("alert" in data for path, data in shown.texts if path and path[-1] == "script")
    assert shown.text.count("No script that shows it without attnfuzz: the case has 9 GiB") == 1
    assert [one for one in shown.having("pre", "copied")]


def test_the_weights_can_be_drawn_where_there_are_any() -> None:
    """Where they were not measured the page has the case only, and should say how to see what the kernel did."""
    assert "attnfuzz explain 'a folder/a.json' -o weights.svg" in page(a_finding()).text
    assert "attnfuzz explain" not in page(a_finding(MERGE), a_finding(path=None)).text
    beside = Failure(oracle="guard_page", kind="read past q", message="the kernel read past q")
    assert "attnfuzz explain" not in page(a_finding(failure=beside)).text


def test_the_weights_that_were_measured_are_drawn() -> None:
    """A reader would have to run the kernel again to see which token it left out."""
    box = WeightBox(title="page 0 </svg><script>", unit="offset", numbers=(0, 1), got=(1.0, 0.0), expected=(0.5, 0.5))
    wrong = msgspec.structs.replace(box, wrong=(True, True))
    right = msgspec.structs.replace(box, got=(0.5, 0.5), wrong=(False, False))
    rows = (
        WeightedRow(title="sequence 0, query head 3", wrong=True, boxes=(wrong,)),
        WeightedRow(title="sequence 0, query head 4", wrong=False, boxes=(right,)),
    )
    shown = page(a_finding(weights=rows))
    (picture,) = shown.having("svg", "weights")
    assert picture["aria-label"] == "Expected and actual weights"
    assert len(shown.having("rect", "wrong")) > len(shown.having("rect", "base")) == 0
    for words in ("sequence 0, query head 3", "sequence 0, query head 4: every weight is right", "</svg><script>"):
        assert words in shown.text
    assert "attnfuzz explain" not in shown.text
    assert not page(a_finding()).having("svg", "weights")


def test_without_scripts_the_page_is_whole() -> None:
    """Filter and copy buttons are made by the page's script alone: without it they would do nothing."""
    text = html_page(a_result(a_finding()))
    shown = Page(text)
    assert not shown.having("p", "filter")
    assert not any("hidden" in attributes for _, attributes in shown.tags)
    script = text[text.rindex("<script>") :]
    for made in ('createElement("button")', 'createElement("input")', 'createElement("select")'):
        assert made in script


def test_it_is_written_whole(tmp_path: Path) -> None:
    """Whoever reloads the page while it is written must see the old one or the new one, and no file stays behind."""
    write_html(a_result(a_finding()), tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
