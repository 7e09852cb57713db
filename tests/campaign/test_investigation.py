"""campaign.triage.investigation with real processes: failures after other cases, by chance, and of many cases."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import pytest

from attnfuzz.campaign.messages import Confirmed, Duplicate, Minimised, Smaller
from attnfuzz.campaign.triage import investigation
from attnfuzz.corpus import Regression, load_regression
from attnfuzz.declaration import Declaration
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.identity.bug import Bug, FailingCase, KnownBugs
from attnfuzz.identity.features import NEEDS_PRECEDING
from attnfuzz.mistake import WITHOUT_WEIGHT
from attnfuzz.oracles.registry import ORACLES, oracle_of
from attnfuzz.problems.cases import Case, DenseDecodeCase, MergeStatesCase, PagedDecodeCase, decode_case
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.recipes import LseKind, Pages
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Cause, Failure, SourceLine, Verdict
from tests.campaign.pretended_process import PretendedProcess, a_case, looked_into
from tests.common.named_features import named, words
from tests.common.scripted_runner import judging, scripted
from tests.common.search_bench import KERNEL, WRONG
from tests.faults.campaigns import Campaign, saved
from tests.sample_cases import dense_case, paged_case

Message = TypeVar("Message", bound=msgspec.Struct)

KERNELS = Path(__file__).parent / "stateful_kernels.py"
EMPTY = {"-inf", "+inf"}


def investigated(process: PretendedProcess, suspect: FailingCase) -> list[msgspec.Struct]:
    """What the coordinator is told."""
    is_bug, sent = looked_into(suspect, process.timed())
    assert is_bug
    return sent


def last(sent: list[msgspec.Struct], kind: type[Message]) -> Message:
    return [message for message in sent if isinstance(message, kind)][-1]


MERGE = Declaration(name="merge", problem="merge_states", target="kernels.py:merge")
NAN = Failure(oracle="dead_memory", kind="output", message="NaN in the output of an empty state")


@pytest.mark.parametrize(
    ("fails_with", "features"),
    [
        (lambda prefix, suffix: (prefix in EMPTY) != (suffix in EMPTY), {"one state empty"}),
        (lambda prefix, suffix: prefix in EMPTY and suffix not in EMPTY, {"one state empty", "prefix empty"}),
        (
            lambda prefix, suffix: prefix in EMPTY and suffix in EMPTY,
            {"both states empty", "prefix empty", "suffix empty"},
        ),
        (
            lambda prefix, suffix: "+inf" in (prefix, suffix) and not {prefix, suffix} <= EMPTY,
            {"one state empty", "some lse +inf"},
        ),
        (
            lambda prefix, suffix: (prefix, suffix) == ("low", "high"),
            {"lse low/high", "some lse low", "some lse high", "some lse far apart"},
        ),
    ],
    ids=["either side", "prefix", "both", "+inf", "one pair"],
)
def test_what_fails_with_other_log_sum_exps_alike_is_told_once(
    fails_with: Callable[[str, str], bool], features: set[str]
) -> None:
    """One mistake about empty states would be a finding for each pair of LSEs, and another be taken for it."""

    def judge(declaration: Declaration, case: Case, **how: Any) -> Verdict:
        assert isinstance(case, MergeStatesCase)
        return Verdict(failure=NAN if any(fails_with(*pair) for pair in case.lse_pairs) else None)

    pairs = tuple((prefix, suffix) for prefix in get_args(LseKind) for suffix in get_args(LseKind))
    case = MergeStatesCase(num_q_heads=2, head_size=16, num_tokens=len(pairs), lse_pairs=pairs)
    timed = judging(scripted(judge))
    is_bug, sent = looked_into(FailingCase(MERGE, case, NAN), timed)
    assert is_bug
    assert words(last(sent, Minimised).features) == features


def test_the_line_of_a_stray_write_is_known_once_it_is_explained() -> None:
    """A crash at the same line would be looked into, and a second stray write told beside the first."""
    stray = Failure(oracle="red_zone", kind="write after out", message="written behind out")
    line = SourceLine(file="kernels.py", line=31)

    def judge(declaration: Declaration, case: Case, **how: Any) -> Verdict:
        return Verdict(failure=stray)

    explained = Explanation(sources=(line,))
    timed = judging(scripted(judge), explain=lambda *_: explained)
    suspect = PretendedProcess(lambda case, earlier: stray).suspect(a_case(), failure=stray)
    is_bug, sent = looked_into(suspect, timed)
    assert is_bug
    assert last(sent, Smaller).failure.sources == (line,)
    known = KnownBugs(last(sent, Minimised).bugs)
    for at, is_known in ((line, True), (SourceLine(file="kernels.py", line=47), False)):
        crash = Failure(oracle="crash", kind="SIGSEGV", message="died", sources=(at,))
        failing = FailingCase(suspect.declaration, a_case(9), crash)
        assert (known.predicting(failing) is not None) is is_known


@pytest.mark.parametrize("ends", [True, False])
def test_a_declaration_is_suggested_only_where_it_ends_the_failure(ends: bool) -> None:
    """Whoever copies it would see the finding again."""
    missing = Failure(oracle="unwritten", kind="lse", message="lse was never written", remedy={"lse": "none"})

    def judge(declaration: Declaration, case: Case, **how: Any) -> Verdict:
        return Verdict(failure=None if ends and declaration.supports.lse == "none" else missing)

    timed = judging(scripted(judge))
    is_bug, sent = looked_into(
        PretendedProcess(lambda case, earlier: missing).suspect(a_case(), failure=missing), timed
    )
    assert is_bug
    assert last(sent, Minimised).declarable is ends


def test_numbers_that_are_plainly_wrong_in_a_relation_are_told_of_a_case_that_has_them() -> None:
    """The case would say nothing of what the relation's batch needs, and the bug be told again of batches as drawn."""
    residuals = Failure(oracle="residuals", kind="out:value", message="with other numbers, wrong")

    def judge(declaration: Declaration, case: Case, **how: Any) -> Verdict:
        assert isinstance(case, DenseDecodeCase)
        if len(case.seq_lens) > 1:
            return Verdict(failure=WRONG)
        return Verdict(failure=residuals if how["relations"] == ("residuals",) and case.seq_lens[0] >= 5 else None)

    timed = judging(scripted(judge))
    case = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(17,), scale=default_scale(16))
    is_bug, sent = looked_into(PretendedProcess(lambda case, earlier: None).suspect(case, failure=residuals), timed)
    assert is_bug
    smallest = decode_case("dense_decode", bytes(last(sent, Smaller).case))
    assert isinstance(smallest, DenseDecodeCase)
    assert smallest.seq_lens == (1, 1)


