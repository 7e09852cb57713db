"""Findings in a report: their order, names and what is declared of their kernels."""

from __future__ import annotations

import html
import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from attnfuzz.campaign.finding import Finding
from attnfuzz.declaration import Declaration
from attnfuzz.mistake import NARROW_OFFSETS
from attnfuzz.oracles.registry import Severity
from attnfuzz.problems.cases import Problem, case_from_builtins
from attnfuzz.problems.supports import Supports
from attnfuzz.report.ci import github_annotations
from attnfuzz.report.declarations import print_declared, print_kernels
from attnfuzz.report.files import write_json
from attnfuzz.report.findings import (
    finding_lines,
    heading_of,
    in_order,
    kernels_in_order,
    one_line,
    severity_of,
    title_of,
    told_findings,
)
from attnfuzz.report.html import html_page
from attnfuzz.report.junit import junit_xml
from attnfuzz.report.progress import describe, panel
from attnfuzz.report.summary import summarise
from attnfuzz.report.terminal import make_console, print_result
from attnfuzz.verdict import Cause, Failure
from tests.campaign.test_contract_gaps import finding, paged
from tests.common.report_results import CASES, DENSE, MERGE, PAGED, a_finding, a_result

HEADS: dict[str, Any] = {"num_q_heads": 2, "head_size": 16}
DENSE_FIELDS: dict[str, Any] = {**HEADS, "num_kv_heads": 1, "scale": 0.25, "seq_lens": [3, 0]}
PAGED_FIELDS: dict[str, Any] = {**DENSE_FIELDS, "block_size": 4}


@pytest.mark.parametrize(
    ("problem", "fields", "end"),
    [
        ("dense_decode", DENSE_FIELDS, "2 query heads on 1 KV head, seq_lens 3, 0"),
        ("dense_decode", {**DENSE_FIELDS, "seq_lens": [1] * 9}, "seq_lens 1, 1, 1, 1, 1, 1, 1, 1, ..."),
        (
            "paged_decode",
            {**PAGED_FIELDS, "variant": {"window": 3, "sinks": "high"}, "options": {"num_splits": 2}},
            "pages of 4 tokens, seq_lens 3, 0, num_splits=2, window 3, sinks high",
        ),
        ("split_decode", {**PAGED_FIELDS, "num_splits": 3}, "seq_lens 3, 0, num_splits=3"),
        ("paged_attention", {**PAGED_FIELDS, "query_lens": [2, 0]}, "seq_lens 3, 0, query_lens 2, 0"),
        ("merge_states", {**HEADS, "num_tokens": 1, "options": {"warps": 4}}, "1 token, 2 query heads, warps=4"),
    ],
)
def test_a_case_in_one_line(problem: Problem, fields: dict[str, Any], end: str) -> None:
    """The reader of a report would have to open the file to see which lengths, options or variants fail."""
    line = one_line(case_from_builtins(problem, fields))
    assert line.startswith(f"{problem}, float16, head_size 16, ")
    assert line.endswith(end)


def with_failure(**fields: Any) -> Finding:
    one = finding(paged())
    one.failure = msgspec.structs.replace(one.failure, **fields)
    return one


def of_kernel(target: str) -> Finding:
    one = finding(paged())
    one.declaration = msgspec.structs.replace(one.declaration, target=target)
    return one


def ended(one: Finding) -> Finding:
    """By a declaration."""
    one.remedy = Supports(strides="contiguous")
    return one


BUG = finding(paged(num_q_heads=2), "gqa_ratio>1")
UNDECLARED = ended(finding(paged(strides={"q": "every_other"}), "strides:q=every_other"))
FLAKY = finding(paged(), failed=1)
CRASH = with_failure(oracle="crash", kind="SIGSEGV")
DEAD = with_failure(oracle="dead_memory", kind="out")
NEAR = with_failure(oracle="accuracy", kind="out:value", error_ratio=1.3)
OUTSIDE = with_failure(oracle="guard_page", kind="read past block_table")
FAR = with_failure(oracle="page_relocation", kind="bits", causes=(Cause(mistake=NARROW_OFFSETS),))
EMPTY = finding(paged(seq_lens=(0,)), "empty sequence")


