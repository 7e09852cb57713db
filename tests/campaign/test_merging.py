"""Saved cases of several machines, merged, and what is told of that."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from attnfuzz.campaign.saved import merging
from attnfuzz.campaign.saved.merging import (
    PASSING,
    Checked,
    Kept,
    MergedFolder,
    Outcome,
    SavedBug,
    check_again,
    represent,
    tell_apart,
)
from attnfuzz.campaign.saved.replay import Replayed, SavedCase, replay
from attnfuzz.corpus import Regression, load_regression
from attnfuzz.corpus.regression import Status
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.report.findings import finding_lines
from attnfuzz.report.saved_cases import Merged, print_merged
from tests.common.planted_in_ci import KERNEL
from tests.common.saved_findings import a_finding, save


def saved(*regressions: Regression) -> list[SavedCase]:
    return [SavedCase(Path(f"node{i}/file.json"), regression) for i, regression in enumerate(regressions)]


def lengths(bug: SavedBug) -> list[int]:
    cases = [file.regression.case for file in bug.files]
    return [case.seq_lens[0] for case in cases if isinstance(case, DenseDecodeCase)]


def test_one_bug_found_by_three_machines_is_one_bug_smallest_case_first() -> None:
    """Whoever reads the merged folder would see each bug once for every machine."""
    (bug,) = tell_apart(saved(*(a_finding(n, "seq_len>1") for n in (9, 2, 5))))
    assert lengths(bug) == [2, 5, 9]


def test_other_kernels_results_and_aspects_are_other_bugs() -> None:
    """Merging too much loses a bug, which is worse than seeing one twice."""
    bugs = tell_apart(
        saved(
            a_finding(2, "seq_len>1"),
            a_finding(2, "seq_len>1", kernel="mine.py:other"),
            a_finding(4, "seq_len>1", kind="lse:value"),
            a_finding(2, "seq_len>1", oracle="exception", kind="ValueError in f"),
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
    assert represent(bug, bug.files[0], remark="passed").note == "see #12; passed"


def test_order_of_the_folders_does_not_matter() -> None:
    """Two people who merge the same folders would get different files."""
    files = saved(*(a_finding(n, *needs) for n in (2, 3, 7) for needs in ((), ("seq_len>1",), ("strides:q",))))
    assert [lengths(bug) for bug in tell_apart(files)] == [lengths(bug) for bug in tell_apart(files[::-1])]


def keep(folder: Path, bug: SavedBug, outcome: Outcome, file: int = 0) -> Kept:
    return MergedFolder(folder, device="a CPU").keep(bug, Checked(bug.files[file], outcome))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.json"))


def test_a_case_that_fails_is_written_and_its_source_left(tmp_path: Path) -> None:
    """The folders of the machines are the evidence; they are read, nothing else."""
    source = save(tmp_path / "node", a_finding(2, "seq_len>1", note="#12"))
    before = source.path.read_bytes()
    kept = keep(tmp_path / "out", SavedBug((source,)), "fails")
    assert kept == Kept(tmp_path / "out" / source.path.name, is_new=True)
    assert kept.path.read_bytes() == source.path.read_bytes() == before


def test_a_case_that_passes_is_put_aside_with_a_remark(tmp_path: Path) -> None:
    """Left among the others it would fail a test run that expects it to fail; deleted, a flaky bug would be lost."""
    source = save(tmp_path / "node", a_finding(2, "seq_len>1"))
    kept = keep(tmp_path / "out", SavedBug((source,)), "passes")
    assert kept.path.parent == tmp_path / "out" / PASSING
    assert "passed on a CPU when it was merged" in load_regression(kept.path).note
    assert names(tmp_path / "out") == []
    fixed = save(tmp_path / "node", a_finding(2, status="fixed"))  # which is meant to pass
    assert keep(tmp_path / "out", SavedBug((fixed,)), "passes").path.parent == tmp_path / "out"


def test_a_larger_case_in_the_folder_is_replaced_and_hands_its_note_on(tmp_path: Path) -> None:
    """Merging night after night would pile up cases of one bug."""
    smaller = save(tmp_path / "node", a_finding(2, "seq_len>1"))
    larger = save(tmp_path / "out", a_finding(9, "seq_len>1", note="tracked in #12"))
    kept = keep(tmp_path / "out", SavedBug((smaller, larger)), "fails")
    assert kept.replaced == (larger.path,)
    assert names(tmp_path / "out") == [smaller.path.name]
    assert load_regression(kept.path).note == "tracked in #12"


@pytest.mark.parametrize("outcome", ["unverified", "passes"])
def test_nothing_is_removed_for_a_case_that_was_not_seen_to_fail(tmp_path: Path, outcome: Outcome) -> None:
    """A case that was verified once would make room for one that may show nothing."""
    smaller = save(tmp_path / "node", a_finding(2, "seq_len>1"))
    larger = save(tmp_path / "out", a_finding(9, "seq_len>1"))
    kept = keep(tmp_path / "out", SavedBug((smaller, larger)), outcome)
    assert larger.path.exists()
    assert (kept.path == larger.path) == (outcome == "passes")


def test_what_the_folder_holds_is_left_as_it_is(tmp_path: Path) -> None:
    """Files under version control would change with every merge."""
    own = save(tmp_path / "out", a_finding(2, "seq_len>1", note="#12"))
    fixed = save(tmp_path / "out", a_finding(3, status="fixed"))
    other = save(tmp_path / "node", a_finding(9, "seq_len>1"))
    before = {path: path.read_bytes() for path in (own.path, fixed.path)}
    for _ in range(2):
        assert keep(tmp_path / "out", SavedBug((own, other)), "fails") == Kept(own.path, is_new=False)
        assert keep(tmp_path / "out", SavedBug((fixed,)), "fails") == Kept(fixed.path, is_new=False)
    assert {path: path.read_bytes() for path in (own.path, fixed.path)} == before
    assert len(names(tmp_path / "out")) == 2


def test_merging_twice_writes_nothing_new(tmp_path: Path) -> None:
    """A job that is run again must not be afraid of what it did before."""
    bug = SavedBug((save(tmp_path / "node", a_finding(2, "seq_len>1")),))
    assert [keep(tmp_path / "out", bug, "fails").is_new for _ in range(2)] == [True, False]
    assert [keep(tmp_path / "out", bug, "passes").is_new for _ in range(2)] == [True, False]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """In a folder with the kernel: executors stay in the one that they were started in."""
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "mine.py").write_text(KERNEL)
    with contextlib.chdir(folder), Runner(device="cpu") as runner:
        yield runner


def bug(*regressions: Regression) -> SavedBug:
    return SavedBug(tuple(save(Path(f"node{i}"), regression) for i, regression in enumerate(regressions)))


ELSEWHERE = "NVIDIA H100"


@pytest.mark.parametrize(
    ("regressions", "outcome", "chosen", "reason"),
    [
        ((a_finding(2), a_finding(5), a_finding(9)), "fails", 1, ""),  # the smallest may have been a hiccup
        ((a_finding(2), a_finding(3)), "passes", 0, ""),
        ((a_finding(9, status="fixed"),), "fails", 0, ""),
        ((a_finding(2, status="fixed"), a_finding(2)), "passes", 0, ""),
        ((a_finding(2, device=ELSEWHERE), a_finding(9)), "fails", 1, ""),  # what was verified is worth more
        ((a_finding(2, device=ELSEWHERE),), "unverified", 0, f"was found on {ELSEWHERE}"),
        ((a_finding(9, kernel="gone.py:gone"),), "unverified", 0, "no file 'gone.py'"),
        ((a_finding(9, kernel="mine.py:yours"),), "unverified", 0, "no kernel 'yours'"),
        ((a_finding(9, kernel="merge_states_eager"),), "unverified", 0, "does not compute dense_decode"),
        ((a_finding(9, dtype="float16"),), "unverified", 0, "float16"),
    ],
    ids=[
        "the first that fails", "none fails", "fixed and fails", "fixed and passes", "verified", "other device",
        "no file", "no kernel", "other problem", "not supported",
    ],
)  # fmt: skip
def test_one_case_of_a_bug_is_chosen_by_what_becomes_of_it_here(
    runner: Runner, regressions: tuple[Regression, ...], outcome: Outcome, chosen: int, reason: str
) -> None:
    """A bug that only shows on a GPU would be put aside as repaired, or one that is repaired be told for ever."""
    checked = check_again(bug(*regressions), runner)
    assert (checked.outcome, checked.saved.path.parent.name) == (outcome, f"node{chosen}")
    assert reason in checked.reason


def test_one_case_found_by_many_machines_is_run_once(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred machines that found it would cost a hundred times ten seconds for a hang."""
    replayed: list[SavedCase] = []

    def counted(cases: Sequence[SavedCase], *arguments: Any, **options: Any) -> Iterator[Replayed]:
        replayed.extend(cases)
        return replay(cases, *arguments, **options)

    monkeypatch.setattr(merging, "replay", counted)
    assert check_again(bug(*[a_finding(2)] * 20), runner).outcome == "passes"
    assert len(replayed) == 3


