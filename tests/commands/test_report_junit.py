"""attnfuzz.report.junit: CI systems read the report, and take from it what failed and how to see it again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import CampaignResult, Earlier
from attnfuzz.campaign.statistics import WorkerProgress
from attnfuzz.corpus import decode_regression
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.supports import Supports
from attnfuzz.report.junit import junit_xml, write_junit
from attnfuzz.verdict import Failure
from tests.common.report_results import statistics_of

KERNEL = Declaration(name="k", problem="dense_decode", target="my kernels.py:k")
OTHER = Declaration(name="other", problem="dense_decode", target="other")
CASE = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(1,), scale=0.25)

# Attributes and children of every element; what must be there ends in "!". Both schemas in use allow exactly this or
# more: junit-10.xsd of Jenkins' xunit plugin (github.com/jenkinsci/xunit-plugin), and JUnit.xsd of Ant's report
# (github.com/windyroad/JUnit-Schema), which also wants this order, and at most one of skipped, error and failure.
SUITE = {"id!", "package!", "name!", "tests!", "failures!", "errors!", "skipped", "time!", "timestamp!", "hostname!"}
SCHEMA: dict[str, tuple[set[str], list[str]]] = {
    "testsuites": (set(), ["testsuite"]),
    "testsuite": (SUITE, ["properties!", "testcase", "system-out!", "system-err!"]),
    "properties": (set(), ["property"]),
    "property": ({"name!", "value!"}, []),
    "testcase": ({"name!", "classname!", "time!"}, ["skipped", "error", "failure"]),
    "skipped": ({"message", "type"}, []),
    "error": ({"message", "type!"}, []),
    "failure": ({"message", "type!"}, []),
    "system-out": (set(), []),
    "system-err": (set(), []),
}
WITH_TEXT = {"error", "failure", "skipped", "system-out", "system-err"}


def check_names(found: set[str], wanted: set[str]) -> None:
    assert found <= {name.removesuffix("!") for name in wanted}
    assert found >= {name.removesuffix("!") for name in wanted if name.endswith("!")}


def check_schema(element: ElementTree.Element) -> None:
    """Assert that ``element`` and all in it are as the schemas say."""
    attributes, children = SCHEMA[element.tag]
    check_names(set(element.attrib), attributes)
    check_names({child.tag for child in element}, set(children))
    order = [name.removesuffix("!") for name in children]
    places = [order.index(child.tag) for child in element]
    assert places == sorted(places)
    assert element.tag != "testcase" or len(element) <= 1
    assert element.tag in WITH_TEXT or not (element.text or "").strip()
    for name in ("id", "tests", "failures", "errors", "skipped"):
        assert element.get(name, "0").isdecimal()
    for name in ("name", "hostname", "package"):
        assert element.get(name, "x") != ""
    assert re.fullmatch(r"\d+\.\d{3}", element.get("time", "0.000"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", element.get("timestamp", "2026-01-01T00:00:00"))
    for child in element:
        check_schema(child)


def a_finding(oracle: OracleName, message: str = "wrong", **fields: Any) -> Finding:
    failure = Failure(oracle=oracle, kind="kind", message=message, details=("token 16 of sequence 0 is dropped",))
    finding = Finding("0-1", KERNEL, CASE, failure, first_seen_s=1.0, path=Path("a folder/a.json"), **fields)
    finding.failed = finding.runs = 3
    return finding


def a_result(*findings: Finding, **fields: Any) -> CampaignResult:
    statistics = statistics_of([KERNEL, OTHER], *findings)
    statistics.add(WorkerProgress(kernel=KERNEL.target, cases=10, seconds=2.0, max_error_ratio=0.5))
    base: dict[str, Any] = {"stop_reason": "budget", "elapsed_s": 60.0, "statistics": statistics, "findings": findings}
    return CampaignResult(**(base | fields))


def parsed(result: CampaignResult) -> ElementTree.Element:
    root = ElementTree.fromstring(junit_xml(result))
    check_schema(root)
    return root


@pytest.mark.parametrize(
    ("oracle", "tag"),
    [
        ("accuracy", "failure"),
        ("dead_memory", "failure"),
        ("determinism", "failure"),
        ("crash", "error"),
        ("hang", "error"),
        ("exception", "error"),
    ],
)
def test_crashes_are_errors_and_mismatches_failures(oracle: OracleName, tag: str) -> None:
    """CI systems tell a test that failed from one that did not get to its end."""
    root = parsed(a_result(a_finding(oracle)))
    (report,) = root[0].iter(tag)
    assert report.get("type") == f"{oracle}/kind"
    assert report.get("message") == "wrong"
    other = "error" if tag == "failure" else "failure"
    assert (root[0].get(f"{tag}s"), root[0].get(f"{other}s")) == ("1", "0")


def test_a_failure_comes_with_what_it_takes_to_see_it_again() -> None:
    """Nobody opens the machine it ran on: the command, the details and the case itself must be in the report."""
    flaky = a_finding("accuracy")
    flaky.failed = 1
    (case,) = [case for case in parsed(a_result(flaky)).iter("testcase") if case.find("failure") is not None]
    text = case.findtext("failure") or ""
    assert "attnfuzz replay 'a folder/a.json'" in text
    assert "token 16 of sequence 0 is dropped" in text
    assert "flaky: failed 1 of 3 runs" in text
    assert case.get("name") == "accuracy/kind"
    saved = decode_regression(text[text.index("{\n") :].encode(), source="junit.xml")
    assert saved.case == CASE


def test_every_kernel_has_a_suite_and_a_test_case() -> None:
    """A kernel without findings must show as passed, and one without cases must not."""
    root = parsed(a_result(a_finding("accuracy"), a_finding("crash")))
    suites = {suite.get("name"): suite for suite in root}
    assert list(suites) == ["my kernels.py:k", "other"]
    mine, other = suites.values()
    assert [case.get("name") for case in mine.iter("testcase")] == [
        "search",
        "accuracy/kind",
        "crash/kind",
    ]
    assert (mine.get("tests"), mine.get("failures"), mine.get("errors"), mine.get("skipped")) == ("3", "1", "1", "0")
    assert (other.get("tests"), other.get("errors")) == ("1", "1")
    properties = {one.get("name"): one.get("value") for one in mine.iter("property")}
    assert (properties["cases"], properties["device"], properties["max_error_ratio"]) == ("10", "a processor", "0.5")


def test_a_kernel_that_too_little_is_known_of_is_an_error() -> None:
    """A dashboard would be green where the command ends with 2: judged on two cases, failed once, left out by all."""
    doubtful = a_result(unconfirmed=(a_finding("hang"),))
    doubtful.statistics.kernels[OTHER.target].cases = 2
    mine, other = parsed(doubtful)
    (doubt,), (few,) = mine.iter("error"), other.iter("error")
    assert (doubt.get("message") or "").startswith("not confirmed: my kernels.py:k hang/kind")
    assert (few.get("message") or "").startswith("only 2 cases were judged of other")
    idle = a_result()
    idle.statistics.oracles = ("page_relocation",)
    (error,) = parsed(idle)[-1].iter("error")
    assert "page_relocation applies to none of 10 cases" in (error.get("message") or "")


def test_a_campaign_that_went_wrong_is_an_error() -> None:
    """With every worker lost no kernel fails, and the build would be green."""
    root = parsed(a_result(stop_reason="workers_lost", troubles=("Traceback:\nRuntimeError: no",)))
    suite = root[-1]
    assert (suite.get("name"), suite.get("id"), suite.get("errors")) == ("attnfuzz", "2", "1")
    (error,) = suite.iter("error")
    assert (error.get("type"), error.get("message")) == ("workers_lost", "RuntimeError: no")


def test_an_interrupted_campaign_says_so() -> None:
    """Half an hour of ten must not look like ten."""
    root = parsed(a_result(stop_reason="interrupted"))
    assert {one.get("value") for one in root.iter("property") if one.get("name") == "stop_reason"} == {"interrupted"}


def test_what_xml_cannot_hold_is_left_out() -> None:
    """A message with a colour code or a character that is none would make the whole report unreadable."""
    finding = a_finding("exception", "\x1b[31mred\x00 <b> & ]]> \ufffe")
    finding.failure = msgspec.structs.replace(finding.failure, kind="<&>")
    (error,) = parsed(a_result(finding))[0].iter("error")
    assert error.get("message") == r"\x1b[31mred\x00 <b> & ]]> ?"
    assert error.get("type") == "exception/<&>"


def test_what_could_not_be_saved_is_in_the_report() -> None:
    """There is no file that a command could replay."""
    finding = a_finding("accuracy")
    finding.path = None
    text = next(parsed(a_result(finding)).iter("failure")).text or ""
    assert "attnfuzz replay" not in text
    assert "not saved" in text


def test_what_a_declaration_ends_is_no_failure() -> None:
    """The build would be red where the command says that nothing was found."""
    result = a_result(a_finding("accuracy", remedy=Supports(strides="contiguous")))
    root = parsed(result)
    assert not [*root[0].iter("failure"), *root[0].iter("error")]
    skipped = next(one for one in root.iter("skipped") if "wrong" in one.attrib["message"])
    assert skipped.attrib["message"].startswith("a question, if the kernel is only meant for contiguous")
    text = skipped.text or ""
    assert decode_regression(text[text.index("{\n") :].encode(), "report").case == CASE
    result.statistics.pedantic = True
    assert len([*parsed(result).iter("failure")]) == 1


def test_what_is_known_is_no_failure() -> None:
    """Whoever asks for new findings only has no use for a build that is red since last week."""
    result = a_result(a_finding("accuracy"), a_finding("crash"))
    told = ("target", KERNEL.target, "cause", "crash/kind")
    result.statistics.against = Earlier("last.json", frozenset({told}))
    suite = parsed(result)[0]
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("1", "0", "1")
    assert next(suite.iter("skipped")).attrib["message"] == "known from last.json: wrong"


def test_it_is_written_whole(tmp_path: Path) -> None:
    """CI systems that watch the folder must not read half a file, and no other file may stay behind."""
    write_junit(a_result(), tmp_path / "junit.xml")
    assert [path.name for path in tmp_path.iterdir()] == ["junit.xml"]
    assert (tmp_path / "junit.xml").read_bytes().startswith(b"<?xml version=")