def test_shrinking_does_not_lean_on_what_earlier_tries_left_behind() -> None:
    """The smallest case would pass in a fresh process, and the finding be saved unshrunk, or as one that passes."""

    def bug(case: DenseDecodeCase, earlier: Sequence[Case]) -> Failure | None:
        wide = [one for one in (*earlier, case) if one.head_size == 32]
        return WRONG if case.num_q_heads == 3 and wide else None

    process = PretendedProcess(bug)
    case = DenseDecodeCase(num_q_heads=3, head_size=32, num_kv_heads=1, seq_lens=(5, 0, 33), scale=0.5, extra_rows=3)
    sent = investigated(process, process.suspect(case, failure=WRONG))
    smallest = decode_case("dense_decode", bytes(last(sent, Smaller).case))
    assert smallest == dense_case(num_q_heads=3, head_size=32, seq_lens=(1,), scale=default_scale(32))
    assert words(last(sent, Minimised).features) == {
        "head_size>16",
        "gqa_ratio>1",
        "gqa_ratio not pow2",
        "several query heads",
    }
    assert last(sent, Confirmed).failed == last(sent, Confirmed).runs


def test_what_earlier_calls_left_does_not_hide_what_it_is() -> None:
    """Partial results that nobody has written would be told as a wrong number where an earlier case left some."""
    unwritten = Failure(oracle="unwritten", kind="read before written", message="made of memory that nobody wrote")

    def bug(case: DenseDecodeCase, earlier: Sequence[Any]) -> Failure | None:
        larger = [one for one in earlier if max(one.seq_lens) > max(case.seq_lens)]
        return None if max(case.seq_lens) < 3 else WRONG if larger else unwritten

    process = PretendedProcess(bug)
    case = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(33,), scale=0.25)
    sent = investigated(process, process.suspect(case, failure=unwritten))
    assert last(sent, Smaller).failure == unwritten
    assert last(sent, Confirmed).failed == last(sent, Confirmed).runs