OUT = Path("all")


def a_row(outcome: Outcome, *, status: Status = "open", reason: str = "", aside: bool = False) -> Merged:
    saved = SavedCase(Path("node1/file.json"), a_finding(2, "seq_len>1", status=status))
    kept = Kept(OUT / PASSING / "file.json" if aside else OUT / "file.json", is_new=True)
    return Merged(SavedBug((saved, saved)), Checked(saved, outcome, reason), kept)


def printed_table(*rows: Merged, verified: bool = True) -> str:
    file = io.StringIO()
    print_merged(Console(file=file, width=140), rows, files=4, folders=2, output=OUT, verified=verified)
    return file.getvalue()


@pytest.mark.parametrize(
    ("row", "counts", "words"),
    [
        (a_row("fails"), True, "fails"),
        (a_row("fails", status="fixed"), True, "fails again"),
        (a_row("unverified", reason="no GPU"), True, "file.json was not verified: no GPU"),
        (a_row("unverified", status="fixed"), False, "not verified"),
        (a_row("passes", aside=True), False, f"put aside in {OUT / PASSING}, passing now: 1"),
        (a_row("passes", status="fixed"), False, "1 case marked fixed"),
        (a_row("passes"), False, "once repaired: attnfuzz triage --fixed"),
    ],
)
def test_what_became_of_a_bug_is_said(row: Merged, counts: bool, words: str) -> None:
    """A bug would be lost between the table, the total and the exit status."""
    text = printed_table(row)
    assert row.counts == counts
    assert words in text
    assert f"4 files from 2 places: {'1 bug' if counts else '0 bugs'} in all" in text


def test_a_path_in_a_file_is_whole() -> None:
    """A path that is broken over two lines cannot be copied from a log."""
    row = a_row("fails")
    path = OUT / f"paged_decode-{'x' * 150}.json"
    assert str(path) in printed_table(Merged(row.bug, row.checked, Kept(path, is_new=True)))


def test_nothing_merged_is_said() -> None:
    """An empty table looks like a failure."""
    assert printed_table() == "4 files from 2 places: 0 bugs in all\n"


def test_it_is_said_that_nothing_was_run() -> None:
    """Unverified findings would be taken for bugs."""
    assert "merge again without --no-verify where the kernels run" in printed_table(a_row("unverified"), verified=False)
