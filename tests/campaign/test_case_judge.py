"""attnfuzz.campaign.judge.case_judge: journalled, timed, in batches, and never past the deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.judge import case_judge as module
from attnfuzz.campaign.judge.case_judge import AdaptiveTimeout, CaseJudge, OutOfTime, Pipeline, Unjudged
from attnfuzz.corpus import load_regression
from attnfuzz.declaration import Declaration
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.isolation.outcomes import DeadlinePassed, ExecutorUnavailable, ServiceError
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.verdict import Failure, Timing, Verdict
from tests.common.scripted_runner import judging, scripted

DECLARATION = Declaration(name="k", problem="dense_decode", target="k")


CASE = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(1,), scale=0.25)


HANG = Verdict(failure=Failure(oracle="hang", kind="timeout", message="still running"))


class FakeRunner:
    """Takes ``case_s`` on its own clock for a case, and calls it a hang if that is longer than the limit."""

    def __init__(self, *, case_s: float) -> None:
        self.now = 0.0
        self.case_s = case_s
        self.limits: list[float] = []
        self.afresh: list[bool] = []
        self.verdict = Verdict()

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        self.limits.append(how["timeout_s"])
        self.afresh.append(how["afresh"])
        self.now += min(self.case_s, how["timeout_s"])
        return HANG if self.case_s > how["timeout_s"] else self.verdict

    def clock(self) -> float:
        return self.now

    def timed(self, *, deadline: float = 1e9, journal: Path | None = None) -> CaseJudge:
        return judging(scripted(self.judge), deadline=deadline, journal=journal, clock=self.clock)


def test_a_hang_teaches_nothing() -> None:
    """A hang that counted as a slow case would raise the limit for the next one."""
    runner = FakeRunner(case_s=0.01)
    judge = runner.timed()
    for _ in range(10):
        judge(DECLARATION, CASE)
    runner.case_s = 100.0
    assert judge(DECLARATION, CASE) == HANG
    judge(DECLARATION, CASE)
    assert runner.limits[-2:] == [2.0, 2.0]


def test_the_deadline_cuts_a_case_short_without_calling_it_a_hang() -> None:
    """The last case of a campaign is not hung because the campaign is over."""
    runner = FakeRunner(case_s=100.0)
    with pytest.raises(OutOfTime) as caught:
        runner.timed(deadline=4.0)(DECLARATION, CASE)
    assert caught.value.after_s == 5.0
    assert runner.limits == [5.0]


def test_after_the_deadline_nothing_is_judged() -> None:
    """A worker that goes on with one more case overruns the budget by as much as the case takes."""
    runner = FakeRunner(case_s=0.1)
    runner.now = 6.0
    with pytest.raises(OutOfTime):
        runner.timed(deadline=4.0)(DECLARATION, CASE)
    assert runner.limits == []


def test_an_error_of_the_framework_costs_one_case_and_is_told() -> None:
    """One case that an oracle stumbles over must not end an hour's search, nor pass for a case that passed."""
    complaints: list[str] = []

    def judge(declaration: Declaration, case: Case, **how: Any) -> Verdict:
        raise ServiceError("an oracle divided by zero")

    timed = judging(scripted(judge), complain=complaints.append)
    for _ in range(5):
        with pytest.raises(Unjudged):
            timed(DECLARATION, CASE)
    assert len(complaints) == 5
    assert '"head_size":16' in complaints[0]
    assert "divided by zero" in complaints[0]
    with pytest.raises(ServiceError):
        timed(DECLARATION, CASE)


def test_the_case_is_journalled_before_it_runs(tmp_path: Path) -> None:
    """Written afterwards, it is lost with the machine."""
    path = tmp_path / "journal.json"
    seen: list[Case] = []

    def judge(declaration: Declaration, case: Case, **how: Any) -> Verdict:
        seen.append(load_regression(path).case)
        return Verdict()

    judging(scripted(judge), journal=path)(DECLARATION, CASE, afresh=True)
    assert seen == [CASE]


def test_the_first_case_of_a_format_in_a_process_may_compile() -> None:
    """A kernel whose compiler runs in its own process would be killed in it, once it has run anything else."""
    runner, process = FakeRunner(case_s=0.01), [1]
    judge = judging(scripted(runner.judge, pid=lambda: process[0]), clock=runner.clock)
    for _ in range(12):
        judge(DECLARATION, CASE)
    assert runner.limits[-1] == 2.0
    judge(DECLARATION, msgspec.structs.replace(CASE, head_size=32))
    judge(DECLARATION, msgspec.structs.replace(CASE, head_size=32, seq_lens=(2,)))
    assert runner.limits[-2:] == [10.0, 2.0]
    process[0] = 2
    judge(DECLARATION, CASE)
    judge(DECLARATION, CASE)
    assert runner.limits[-2:] == [10.0, 2.0]


def test_builds_teach_nothing_about_hangs() -> None:
    """After a build of a minute, every hang would have the longest time."""
    runner = FakeRunner(case_s=5.0)
    runner.verdict = Verdict(timing=Timing(compile_s=4.99, built_s=4.99))
    judge = runner.timed()
    for _ in range(11):
        judge(DECLARATION, CASE)
    assert runner.limits[-1] == 2.0