def severity(one: Finding) -> Severity:
    features, remedy = one.signature.features, one.remedy
    return severity_of(one.failure, features, is_flaky=one.is_flaky, is_declarable=remedy is not None)


def told(*findings: Finding, pedantic: bool = False) -> list[Finding]:
    result = a_result(*findings)
    result.statistics.pedantic = pedantic
    return in_order(result)


def test_the_worst_comes_first() -> None:
    """A wrong head map would be told after ten ways in which a kernel for contiguous tensors fails on others."""
    ordered = [BUG, OUTSIDE, DEAD, FAR, EMPTY, NEAR, FLAKY, UNDECLARED]
    assert told(FLAKY, NEAR, EMPTY, FAR, UNDECLARED, DEAD, OUTSIDE, BUG) == ordered
    assert severity(CRASH) == severity(OUTSIDE)
    severities = [severity(one) for one in ordered[:-1]]
    assert severities == sorted(severities)
    assert severity(OUTSIDE) == severity(CRASH)


def test_what_kernels_differ_in_is_a_question_and_a_fault_of_it_is_none() -> None:
    """What an empty state holds would be told before wrong numbers of every case, or after a rounding."""
    assert severity(UNDECLARED) == severity(EMPTY)
    states = finding(CASES[MERGE.target], "lse +inf/-inf", "both states empty")
    assert severity(states) == severity(EMPTY)
    more = finding(paged(seq_lens=(0,), num_q_heads=2), "empty sequence", "gqa_ratio>1")
    assert severity(more) == severity(BUG)
    dies = ended(with_failure(oracle="crash", kind="SIGSEGV"))
    assert severity(dies) == severity(CRASH)


def test_all_is_a_bug_where_all_is_the_contract() -> None:
    """With --pedantic, strides were asked for."""
    assert told(NEAR, UNDECLARED, CRASH, pedantic=True) == [CRASH, UNDECLARED, NEAR]


def test_a_large_address_that_faults_is_no_worse() -> None:
    """What lies at an address that has wrapped is chance: it would be told before wrong results in every batch."""
    fault = with_failure(oracle="page_relocation", kind="raised cuda: illegal memory access")
    fault.failure = msgspec.structs.replace(fault.failure, causes=(Cause(mistake=NARROW_OFFSETS),))
    assert severity(fault) == severity(FAR) > severity(DEAD)


def test_the_worst_of_all_kernels_comes_first() -> None:
    """A wrong result in every batch would be told after the last rounding of the kernel before it."""
    other, its_undeclared = of_kernel("other"), ended(of_kernel("other"))
    assert told(FLAKY, NEAR, other, CRASH) == [other, CRASH, NEAR, FLAKY]
    assert told(its_undeclared, UNDECLARED, other, CRASH) == [other, CRASH, its_undeclared, UNDECLARED]


def test_what_was_cut_off_has_no_list_of_features_for_a_headline() -> None:
    """Twenty features of a large case would be taken for what the bug needs."""
    cut, shrunk = finding(paged(), "layout=HND", "window"), finding(paged(), "layout=HND", "window")
    cut.shrunk_s = None
    title, told_title = (told_findings(a_result(one))[0].title for one in (cut, shrunk))
    assert (title, told_title) == ("accuracy/out:value", "accuracy/out:value [layout=HND, window]")


def test_what_nothing_more_is_known_of_does_not_show_in_any_case() -> None:
    """ "Any case" would stand above a line that says with which change the case passes."""
    (told_one,) = told_findings(a_result(finding(paged())))
    assert told_one.title == "accuracy/out:value"