def test_what_there_was_no_time_to_shrink_is_asked_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be told to need all that a large case has, and be taken for a bug beside the one that it is."""
    monkeypatch.setattr(investigation, "_HANG_GUARD_S", 0.0)
    process = PretendedProcess(lambda case, earlier: WRONG if case.num_q_heads == 3 else None)
    case = DenseDecodeCase(num_q_heads=3, head_size=32, num_kv_heads=1, seq_lens=(5, 0, 33), scale=0.5, extra_rows=3)
    sent = investigated(process, process.suspect(case, failure=WRONG))
    assert not last(sent, Minimised).complete
    needed = words(last(sent, Minimised).features)
    assert "gqa_ratio not pow2" in needed
    assert not needed & {"empty sequence", "head_size>16", "ragged"}


DEAD = Failure(
    oracle="dead_memory",
    kind="out",
    message="out changes with memory that holds no token",
    causes=(Cause(mistake="nan_load"),),
)
WITHOUT_ITS_WEIGHT = msgspec.structs.replace(DEAD, causes=(Cause(mistake=WITHOUT_WEIGHT),))
LEAKS = Failure(oracle="containment", kind="nan in V", message="out is nan with nan in V at another sequence's token")
PAGED = Declaration(
    name="paged",
    problem="paged_decode",
    supports=Supports(head_sizes=(16,), block_sizes=(16,), layouts=("NHD",), strides="contiguous", lse="none"),
    target="kernels.py:paged",
)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("reads_past_its_end", [True, False])
@pytest.mark.parametrize("shown", [LEAKS, WRONG])
def test_another_sequence_s_token_on_a_shared_page_is_a_read_past_the_end(
    shown: Failure, reads_past_its_end: bool, is_known: bool
) -> None:
    """A kernel that forgets one mask would have two findings: the second where a live token lies past the end."""
    is_bug, sent, known = _looked_into_on_a_shared_page(shown, DEAD, reads_past_its_end, is_known)
    assert is_bug
    if not reads_past_its_end:
        assert [(bug.oracle, bug.kind) for bug in last(sent, Minimised).bugs] == [(shown.oracle, shown.kind)]
    elif is_known:
        later = FailingCase(PAGED, msgspec.structs.replace(ON_A_SHARED_PAGE, seq_lens=(3, 16, 2)), shown)
        assert last(sent, Duplicate).bugs[0].oracle == shown.oracle
        assert known.predicting(later)
    else:
        assert last(sent, Minimised).bugs[-1].oracle == "dead_memory"
        assert last(sent, Smaller).failure == DEAD


@pytest.mark.parametrize(
    ("shown", "behind"),
    [
        pytest.param(WRONG, WITHOUT_ITS_WEIGHT, id="a number without weight changes nothing"),
        pytest.param(msgspec.structs.replace(WRONG, causes=(Cause(mistake="head_map"),)), DEAD, id="its cause is told"),
    ],
)
def test_a_wrong_number_on_a_shared_page_that_no_read_past_the_end_explains_is_another_bug(
    shown: Failure, behind: Failure
) -> None:
    """It would be put down to dead memory, and not be told at all."""
    is_bug, sent, _ = _looked_into_on_a_shared_page(shown, behind, True, True)
    assert is_bug
    assert [(bug.oracle, bug.kind) for bug in last(sent, Minimised).bugs] == [(shown.oracle, shown.kind)]


ON_A_SHARED_PAGE = paged_case(seq_lens=(1, 16), block_size=16, pages=Pages(shared_blocks=1))


def _looked_into_on_a_shared_page(
    shown: Failure, behind: Failure, reads_past_its_end: bool, is_known: bool
) -> tuple[bool, list[msgspec.Struct], KnownBugs]:
    """Of a case that shows ``shown``, and ``behind`` where no page is shared if that comes of a read past the end."""

    def judge(declaration: Declaration, case: Case, **how: Any) -> Verdict:
        assert isinstance(case, PagedDecodeCase)
        if case.num_seqs == 1:
            return Verdict(failure=behind if reads_past_its_end else None)
        is_shared = case.pages.shared_blocks or not reads_past_its_end
        return Verdict(failure=shown if is_shared else behind)

    timed = judging(scripted(judge))
    known = KnownBugs()
    if is_known:
        known.add(Bug.shown_by(PAGED.target, behind, frozenset()))
    return *looked_into(FailingCase(PAGED, ON_A_SHARED_PAGE, shown), timed, known), known


@pytest.mark.parametrize("is_of_relation", [True, False])
def test_what_one_run_shows_is_told_although_a_relation_saw_it_before(is_of_relation: bool) -> None:
    """Whoever repairs it would be told of NaN in another sequence's K, where the output is simply wrong."""

    def bug(case: DenseDecodeCase, earlier: Sequence[Case]) -> Failure | None:
        return WRONG if max(case.seq_lens) > 1 else None

    process = PretendedProcess(bug)
    before = LEAKS if is_of_relation else DEAD
    known = KnownBugs([Bug.shown_by(KERNEL.target, before, named("seq_len>1"), finding="0a1b2c")])
    _, sent = looked_into(process.suspect(a_case(9), failure=WRONG), process.timed(), known)
    if is_of_relation:
        assert last(sent, Minimised).same_as == "0a1b2c"
    else:
        assert [bug.finding for bug in last(sent, Duplicate).bugs] == ["0a1b2c"]