class FakeBatches:
    """Judges batches as ``outcome`` says, which takes ``batch_s`` on its own clock."""

    def __init__(self, outcome: Callable[[], Sequence[Verdict] | None], *, batch_s: float = 0.0) -> None:
        self.now = 0.0
        self.outcome = outcome
        self.batch_s = batch_s
        self.limits: list[float] = []

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        self.limits.append(how["timeout_s"])
        return Verdict()

    def together(self, declaration: Declaration, cases: Sequence[Case], **how: Any) -> Sequence[Verdict] | None:
        self.limits.append(how["timeout_s"])
        self.now += self.batch_s
        return self.outcome()

    def timed(
        self,
        *,
        deadline: float = 1e9,
        journal: Path | None = None,
        complain: Callable[[str], None] = lambda text: None,
    ) -> CaseJudge:
        return judging(
            scripted(self.judge, together=self.together),
            deadline=deadline,
            journal=journal,
            complain=complain,
            clock=lambda: self.now,
        )


def test_every_case_of_a_batch_is_journalled_before_it_runs(tmp_path: Path) -> None:
    """Any of them may take the machine down."""
    running: list[Case] = []

    def outcome() -> list[Verdict]:
        running.extend(load_regression(path).case for path in tmp_path.iterdir())
        return [Verdict()] * 3

    FakeBatches(outcome).timed(journal=tmp_path / "journal.json").together(DECLARATION, [CASE] * 3)
    assert running == [CASE] * 3


def framework_error() -> Sequence[Verdict]:
    raise ServiceError("an oracle divided by zero")


def too_large() -> Sequence[Verdict]:
    raise CaseTooLarge("the case needs 3 TB")


@pytest.mark.parametrize("outcome", [lambda: None, framework_error, too_large])
def test_what_goes_wrong_with_a_batch_is_left_to_its_cases(outcome: Callable[[], Sequence[Verdict] | None]) -> None:
    """Nobody knows which case it was: each has to be judged alone, and none may pass unseen."""
    assert FakeBatches(outcome).timed().together(DECLARATION, [CASE] * 2) is None


def test_an_error_that_only_batches_show_is_told_once_for_each_kernel() -> None:
    """The search would be many times slower, with a process for each batch, and nobody would know why."""
    told: list[str] = []
    timed = FakeBatches(framework_error).timed(complain=told.append)
    for _ in range(3):
        assert timed.together(DECLARATION, [CASE] * 2) is None
    assert told == [f"2 cases of {DECLARATION.target} are judged one by one, not together: an oracle divided by zero"]


def test_the_deadline_holds_for_batches() -> None:
    """A batch that hangs must not keep a worker beyond the end of the campaign."""
    batches = FakeBatches(lambda: None, batch_s=1.5)
    timed = batches.timed(deadline=0.5)
    assert timed.together(DECLARATION, [CASE] * 2) is None
    assert timed.together(DECLARATION, [CASE] * 2) is None
    assert batches.limits == [1.5]


def test_limits_are_learned_from_batches() -> None:
    """Compilations are no measure of how long the next case may take, except one of them."""
    verdicts = [Verdict(timing=Timing(compile_s=0.1)), *[Verdict(timing=Timing(compile_s=0.2))] * 9]
    batches = FakeBatches(lambda: verdicts, batch_s=2.0)
    timed = batches.timed()
    timed.together(DECLARATION, [CASE] * 10)
    timed(DECLARATION, CASE)
    assert batches.limits == pytest.approx([2.5, 20 * 0.3])


SLOW_AMONG_FAST = ((0.5, 1, False), (0.01, 9, False))
LIMITS: dict[str, tuple[float, tuple[tuple[float, int, bool], ...], dict[str, float]]] = {
    "the first cases of a kernel may compile it": (60.0, ((0.01, 9, False),), {"limit": 60.0, "certain": 60.0}),
    "later ones have twenty times the slowest": (60.0, SLOW_AMONG_FAST, {"limit": 10.0, "short": 3.0}),
    "any hiccup of the machine would be a hang": (10.0, ((0.001, 10, False),), {"limit": 2.0, "short": 0.5}),
    "one beyond the longest is no limit": (10.0, ((3.0, 10, False),), {"limit": 10.0}),
    "a hang is certain well before a minute": (60.0, ((0.1, 10, False),), {"certain": 10.0}),
    "unless cases take long": (60.0, ((2.0, 10, False),), {"certain": 40.0}),
    "a batch has the time of all its cases": (10.0, ((0.25, 10, False),), {"limit": 5.0, "batch": 7.0}),
    "and is suspected of nothing when it is late": (10.0, ((0.01, 1, False),), {"limit": 10.0, "batch": 2.58}),
    "a format that is new may compile for as long": (60.0, ((0.01, 100, False),), {"limit": 2.0, "first": 60.0}),
    "until ten have shown how long that takes": (
        60.0,
        ((0.01, 100, False), (1.5, 10, True)),
        {"limit": 2.0, "first": 30.0, "certain": 30.0},  # in a fresh process every format is new
    ),
}
"""By why: the longest time; seconds of so many cases, and whether they were the first of a format; what follows."""