def test_kernels_are_told_as_their_findings_are() -> None:
    """Files for programs and CI systems would have another order than the terminal."""
    mine = of_kernel("merge")
    assert kernels_in_order(a_result(mine)) == ["merge", "my kernels.py:paged", "dense"]
    assert kernels_in_order(a_result()) == ["my kernels.py:paged", "dense", "merge"]


def test_findings_of_one_kind_stay_in_the_order_in_which_they_were_seen() -> None:
    """Their numbers would not follow the time line of the report."""
    other = finding(paged(num_q_heads=3), "gqa_ratio>1", "num_kv_heads>1")
    assert told(other, UNDECLARED, BUG) == [other, BUG, UNDECLARED]


def test_each_kind_says_what_it_is() -> None:
    """A reader would take what a declaration ends for one more bug, or a flaky failure for a certain one."""
    headings = [heading_of(one, a_result().statistics) for one in (BUG, UNDECLARED, FLAKY)]
    assert headings[0] == ""
    assert headings[1].startswith("Questions: ")
    assert headings[2].startswith("Flaky: ")


def test_roundings_are_told_where_time_was_over_before_one_was_named() -> None:
    """A kernel would be wrong by a little, and nobody told that it may be what it rounds."""
    rounded, another = Cause(mistake="scores_rounded"), Cause(mistake="window")
    found = with_failure(causes=(rounded, another), maybe=("weights_rounded",))
    found.failure = found.failure.undecided
    (line,) = finding_lines(found.regression("cpu").finding, found.case)
    assert "errors of such a size may come of weights rounded, scores rounded, and other mistakes" in line
    named = with_failure(causes=(rounded,), maybe=("weights_rounded",))
    assert finding_lines(named.regression("cpu").finding, named.case) == ()


FAR_AWAY = Failure(
    oracle="page_relocation",
    kind="strides of q",
    message="q is read at the wrong place",
    causes=(Cause(mistake=NARROW_OFFSETS),),
)
OF_ONES_OWN = Failure(oracle="rows_in_range", kind="", message="a row is larger than its values")


@pytest.mark.parametrize(
    ("failure", "name"),
    [(FAR_AWAY, "page_relocation/narrow_offsets"), (OF_ONES_OWN, "rows_in_range")],
    ids=["cause", "own"],
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


def test_only_what_no_declaration_ends_is_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel for contiguous tensors would be told to have a bug that its declaration ends."""
    result = a_result(a_finding(remedy=Supports(strides="contiguous")), a_finding(DENSE))
    print_declared(make_console(), result)
    paged, dense, _ = capsys.readouterr().out.split("\n\n")
    assert paged.startswith(f"{PAGED.target}:")
    assert "no bug was found in" in paged
    assert "1 question, which a further declaration answers:" in paged
    assert 'declare Supports(strides="contiguous")' in paged
    assert "within it, 1 bug, which no declaration ends:" in dense
    assert "out of contract" not in dense
    assert result.fails
    assert not a_result(a_finding(remedy=Supports(strides="contiguous"))).fails


LONG = Declaration(
    name="k",
    problem="paged_attention",
    target="a_folder/with_a_name/" + "and_another" * 6 + ".py:kernel",
    options={"num_splits": tuple(range(60))},
)
SHORT = Declaration(name="short", problem="dense_decode", target="short")


@pytest.mark.parametrize("width", [20, 80, 140])
def test_no_name_is_cut(width: int) -> None:
    """A name in a list would have to be guessed before it can be searched."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_kernels(console, [SHORT, LONG], [], verbose=False)
    assert isinstance(console.file, io.StringIO)
    _, short, long = console.file.getvalue().splitlines()
    assert short.split() == ["short", "dense_decode"]
    assert long.split() == [LONG.target, "paged_attention", "num_splits=" + "|".join(map(str, range(60)))]
    assert short.index("dense_decode") == long.index("paged_attention")