@pytest.mark.parametrize("keeps_something", [True, False])
def test_what_is_kept_between_calls_is_one_bug_however_it_shows(keeps_something: bool) -> None:
    """Strides of an earlier call are wrong numbers in one case and dead memory in the next: each would be a finding."""
    needed = frozenset({NEEDS_PRECEDING}) if keeps_something else named("head_size>16")
    known = KnownBugs([Bug.shown_by(KERNEL.target, WRONG, needed)])
    process = PretendedProcess(lambda case, earlier: DEAD if earlier else None)
    is_bug, sent = looked_into(process.suspect(a_case(9), a_case(7), failure=DEAD), process.timed(), known)
    assert is_bug
    assert bool(sent) is not keeps_something


def test_a_bug_that_others_find_while_it_is_shrunk_is_known() -> None:
    """Every smaller case would be refused as known, and what is left, unshrunk, be reported as a second bug."""

    def bug(case: DenseDecodeCase, earlier: Sequence[Case]) -> Failure | None:
        return WRONG if max(case.seq_lens) > 1 else None

    process = PretendedProcess(bug)
    case = DenseDecodeCase(num_q_heads=3, head_size=32, num_kv_heads=1, seq_lens=(5, 0, 33), scale=0.5, extra_rows=3)
    suspect = process.suspect(case, failure=WRONG)
    known = KnownBugs()

    def others_find_it() -> bool:
        known.add(Bug.shown_by(KERNEL.target, WRONG, named("seq_len>1")))
        return False

    is_bug, sent = looked_into(suspect, process.timed(), known, is_over=others_find_it)
    assert is_bug
    assert last(sent, Duplicate).finding == "0-1"
    assert not any(isinstance(message, Minimised) for message in sent)


@dataclass(frozen=True)
class Explored:
    """What one worker made of one kernel."""

    finding: dict[str, Any]
    saved: Regression
    path: Path
    output: str

    @property
    def lengths(self) -> tuple[int, ...]:
        assert isinstance(self.saved.case, DenseDecodeCase)
        return self.saved.case.seq_lens