@pytest.mark.parametrize("why", LIMITS)
def test_limits_are_learned_from_what_cases_take(why: str) -> None:
    """A slow kernel would be accused of a hang, or one that hangs use up the budget."""
    longest_s, seen, expected = LIMITS[why]
    timeout = AdaptiveTimeout(longest_s)
    for seconds, cases, first in seen:
        timeout.record(seconds, cases=cases, first=first)
    told = {
        "limit": timeout.limit_s(),
        "short": timeout.limit_s(short=True),
        "first": timeout.limit_s(first=True),
        "batch": timeout.batch_limit_s(9),
        "certain": timeout.certain_s,
    }
    assert {name: told[name] for name in expected} == pytest.approx(expected)


BATCHED = Declaration(name="k", problem="dense_decode", target="k")


CASES = [DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(n,), scale=0.25) for n in (1, 2, 3)]


def content(declaration: Declaration, cases: Sequence[Case]) -> list[Verdict]:
    return [Verdict(error_ratio=float(i)) for i, _ in enumerate(cases)]


def test_the_submitter_goes_on_while_the_batch_is_judged() -> None:
    """Otherwise either the drawing or the device waits all the time."""
    drawn = threading.Event()

    def judge(declaration: Declaration, cases: Sequence[Case]) -> list[Verdict]:
        assert drawn.wait(10.0)
        return content(declaration, cases)

    pipeline = Pipeline(judge)
    pipeline.submit(BATCHED, CASES)
    assert pipeline.collect(0.0) is None
    drawn.set()
    batch = pipeline.collect()
    assert batch is not None
    assert batch.verdicts == content(BATCHED, CASES)
    assert batch.cases == CASES
    assert pipeline.collect() is None


def test_a_batch_is_sent_off_before_the_submitter_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor would wait for its batch while the interpreter is busy with drawing the next."""
    monkeypatch.setattr(module, "_HEAD_START_S", 10.0)
    sent = threading.Event()

    def judge(declaration: Declaration, cases: Sequence[Case]) -> list[Verdict]:
        time.sleep(0.02)  # lets go of the interpreter, as each file of a journal does
        sent.set()
        return content(declaration, cases)

    Pipeline(judge).submit(BATCHED, CASES)
    assert sent.is_set()


@pytest.mark.parametrize("error", [ValueError("bug"), SystemExit(3)])
def test_an_error_in_the_background_is_raised_where_it_is_collected(error: BaseException) -> None:
    """An error that dies with its thread leaves a worker that searches on and judges nothing."""

    def judge(declaration: Declaration, cases: Sequence[Case]) -> list[Verdict]:
        raise error

    pipeline = Pipeline(judge)
    pipeline.submit(BATCHED, CASES)
    with pytest.raises(type(error)) as caught:
        pipeline.collect()
    assert caught.value is error
    assert pipeline.collect() is None


def test_a_compilation_is_charged_to_the_case_that_caused_it() -> None:
    """A share of all would let formats that were compiled long ago look slow."""
    pipeline = Pipeline(lambda declaration, cases: [Verdict(timing=Timing(compile_s=1.0)), Verdict(), Verdict()])
    pipeline.submit(BATCHED, CASES)
    batch = pipeline.collect()
    assert batch is not None
    assert batch.verdicts is not None
    batch.seconds = 1.6
    assert [batch.case_seconds(verdict) for verdict in batch.verdicts] == pytest.approx([1.2, 0.2, 0.2])
    assert batch.warm_seconds == pytest.approx(0.6)


def test_an_explanation_that_the_deadline_cuts_short_is_none() -> None:
    """A kernel that is built for it when time is up would cost the finding, and be told as attnfuzz's own fault."""

    def explain(*_: object) -> Explanation:
        raise DeadlinePassed

    judge = judging(scripted(FakeRunner(case_s=0.1).judge), explain=explain, clock=lambda: 0.0)
    assert judge.explain(DECLARATION, CASE, Failure(oracle="accuracy", kind="out:value", message="")) == Explanation()


@pytest.mark.parametrize("starts", [True, False])
def test_an_interpreter_that_cannot_be_started_is_told_and_done_without(starts: bool) -> None:
    """A machine without room for another process would end a search that needs none."""
    complaints: list[str] = []

    def interpret() -> Runner:
        if not starts:
            raise ExecutorUnavailable("no memory")
        return scripted(FakeRunner(case_s=0.1).judge)

    judge = judging(scripted(FakeRunner(case_s=0.1).judge), interpret=interpret, complain=complaints.append)
    assert judge.start_interpreter(DECLARATION) is None  # it does not compile for long
    assert (judge.start_interpreter() is not None) is starts
    assert bool(judge.start_interpreter()) is starts
    assert len(complaints) == (not starts)
