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
from attnfuzz.campaign.judge.journal import Journal
from attnfuzz.corpus import load_regression
from attnfuzz.declaration import Declaration
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.isolation.outcomes import DeadlinePassed, ExecutorUnavailable, ServiceError
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.verdict import Failure, Relations, Timing, Verdict
from tests.unit.scripted_runner import scripted

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

    def judge(
        self,
        declaration: Declaration,
        case: Case,
        *,
        timeout_s: float,
        afresh: bool = False,
        relations: Relations = None,
    ) -> Verdict:
        self.limits.append(timeout_s)
        self.afresh.append(afresh)
        self.now += min(self.case_s, timeout_s)
        return HANG if self.case_s > timeout_s else self.verdict

    def clock(self) -> float:
        return self.now

    def timed(self, *, deadline: float = 1e9, journal: Path | None = None) -> CaseJudge:
        return CaseJudge(
            scripted(self.judge), deadline=deadline, longest_s=10.0, journal=Journal(journal), clock=self.clock
        )


def test_the_limit_shrinks_once_cases_have_passed() -> None:
    """With ten seconds for every hanging case, few of them fit into a minute."""
    runner = FakeRunner(case_s=0.25)
    judge = runner.timed()
    for _ in range(11):
        judge(DECLARATION, CASE)
    judge(DECLARATION, CASE, patience="longest")
    assert runner.limits[:10] == [10.0] * 10
    assert runner.limits[10:] == [5.0, 10.0]


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

    def judge(
        declaration: Declaration, case: Case, *, timeout_s: float, afresh: bool = False, relations: Relations = None
    ) -> Verdict:
        raise ServiceError("an oracle divided by zero")

    timed = CaseJudge(scripted(judge), deadline=1e12, longest_s=10.0, journal=Journal(None), complain=complaints.append)
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

    def judge(
        declaration: Declaration, case: Case, *, timeout_s: float, afresh: bool = False, relations: Relations = None
    ) -> Verdict:
        seen.append(load_regression(path).case)
        return Verdict()

    CaseJudge(scripted(judge), deadline=1e12, longest_s=10.0, journal=Journal(path))(DECLARATION, CASE, afresh=True)
    assert seen == [CASE]


def test_the_first_case_of_a_format_in_a_process_may_compile() -> None:
    """A kernel whose compiler runs in its own process would be killed in it, once it has run anything else."""
    runner, process = FakeRunner(case_s=0.01), [1]
    judge = CaseJudge(
        scripted(runner.judge, pid=lambda: process[0]),
        deadline=1e9,
        longest_s=10.0,
        journal=Journal(None),
        clock=runner.clock,
    )
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


def test_a_build_that_the_deadline_ends_is_no_hang() -> None:
    """The last case of a campaign would be accused for being compiled too late."""

    def judge(
        declaration: Declaration, case: Case, *, timeout_s: float, afresh: bool = False, relations: Relations = None
    ) -> Verdict:
        raise DeadlinePassed

    with pytest.raises(OutOfTime):
        CaseJudge(scripted(judge), deadline=1e12, longest_s=10.0, journal=Journal(None))(DECLARATION, CASE)