def explore(kernel: str, folder: Path) -> Explored:
    """What one worker makes of a kernel's first bug; as long as it takes, on a machine that has much to do.

    Without relations, whose further calls let a single case do what takes several others.
    """
    options: tuple[str, ...] = (
        "--budget",
        "300s",
        "--device",
        "cpu",
        "--seed",
        "1",
        "--fail-fast",
        "--json",
        "summary.json",
    )
    options += tuple(word for name in ORACLES if not oracle_of(name).is_relation for word in ("--oracle", name))
    target = kernel if ":" in kernel else f"{KERNELS}:{kernel}"
    with Campaign(folder, *options, kernels=target, workers=1) as campaign:
        assert campaign.wait(timeout_s=330.0) == 1, campaign.output
    findings = json.loads((folder / "summary.json").read_text())["kernels"][0]["findings"]
    # a race may come up as another symptom before the one that was seen first has been shrunk, and is cut off then
    finding, *cut_off = sorted(findings, key=lambda one: one["shrunk_s"] is None)
    assert all(one["shrunk_s"] is None for one in cut_off), campaign.output
    path = folder / finding["path"]
    return Explored(finding, load_regression(path), path, campaign.output)


def replay(path: Path, folder: Path) -> dict[str, Any]:
    """The result on the kernel that the file names."""
    out = folder / "replayed.json"
    command = [sys.executable, "-m", "attnfuzz", "replay", str(path), "--device", "cpu", "--json", str(out)]
    subprocess.run(command, capture_output=True, timeout=120)
    results: list[dict[str, Any]] = json.loads(out.read_text())["results"]
    return results[0]


@pytest.mark.night
@pytest.mark.parametrize(
    ("kernel", "oracle", "preceding"),
    [
        ("crashes_after_wide_heads", "crash", 1),
        ("crashes_at_the_tenth_call", "crash", 4),
        ("reuses_a_buffer", "accuracy", 1),
    ],
)
def test_what_needs_other_cases_is_saved_with_them(kernel: str, oracle: str, preceding: int, tmp_path: Path) -> None:
    """Such a failure passes when it is run alone, and would be dropped or saved as a case that passes."""
    found = explore(kernel, tmp_path)
    assert found.finding["oracle"] == oracle
    assert "in the same process" in found.finding["message"]
    assert len(found.saved.preceding) == preceding
    assert found.lengths == (1,)
    assert replay(found.path, tmp_path)["outcome"] == "fail"


@pytest.mark.night
@pytest.mark.parametrize("kernel", ["wrong_one_time_in_four", "crashes_one_time_in_four"])
def test_a_flaky_finding_has_its_rate(kernel: str, tmp_path: Path) -> None:
    """Whoever tries it once and sees it pass has to know how often to try."""
    found = explore(kernel, tmp_path)
    record = found.saved.finding
    assert record.runs == found.finding["runs"] == 20
    assert 0 < record.failed == found.finding["failed"] < 20
    assert found.saved.preceding == ()
    assert f"flaky: failed {record.failed} of 20 runs" in found.output
    assert replay(found.path, tmp_path)["runs"] > 1


@pytest.mark.night
def test_a_crash_of_one_case_in_twenty_costs_few_processes(tmp_path: Path) -> None:
    """A process for each such case slows the search for other bugs of the same kernel."""
    options: tuple[str, ...] = ("--budget", "300s", "--device", "cpu", "--seed", "1")
    with Campaign(tmp_path, *options, kernels=f"{KERNELS}:crashes_at_80_and_odd", workers=1) as campaign:
        campaign.wait_for("shrunk")
        campaign.wait_for_cases(500)
        campaign.end()
    restarted = int(re.findall(r"kernel processes restarted (\d+) times?", campaign.output)[-1])
    cases = int(re.findall(r"finding in (\d+) cases", campaign.output)[-1])
    (regression,) = saved(tmp_path)
    assert isinstance(regression.case, DenseDecodeCase)
    assert (regression.case.head_size, regression.case.seq_lens) == (80, (1,))
    assert restarted < cases / 25, campaign.output
