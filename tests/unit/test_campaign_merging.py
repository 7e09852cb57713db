"""attnfuzz.campaign.saved.merging: files of several machines are told apart as findings of one campaign are."""

from __future__ import annotations

from pathlib import Path

from attnfuzz.campaign.saved.merging import SavedBug, represent, tell_apart
from attnfuzz.campaign.saved.replay import SavedCase
from attnfuzz.corpus import Regression
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.report.findings import finding_lines
from tests.unit.saved_findings import a_finding


def saved(*regressions: Regression) -> list[SavedCase]:
    return [SavedCase(Path(f"node{i}/file.json"), regression) for i, regression in enumerate(regressions)]


def lengths(bug: SavedBug) -> list[int]:
    cases = [file.regression.case for file in bug.files]
    return [case.seq_lens[0] for case in cases if isinstance(case, DenseDecodeCase)]


def test_one_bug_found_by_three_machines_is_one_bug_smallest_case_first() -> None:
    """Whoever reads the merged folder would see each bug once for every machine."""
    (bug,) = tell_apart(saved(*(a_finding(n, "seq_len>1") for n in (9, 2, 5))))
    assert lengths(bug) == [2, 5, 9]


def test_other_kernels_oracles_kinds_and_aspects_are_other_bugs() -> None:
    """Merging too much loses a bug, which is worse than seeing one twice."""
    bugs = tell_apart(
        saved(
            a_finding(2, "seq_len>1"),
            a_finding(2, "seq_len>1", kernel="mine.py:other"),
            a_finding(4, "seq_len>1", kind="lse:value"),
            a_finding(2, "seq_len>1", oracle="red_zone"),
            a_finding(3, "dtype=bfloat16"),
        )
    )
    assert len(bugs) == 5


def test_a_bug_seen_through_another_symptom_is_merged_and_named() -> None:
    """Two machines may see one wrong stride as different wrong numbers, and nobody should look into it twice."""
    files = saved(a_finding(2, "strides:q"), a_finding(1, "strides:q", oracle="dead_memory"), a_finding(4, "strides:k"))
    strides_k, strides_q = sorted(tell_apart(files), key=lambda bug: len(bug.files))
    assert lengths(strides_q) == [1, 2]
    assert lengths(strides_k) == [4]
    kept = represent(strides_q, strides_q.files[0])
    told = finding_lines(kept.finding, kept.case)
    assert told == ("also shows as: accuracy/out:value [strides:q]: wrong for 2 tokens",)


def test_a_case_that_needs_others_before_it_is_the_larger_one() -> None:
    """The sequence would be kept where a single case shows the same bug."""
    alone = a_finding(9, "seq_len>1")
    after_others = a_finding(2, "seq_len>1", preceding=(alone.case,))
    (bug,) = tell_apart(saved(after_others, alone))
    assert bug.files[0].regression == alone


def test_flaky_findings_of_one_kernel_are_one_bug() -> None:
    """A race shows by any oracle, and would fill the folder."""
    files = saved(
        a_finding(2, "seq_len>1", failed=3, runs=20), a_finding(5, "seq_len>1", oracle="determinism", failed=1, runs=20)
    )
    assert len(tell_apart(files)) == 1


def test_fixed_cases_and_those_written_by_hand_stand_for_themselves() -> None:
    """A test that somebody wrote would be merged away by a finding that looks like it."""
    files = saved(
        a_finding(2, "seq_len>1"),
        a_finding(3, "seq_len>1", status="fixed"),
        a_finding(4, kind=""),
        a_finding(5, kind=""),
    )
    assert sorted(lengths(bug) for bug in tell_apart(files)) == [[2], [3], [4], [5]]


def test_the_same_case_is_one_and_a_fixed_one_stays_fixed() -> None:
    """The promise that a case passes must not be lost because another machine found it anew."""
    (bug,) = tell_apart(saved(a_finding(2), a_finding(2, note="see #12"), a_finding(2, status="fixed")))
    assert [file.regression.status for file in bug.files] == ["fixed", "open", "open"]
    assert represent(bug, bug.files[0]).note == "see #12"


def test_order_of_the_folders_does_not_matter() -> None:
    """Two people who merge the same folders would get different files."""
    files = saved(*(a_finding(n, *needs) for n in (2, 3, 7) for needs in ((), ("seq_len>1",), ("strides:q",))))
    assert [lengths(bug) for bug in tell_apart(files)] == [lengths(bug) for bug in tell_apart(files[::-1])]


def test_a_remark_is_added_to_what_people_wrote() -> None:
    """Why a case was put aside belongs to it, and so does what was known of it."""
    (bug,) = tell_apart(saved(a_finding(2, note="see #12")))
    assert represent(bug, bug.files[0], remark="passed").note == "see #12; passed"
