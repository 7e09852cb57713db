"""What earlier campaigns leave: known bugs in their summaries, and what the next part is asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.request import CampaignRequest, asked_of, resumed
from attnfuzz.campaign.result import Earlier, EarlierError, load_earlier
from attnfuzz.campaign.saved.merging import tell_apart
from attnfuzz.campaign.saved.replay import SavedCase
from attnfuzz.campaign.saved.state import CampaignState, StateError
from attnfuzz.isolation.pythons import Python
from attnfuzz.report.findings import told_findings
from attnfuzz.report.summary import write_summary
from tests.common.report_results import DENSE, PAGED, a_finding, a_result


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


FIRST = CampaignRequest(
    kernels=("a", "b"), started=0.0, budget_s=60.0, save_folder=Path("mine"), workers=3, device="cpu", seed=7,
    oracles=("accuracy",), fail_fast=True,
)  # fmt: skip
DEFAULTS = CampaignRequest(kernels=("*",), started=100.0, budget_s=60.0, save_folder=Path("regressions"))
STATE = CampaignState(
    asked=asked_of(FIRST), seed=7, elapsed_s=45.0, parts=1, kernels=(), interval_s=1.0, throughput={}
)  # fmt: skip


def test_without_anything_given_all_is_as_it_was() -> None:
    """Whoever types --resume wants the same search, not another with the same findings."""
    request = resumed(DEFAULTS, STATE, given=())
    assert (request.kernels, request.save_folder, request.workers) == (("a", "b"), Path("mine"), 3)
    assert (request.device, request.oracles, request.fail_fast) == ("cpu", ("accuracy",), True)
    assert (request.started, request.budget_s, request.seed) == (100.0, 15.0, 7)
    assert request.resume is STATE


def test_what_is_given_counts() -> None:
    """More time, or fewer workers, would be ignored without a word."""
    request = resumed(DEFAULTS, STATE, given={"budget_s", "workers", "save_folder"})
    assert (request.budget_s, request.workers, request.save_folder) == (60.0, None, Path("regressions"))
    assert request.kernels == ("a", "b")


def test_a_budget_that_is_spent_needs_more() -> None:
    """The campaign would end before it begins."""
    spent = msgspec.structs.replace(STATE, elapsed_s=61.0)
    with pytest.raises(StateError, match=r"budget of 1m00s is spent.*--budget"):
        resumed(DEFAULTS, spent, given=())
    assert resumed(DEFAULTS, spent, given={"budget_s"}).budget_s == 60.0


def test_another_seed_is_refused() -> None:
    """It would have no effect on what has been searched already."""
    with pytest.raises(StateError, match="--seed"):
        resumed(DEFAULTS, STATE, given={"seed"})


def test_kernels_that_only_the_state_names_are_not_the_users_word() -> None:
    """A folder from somebody else would have its code run as if its user had typed the name."""
    assert not resumed(DEFAULTS, STATE, given=()).trust
    assert resumed(DEFAULTS, STATE, given=(), trust=True).trust
    assert resumed(DEFAULTS, STATE, given={"kernels"}).trust
    from_settings = replace(DEFAULTS, kernels=("b", "a"))
    assert resumed(from_settings, STATE, given=()).trust


@pytest.mark.parametrize(("folder", "why"), [
    ("../elsewhere", "lies outside of the project"),
    ("/elsewhere", "lies outside of the project"),
    ("sub/../../elsewhere", "lies outside of the project"),
    ("link", "is a symbolic link"),
    ("link/found", "has a symbolic link on the way"),
])  # fmt: skip
def test_a_state_does_not_say_where_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, why: str
) -> None:
    """A folder from somebody else would have findings written, and files removed, anywhere its state says."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "pyproject.toml").touch()
    (tmp_path / "project" / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "project")
    state = msgspec.structs.replace(STATE, asked=asked_of(replace(FIRST, save_folder=Path(folder))))
    with pytest.raises(StateError, match=rf"{folder}', which {why}.*--resume --save-dir {folder}$"):
        resumed(DEFAULTS, state, given=())
    assert resumed(DEFAULTS, state, given={"save_folder"}).save_folder == DEFAULTS.save_folder
    assert resumed(DEFAULTS, state, given=(), trust=True).save_folder == Path(folder)
    in_settings = replace(DEFAULTS, save_folder=Path(folder))
    assert resumed(in_settings, state, given=()).save_folder == Path(folder)


def test_another_environment_is_refused_and_none_is_taken_from_the_state() -> None:
    """Half of a campaign would be of another Triton, or a stranger's folder say which program is run."""
    python = Python(Path("/old/bin/python"), {"triton": "3.6.0"})
    state = msgspec.structs.replace(STATE, asked=asked_of(replace(FIRST, python=python)))
    assert resumed(replace(DEFAULTS, python=python), state, given=()).python == python
    with pytest.raises(StateError, match=r"ran with --python /old/bin/python"):
        resumed(DEFAULTS, state, given=())
    with pytest.raises(StateError, match="ran without --python"):
        resumed(replace(DEFAULTS, python=python), STATE, given=())
