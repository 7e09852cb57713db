"""campaign.result: what an earlier summary told is known, whichever version wrote it, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import Earlier, EarlierError, load_earlier
from attnfuzz.campaign.saved.merging import tell_apart
from attnfuzz.campaign.saved.replay import SavedCase
from attnfuzz.report.findings import told_findings
from attnfuzz.report.summary import write_summary
from tests.unit.report_results import DENSE, PAGED, a_finding, a_result


def told(folder: Path, *findings: Finding, **fields: Any) -> Earlier:
    """What a campaign with these findings tells a later one."""
    write_summary(a_result(*findings, **fields), folder / "last.json")
    return load_earlier(folder / "last.json")


def other_kind(finding: Finding) -> Finding:
    finding.failure = msgspec.structs.replace(finding.failure, kind="lse:value", causes=())
    return finding


def test_a_bug_is_known_by_kernel_and_cause(tmp_path: Path) -> None:
    """A case or seed that differs would make an old bug new; another kernel's bug is its own."""
    earlier = told(tmp_path, a_finding(), a_finding(DENSE))
    again = a_finding()
    again.failure = msgspec.structs.replace(again.failure, message="another element", kind="out:nan")
    assert again.cause == a_finding().cause
    assert earlier.name == "last.json"
    assert earlier.knows(again)
    assert not earlier.knows(other_kind(a_finding()))
    elsewhere = a_finding()
    elsewhere.declaration = msgspec.structs.replace(PAGED, target="another.py:paged")
    assert not earlier.knows(elsewhere)


def test_an_older_summary_is_read_by_its_signatures(tmp_path: Path) -> None:
    """After an update every bug of last night would be new, and the night's build red."""
    told(tmp_path, a_finding())
    document = json.loads((tmp_path / "last.json").read_text())
    for kernel in document["kernels"]:
        del kernel["target"]
        for finding in kernel["findings"]:
            for field in ("cause", "in_contract", "hash"):
                del finding[field]
    (tmp_path / "old.json").write_text(json.dumps(document))
    earlier = load_earlier(tmp_path / "old.json")
    assert earlier.knows(a_finding())
    assert not earlier.knows(other_kind(a_finding()))
    assert not earlier.knows(a_finding(DENSE))


def test_a_newer_summary_is_read(tmp_path: Path) -> None:
    """Fields are added; whoever keeps one summary for two versions of attnfuzz could use neither."""
    told(tmp_path, a_finding())
    document = json.loads((tmp_path / "last.json").read_text())
    document["new"] = document["kernels"][0]["new"] = document["kernels"][0]["findings"][0]["new"] = [1]
    (tmp_path / "newer.json").write_text(json.dumps(document))
    assert load_earlier(tmp_path / "newer.json").knows(a_finding())


def test_a_saved_case_makes_its_bug_known_with_its_issue() -> None:
    """A search would report the bug of an open case, which fails its test as expected, as a new one every time."""
    (bug,) = tell_apart([SavedCase(Path("a.json"), a_finding().regression("a GPU"))])
    earlier = Earlier("regressions", saved=((bug, "https://example.org/issues/12"),))
    assert earlier.knows(a_finding())
    assert earlier.issue_of(a_finding()) == "https://example.org/issues/12"
    another = a_finding()
    another.failure = msgspec.structs.replace(another.failure, oracle="exception", kind="ValueError")
    assert not earlier.knows(another)
    assert not earlier.knows(a_finding(DENSE))
    result = a_result(a_finding())
    result.statistics.against = earlier
    (told_one,) = told_findings(result)
    assert (told_one.disposition, told_one.status) == (
        "known",
        "known from regressions, https://example.org/issues/12",
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no summary of attnfuzz"),
        (b"\xff\xfe", "is no summary of attnfuzz"),
        (b"[" * 100_000, "is no summary of attnfuzz"),
        (b'{"format": "attnfuzz.summary/1"}', "is no summary of attnfuzz"),
        (b'{"format": "attnfuzz.summary/2", "kernels": []}', "its format is 'attnfuzz.summary/2'"),
        (b'{"format": "attnfuzz.regression/1", "kernels": []}', "its format is 'attnfuzz.regression/1'"),
    ],
)
def test_what_is_no_summary_is_refused(data: bytes, words: str, tmp_path: Path) -> None:
    """Taken for an empty one, all would be new; for a full one, nothing."""
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(EarlierError, match=words) as caught:
        load_earlier(tmp_path / "a.json")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("; name what attnfuzz explore --json has written")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """A typo would make every finding new."""
    with pytest.raises(EarlierError, match="cannot be read"):
        load_earlier(tmp_path / "none.json")
