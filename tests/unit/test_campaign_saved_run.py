"""campaign.saved.replay: a saved case runs after the cases that it needs, and as often as its rate asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import attnfuzz
from attnfuzz.campaign.saved.replay import SavedCase, judge_sequence, preceding_for, replay, run_saved, runs_to_see
from attnfuzz.corpus import FindingRecord, Regression, write_regression
from attnfuzz.declaration import Declaration
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.verdict import USUAL_ORACLES, Failure, OracleName, Verdict
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.testing import check

KERNELS = Path(__file__).parent / "stateful_kernels.py"


def a_case(num_q_heads: int = 1, head_size: int = 16) -> DenseDecodeCase:
    scale = head_size**-0.5
    return DenseDecodeCase(
        num_q_heads=num_q_heads, head_size=head_size, num_kv_heads=num_q_heads, seq_lens=(1,), scale=scale
    )


def saved(kernel: str, case: Case, *preceding: Case, failed: int = 0, runs: int = 0) -> Regression:
    record = FindingRecord(oracle="crash", message="it crashed", failed=failed, runs=runs)
    return Regression(
        problem="dense_decode", kernel=f"{KERNELS}:{kernel}", case=case, preceding=preceding, finding=record
    )


AFTER_WIDE = saved("crashes_after_wide_heads", a_case(3), a_case(head_size=32))


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(device="cpu", oracles=USUAL_ORACLES) as runner:  # two calls a case
        yield runner


def the(kernel: str, runner: Runner) -> Declaration:
    return runner.declarations([f"{KERNELS}:{kernel}"])[0]


def test_a_case_fails_after_the_one_that_it_needs_and_not_without(runner: Runner) -> None:
    """A saved sequence that replays as a pass is a lost crash."""
    declaration = the("crashes_after_wide_heads", runner)
    assert run_saved(AFTER_WIDE, declaration, runner).failed == 1
    assert run_saved(saved("crashes_after_wide_heads", AFTER_WIDE.case), declaration, runner).failed == 0


def test_a_sequence_is_run_in_a_process_of_its_own(runner: Runner) -> None:
    """What ran before in the process would be part of the sequence, and what it leaves behind part of the next."""
    declaration = the("crashes_at_the_tenth_call", runner)
    sequence = saved("crashes_at_the_tenth_call", a_case(), *[a_case()] * 4)
    assert [run_saved(sequence, declaration, runner).failed for _ in range(2)] == [1, 1]
    shorter = saved("crashes_at_the_tenth_call", a_case(), *[a_case()] * 3)
    assert run_saved(shorter, declaration, runner).failed == 0


def test_what_is_remembered_of_one_run_does_not_hide_it_in_the_next(runner: Runner) -> None:
    """A kernel whose plan only grows would be called repaired as soon as its case had been run once."""
    kernels = Path(__file__).parents[1] / "oracles" / "relations" / "remembering_kernels.py"
    finding = FindingRecord(oracle="call_sequence", message="other bits after another call")
    with Runner(device="cpu") as asking:
        (declaration,) = asking.declarations([f"{kernels}:plan_that_only_grows"])
        case = DenseDecodeCase(
            num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(5, 1), scale=0.25, dtype="float32"
        )
        again = Regression(problem="dense_decode", kernel=declaration.target, case=case, finding=finding)
        first, second = (asking.judge(declaration, case, relations=("call_sequence",)).failure for _ in range(2))
        assert (first is not None, second) == (True, None)  # it has grown
        assert [run_saved(again, declaration, asking).failed for _ in range(2)] == [1, 1]


def test_a_flaky_case_is_run_until_it_should_have_shown(runner: Runner) -> None:
    """One run of a kernel that is wrong one time in four passes more often than not."""
    flaky = saved("wrong_one_time_in_four", a_case(2), failed=4, runs=20)
    ran = run_saved(flaky, the("wrong_one_time_in_four", runner), runner)
    assert ran.runs == 14
    assert 0 < ran.failed < ran.runs
    assert ran.verdict.failure is not None


def test_the_number_of_runs_follows_from_the_rate() -> None:
    """Too few runs call a flaky kernel repaired, too many take minutes."""
    assert runs_to_see(0, 0) == runs_to_see(3, 3) == 1
    assert runs_to_see(1, 2) == 5
    assert runs_to_see(1, 1000) == 60


def test_replay_tells_how_often_a_flaky_case_failed(runner: Runner) -> None:
    """FAIL alone would send somebody after a case that passes when they try it."""
    flaky = saved("wrong_one_time_in_four", a_case(2), failed=4, runs=20)
    (result,) = replay([SavedCase(Path("a.json"), flaky)], runner, kernels=[flaky.kernel])
    assert result.failed
    assert (result.runs, result.failed_runs > 0) == (14, True)


def test_check_runs_the_sequence_of_a_file(tmp_path: Path) -> None:
    """The pytest plugin checks files: without their sequence they would all pass, and open ones fail for that."""
    path = write_regression(AFTER_WIDE, tmp_path)
    with pytest.raises(attnfuzz.KernelFailure, match=f"attnfuzz replay .*{path.name} --kernel"):
        check(AFTER_WIDE.kernel, path, device="cpu")
    check(AFTER_WIDE.kernel, AFTER_WIDE.case, device="cpu")


def test_cases_that_another_kernel_does_not_support_are_left_out(runner: Runner) -> None:
    """A kernel would crash on input that it never promised to take."""
    declaration = Declaration(name="k", problem="dense_decode", supports=attnfuzz.Supports(head_sizes=(16,)))
    assert preceding_for(declaration, saved("k", a_case(), a_case(head_size=32), a_case(2))) == (a_case(2),)


def verdicts(*oracles: OracleName | None) -> tuple[list[Verdict], Sequence[Case]]:
    failures = [Failure(oracle=oracle, kind="kind", message="no") if oracle else None for oracle in oracles]
    return [Verdict(failure=failure) for failure in failures], [a_case(n + 1) for n in range(len(oracles))]


@pytest.mark.parametrize(
    ("oracles", "expected", "judged"),
    [
        ((None, None, "crash"), "crash", 3),
        (("accuracy", None, None), "accuracy", 3),
        (("accuracy", None, "hang"), "hang", 3),
        (("crash", None, None), "crash", 1),
        ((None, None, None), None, 3),
    ],
)
def test_a_preceding_case_that_fails_is_not_passed_over(
    oracles: tuple[OracleName | None, ...], expected: str | None, judged: int
) -> None:
    """A kernel that dies before the last case has not passed it."""
    answers, (*preceding, case) = verdicts(*oracles)
    seen: list[Case] = []

    def judge(one: Case) -> Verdict:
        seen.append(one)
        return answers[len(seen) - 1]

    failure = judge_sequence(preceding, case, judge).failure
    assert (failure and failure.oracle) == expected
    assert seen == [*preceding, case][:judged]


LEAKING = Path(__file__).parent / "leaking_kernels.py"


def leak(kernel: str) -> Regression:
    case = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(1,), scale=0.25, dtype="float32")
    record = FindingRecord(oracle="crash", kind="leak", message="every call keeps another 16.0 MiB of memory")
    return Regression(problem="dense_decode", kernel=f"{LEAKING}:{kernel}", case=case, finding=record)


def test_a_leak_shows_again_until_it_is_mended(runner: Runner) -> None:
    """One call of a kernel that leaks is right, and its regression would pass on the day it was saved."""
    for kernel, kinds in (("keeps_16_mebibytes", ["leak"]), ("keeps_once", [])):
        (declaration,) = runner.declarations([f"{LEAKING}:{kernel}"])
        failure = run_saved(leak(kernel), declaration, runner).verdict.failure
        assert [one.kind for one in (failure,) if one is not None] == kinds


@pytest.mark.night
@pytest.mark.parametrize("isolated", [True, False])
def test_check_says_that_a_kernel_leaks(tmp_path: Path, isolated: bool) -> None:
    """The pytest plugin goes this way, and xfail is strict."""
    path = write_regression(leak("keeps_16_mebibytes"), tmp_path)
    with pytest.raises(attnfuzz.KernelFailure, match=r"every call keeps another 16\.0 MiB") as failed:
        check(f"{LEAKING}:keeps_16_mebibytes", path, device="cpu", isolated=isolated)
    assert f"attnfuzz replay {path}" in str(failed.value)
    check(f"{LEAKING}:keeps_once", path, device="cpu", isolated=isolated)


@pytest.mark.night
def test_a_process_that_outgrew_its_memory_has_a_limit_again(runner: Runner) -> None:
    """Without one it would take the machine's memory, and pass."""
    (declaration,) = runner.declarations([f"{LEAKING}:keeps_much"])
    case = leak("keeps_much").case
    record = FindingRecord(oracle="crash", kind="memory", message="the kernel's process outgrew its memory limit")
    saved_run = Regression(
        problem="dense_decode", kernel=declaration.target, case=case, preceding=(case,) * 7, finding=record
    )
    failure = run_saved(saved_run, declaration, runner).verdict.failure
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("crash", "memory")
