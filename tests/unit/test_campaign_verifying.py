"""attnfuzz.campaign.saved.merging: a case is kept for what it does here, on the kernel that it names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from attnfuzz.campaign.saved import merging
from attnfuzz.campaign.saved.merging import SavedBug, check_again
from attnfuzz.campaign.saved.replay import Replayed, SavedCase, replay
from attnfuzz.corpus import Regression
from attnfuzz.judging.runner import Runner
from tests.unit.saved_findings import a_finding, save

KERNEL = """
import attnfuzz
from attnfuzz.kernels import eager


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(dtypes=("float32",), head_sizes=(16,)))
def mine(inputs):
    out, lse = eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)
    out[inputs.seq_lens > 4] += 1  # the bug
    return out, lse
"""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """In a folder with the kernel: executors stay in the one that they were started in."""
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "mine.py").write_text(KERNEL)
    with contextlib.chdir(folder), Runner(device="cpu") as runner:
        yield runner


def bug(*regressions: Regression) -> SavedBug:
    return SavedBug(tuple(save(Path(f"node{i}"), regression) for i, regression in enumerate(regressions)))


def test_the_first_case_that_fails_is_chosen(runner: Runner) -> None:
    """The smallest may have been one machine's hiccup; what fails is what can be looked into."""
    checked = check_again(bug(a_finding(2), a_finding(5), a_finding(9)), runner)
    assert (checked.outcome, checked.saved.path.parent.name) == ("fails", "node1")


def test_a_bug_none_of_whose_cases_fails_passes(runner: Runner) -> None:
    """It would be reported for ever after it was repaired."""
    checked = check_again(bug(a_finding(2), a_finding(3)), runner)
    assert (checked.outcome, checked.saved.path.parent.name) == ("passes", "node0")


def test_a_fixed_case_is_itself_checked(runner: Runner) -> None:
    """A fixed case that fails again is the worst news that there is."""
    assert check_again(bug(a_finding(9, status="fixed")), runner).outcome == "fails"
    assert check_again(bug(a_finding(2, status="fixed"), a_finding(2)), runner).outcome == "passes"


@pytest.mark.parametrize(
    ("regression", "reason"),
    [
        (a_finding(9, kernel="gone.py:gone"), "no file 'gone.py'"),
        (a_finding(9, kernel="mine.py:yours"), "no kernel 'yours'"),
        (a_finding(9, kernel="merge_states_eager"), "does not compute dense_decode"),
        (a_finding(9, dtype="float16"), "float16"),
        (a_finding(2, device="NVIDIA H100"), "was found on NVIDIA H100"),
    ],
    ids=["no file", "no kernel", "other problem", "not supported", "other device"],
)
def test_what_cannot_be_told_here_is_unverified(runner: Runner, regression: Regression, reason: str) -> None:
    """A bug that only shows on a GPU, or in a kernel that is not here, would be put aside as repaired."""
    checked = check_again(bug(regression), runner)
    assert checked.outcome == "unverified"
    assert reason in checked.reason


def test_a_case_that_fails_is_preferred_to_one_that_cannot_be_told(runner: Runner) -> None:
    """What was verified is worth more than what is smaller."""
    checked = check_again(bug(a_finding(2, device="NVIDIA H100"), a_finding(9)), runner)
    assert (checked.outcome, checked.saved.path.parent.name) == ("fails", "node1")


def test_one_case_found_by_many_machines_is_run_once(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred machines that found it would cost a hundred times ten seconds for a hang."""
    replayed: list[SavedCase] = []

    def counted(cases: Sequence[SavedCase], *arguments: Any, **options: Any) -> Iterator[Replayed]:
        replayed.extend(cases)
        return replay(cases, *arguments, **options)

    monkeypatch.setattr(merging, "replay", counted)
    assert check_again(bug(*[a_finding(2)] * 20), runner).outcome == "passes"
    assert len(replayed) == 3