class FakeBatches:
    """Judges batches as ``outcome`` says, which takes ``batch_s`` on its own clock."""

    def __init__(self, outcome: Callable[[], Sequence[Verdict] | None], *, batch_s: float = 0.0) -> None:
        self.now = 0.0
        self.outcome = outcome
        self.batch_s = batch_s
        self.limits: list[float] = []

    def judge(self, declaration: Declaration, case: Case, *, timeout_s: float, **how: Any) -> Verdict:
        self.limits.append(timeout_s)
        return Verdict()

    def together(
        self, declaration: Declaration, cases: Sequence[Case], *, timeout_s: float, relations: Relations = None
    ) -> Sequence[Verdict] | None:
        self.limits.append(timeout_s)
        self.now += self.batch_s
        return self.outcome()

    def timed(
        self,
        *,
        deadline: float = 1e9,
        journal: Path | None = None,
        complain: Callable[[str], None] = lambda text: None,
    ) -> CaseJudge:
        return CaseJudge(
            scripted(self.judge, together=self.together),
            deadline=deadline,
            longest_s=10.0,
            journal=Journal(journal),
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


def test_the_first_cases_have_the_longest_time() -> None:
    """The first case of a kernel may compile it; calling that a hang would be a false alarm."""
    timeout = AdaptiveTimeout(60.0)
    for _ in range(9):
        timeout.record(0.01)
    assert timeout.limit_s() == 60.0


def test_later_cases_have_twenty_times_the_slowest() -> None:
    """With the full time for each of many hanging cases, a kernel that hangs would use up the budget."""
    timeout = AdaptiveTimeout(60.0)
    for seconds in (0.5, *[0.01] * 9):
        timeout.record(seconds)
    assert timeout.limit_s() == 10.0
    assert timeout.limit_s(short=True) == 3.0


def test_the_limit_stays_within_its_ends() -> None:
    """A limit of milliseconds would take any hiccup of the machine for a hang; one beyond the longest is no limit."""
    fast, slow = AdaptiveTimeout(10.0), AdaptiveTimeout(10.0)
    for _ in range(10):
        fast.record(0.001)
        slow.record(3.0)
    assert fast.limit_s() == 2.0
    assert fast.limit_s(short=True) == 0.5
    assert slow.limit_s() == 10.0


def test_a_hang_is_certain_well_before_the_longest_time() -> None:
    """On a GPU, where the first case may compile for a minute, each hang would take minutes to look into."""
    gpu, cpu = AdaptiveTimeout(60.0), AdaptiveTimeout(10.0)
    assert gpu.certain_s == 60.0
    for timeout in (gpu, cpu):
        timeout.record(0.1, cases=10)
    assert gpu.certain_s == cpu.certain_s == 10.0
    gpu.record(2.0)
    assert gpu.certain_s == 40.0


def test_a_batch_may_take_as_long_as_all_of_its_cases_may() -> None:
    """The limit of a single case would call every large batch a hang."""
    timeout = AdaptiveTimeout(longest_s=10.0)
    timeout.record(0.25, cases=10)
    assert timeout.limit_s() == 5.0
    assert timeout.batch_limit_s(9) == 7.0


def test_a_batch_does_not_wait_for_what_hangs_in_it_as_long_as_a_case() -> None:
    """It is suspected of nothing: each of its cases is judged alone then, and waited for once more."""
    timeout = AdaptiveTimeout(longest_s=10.0)
    timeout.record(0.01)
    assert timeout.limit_s() == 10.0
    assert timeout.batch_limit_s(11) == 2.6


def test_the_first_case_of_a_format_has_a_patience_of_its_own() -> None:
    """A kernel that compiles within its own process would be killed half way, and accused of a hang."""
    timeout = AdaptiveTimeout(60.0)
    timeout.record(0.01, cases=100)
    assert (timeout.limit_s(), timeout.limit_s(first=True)) == (2.0, 60.0)
    for _ in range(10):
        timeout.record(1.5, first=True)
    assert (timeout.limit_s(), timeout.limit_s(first=True)) == (2.0, 30.0)
    assert timeout.certain_s == 30.0  # in a fresh process, where every format is new


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


def test_a_batch_that_was_not_collected_is_not_overwritten() -> None:
    """Its verdicts, findings among them, would be lost without a trace."""
    pipeline = Pipeline(content)
    pipeline.submit(BATCHED, CASES)
    with pytest.raises(RuntimeError, match="collect"):
        pipeline.submit(BATCHED, CASES)


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

    judge = CaseJudge(
        scripted(FakeRunner(case_s=0.1).judge), deadline=1e9, longest_s=10.0, journal=Journal(None), explain=explain,
        clock=lambda: 0.0,
    )  # fmt: skip
    assert judge.explain(DECLARATION, CASE, Failure(oracle="accuracy", kind="out:value", message="")) == Explanation()


@pytest.mark.parametrize("starts", [True, False])
def test_an_interpreter_that_cannot_be_started_is_told_and_done_without(starts: bool) -> None:
    """A machine without room for another process would end a search that needs none."""
    complaints: list[str] = []

    def interpret() -> Runner:
        if not starts:
            raise ExecutorUnavailable("no memory")
        return scripted(FakeRunner(case_s=0.1).judge)

    judge = CaseJudge(
        scripted(FakeRunner(case_s=0.1).judge),
        deadline=1e12,
        longest_s=10.0,
        journal=Journal(None),
        interpret=interpret,
        complain=complaints.append,
    )
    assert judge.start_interpreter(DECLARATION) is None  # it does not compile for long
    assert (judge.start_interpreter() is not None) is starts
    assert bool(judge.start_interpreter()) is starts
    assert len(complaints) == (not starts)
