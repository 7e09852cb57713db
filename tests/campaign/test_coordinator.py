"""attnfuzz.campaign.coordinator: the budget is kept, and workers hear of each other."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import ClassVar, cast

import msgspec
import pytest

from attnfuzz.campaign import coordinator
from attnfuzz.campaign.messages import Begin, Busy, Duplicate, Join, Ready, Smaller, Stop, Trouble
from attnfuzz.campaign.readiness import Readiness
from attnfuzz.campaign.result import Statistics
from attnfuzz.campaign.statistics import WorkerProgress
from attnfuzz.corpus import load_regression
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import Bug
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.supports import Supports
from tests.campaign.scripted_workers import FAILURE, KERNEL, Worker, campaign, closes, finds, raw, waits
from tests.common.named_features import named


def test_progress_of_all_workers_is_added_up(tmp_path: Path) -> None:
    """The number of cases is what makes "nothing found" worth believing."""

    def script(worker: Worker) -> None:
        for _ in range(3):
            worker.say(WorkerProgress(kernel=KERNEL.target, cases=5, seconds=0.1, known=1, max_error_ratio=0.5))
        worker.hear(Stop)
        worker.say(WorkerProgress(kernel=KERNEL.target, cases=1, seconds=0.1, max_error_ratio=0.75))

    result = campaign(tmp_path, script, script, budget_s=0.5)
    kernel = result.statistics.kernels[KERNEL.target]
    assert (kernel.cases, kernel.known, kernel.max_error_ratio) == (32, 6, 0.75)
    assert (result.stop_reason, result.findings) == ("budget", ())


def test_the_budget_is_kept_with_a_worker_that_does_not_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is stuck may cost a little patience, not the night."""
    monkeypatch.setattr(coordinator, "_WAIT_FOR_WORKERS_S", 0.2)

    def stuck(worker: Worker) -> None:
        finds(worker, 9, "0-1", confirm=False)
        worker.hear(Trouble)  # which the coordinator never says

    result = campaign(tmp_path, stuck, budget_s=0.5)
    assert result.stop_reason == "budget"
    assert "seen once" in result.findings[0].certainty()


def test_the_budget_begins_when_a_worker_is_ready(tmp_path: Path) -> None:
    """A few seconds' budget would be spent before the first case, or begin again with every worker that starts."""
    deadlines = []

    def script(worker: Worker) -> None:
        for _ in range(2):
            time.sleep(0.2)
            worker.say(Ready())
            begin = worker.hear(Begin)
            assert isinstance(begin, Begin)
            deadlines.append(begin.deadline)
        waits(worker)

    started: list[Worker] = []
    result = campaign(tmp_path, script, budget_s=0.5, start_up_s=60.0, started=started)
    assert started[0].setup.deadline > deadlines[0] + 30.0
    assert deadlines[0] == deadlines[1] <= time.monotonic()
    assert (result.stop_reason, result.statistics.deadline) == ("budget", deadlines[0])


def test_a_campaign_whose_workers_are_never_ready_ends(tmp_path: Path) -> None:
    """It would wait forever for a clock that nobody starts."""
    result = campaign(tmp_path, waits, budget_s=0.3, start_up_s=0.3)
    assert (result.stop_reason, result.unreached) == ("budget", (KERNEL.target,))


def test_an_error_of_a_worker_is_one_sentence_and_its_traceback_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of traceback in a log is not read, and whoever is to repair it needs all of it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trace = "Traceback (most recent call last):\n  File a.py, line 1\nTypeError: no\n"
    messages = [trace, f"k on {{}} cannot be judged: the service raised in the executor:\n{trace}", "free memory"]

    def script(worker: Worker) -> None:
        for message in (*messages, *messages):
            worker.say(Trouble(message=message))
        waits(worker)

    troubles = campaign(tmp_path, script, budget_s=0.5).troubles
    files = [Path(trouble.partition(" is in ")[2].partition(";")[0].rstrip(")")) for trouble in troubles[:2]]
    assert [file.read_text() for file in files] == [message.rstrip() + "\n" for message in messages[:2]]
    assert list(troubles) == [
        f"attnfuzz itself failed: TypeError: no (the traceback is in {files[0]}; please report it with that file)",
        f"k on {{}} cannot be judged: the service raised in the executor: TypeError: no (all of it is in {files[1]})",
        "free memory",
    ]


class PretendedReadiness:
    """A kernel of which a part is built at first, and all of it once ``is_built``."""

    ready: tuple[Declaration, ...] = ()
    unbuilt: ClassVar = {KERNEL.target: "half of it is built"}

    def __init__(self) -> None:
        self.asking: set[str] = set()
        self.is_built = False
        self.told = 0

    def take(self) -> list[Join]:
        parts = [Join(kernel=KERNEL, built=({"head_size": (16,)},)), Join(kernel=KERNEL)][: 1 + self.is_built]
        news, self.told = parts[self.told :], len(parts)
        return news

    def take_questions(self) -> list[object]:
        return []

    def take_failures(self) -> list[object]:
        return []

    def stop_asking(self) -> dict[str, str]:
        return dict.fromkeys(self.asking, "not all is known")


def test_what_a_users_problem_raises_is_told_apart_from_errors_of_attnfuzz(tmp_path: Path) -> None:
    """A report would call it an internal error."""

    def script(worker: Worker) -> None:
        worker.say(Trouble(message="k cannot be judged: Mine.write raised KeyError", of_problem=True))
        worker.say(Trouble(message="free memory"))
        waits(worker)

    result = campaign(tmp_path, script, budget_s=0.5)
    assert set(result.troubles) - result.of_problems == {"free memory"}


def test_workers_hear_of_what_is_built_whenever_they_start(tmp_path: Path) -> None:
    """A worker that takes a lost one's place would search nothing, or what is not built yet."""
    readiness = PretendedReadiness()
    heard: list[Join | None] = []

    def script(worker: Worker) -> None:
        if worker.setup.kernels:  # the third time
            heard.append(None)
            waits(worker)
            return
        joined = worker.hear(Join)
        assert isinstance(joined, Join)
        heard.append(joined)
        if len(heard) == 2:
            readiness.is_built = True
            assert isinstance(worker.hear(Join), Join)

    result = campaign(tmp_path, script, budget_s=4.0, readiness=cast(Readiness, readiness))
    part = Join(kernel=KERNEL, built=({"head_size": (16,)},))
    assert heard == [part, part, None]
    assert result.unbuilt == {KERNEL.target: "half of it is built"}


class AskedReadiness(PretendedReadiness):
    """A kernel of which it is not known what it takes until `settle`."""

    def __init__(self) -> None:
        super().__init__()
        self.asking = {KERNEL.target}
        least = msgspec.structs.replace(KERNEL, supports=Supports(strides="contiguous"))
        self.joins = [Join(kernel=least, is_settled=False)]

    def settle(self) -> None:
        self.joins.append(Join(kernel=KERNEL))
        self.asking.clear()

    def take(self) -> list[Join]:
        news, self.joins = self.joins, []
        return news


@pytest.mark.parametrize(
    ("budget_s", "late_s", "left_s"),
    [
        (60.0, 0.0, 60.0),
        (60.0, 20.0, 40.0),
        (60.0, 70.0, 20.0),  # or nothing would be searched
        (4.0, 70.0, 4.0),
    ],
)
def test_start_up_that_takes_long_counts(budget_s: float, late_s: float, left_s: float) -> None:
    """On a busy machine a person would wait for the budget, and for as long again before it."""
    now = time.monotonic()
    made = Statistics(
        kernels={},
        started=now,
        deadline=now + 1e3,
        budget_s=budget_s,
        device="cpu",
        device_name="cpu",
        workers=1,
        seed=1,
    )
    made.counts_from = now - late_s
    assert made.remaining_s() == budget_s
    made.begin()
    assert made.deadline == pytest.approx(time.monotonic() + left_s, abs=1.0)


@pytest.mark.parametrize("is_settled", [True, False])
def test_the_budget_waits_a_little_until_it_is_known_what_kernels_take(
    is_settled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short search would end before anything that failed was looked into, or a long one hours late."""
    monkeypatch.setattr(coordinator, "_MOST_LATE_S", 20.0 if is_settled else 0.5)
    readiness = AskedReadiness()
    deadlines: list[float] = []
    started: list[Worker] = []

    def script(worker: Worker) -> None:
        worker.say(Ready())
        begin = worker.hear(Begin)
        assert isinstance(begin, Begin)
        deadlines.append(begin.deadline - time.monotonic())
        time.sleep(0.3)  # longer than the budget
        if is_settled:
            readiness.settle()
            while Join(kernel=KERNEL) not in worker.heard:
                worker.hear(Join)
        waits(worker)

    result = campaign(tmp_path, script, budget_s=0.2, readiness=cast(Readiness, readiness), started=started)
    assert started[0].setup.kernels == ()
    assert deadlines[0] > (20.0 if is_settled else 0.5)
    assert result.stop_reason == "budget"
    assert result.unsettled == ({} if is_settled else {KERNEL.target: "not all is known"})


def test_a_finding_is_followed_to_its_smallest_case(tmp_path: Path) -> None:
    """Found, confirmed, smaller, minimised: what is on disk at the end is the smallest."""

    def script(worker: Worker) -> None:
        finds(worker, 50, "0-1")
        worker.say(Smaller(finding="0-1", case=raw(2), failure=FAILURE))
        closes(worker, "0-1", "seq_len>1")
        waits(worker)

    result = campaign(tmp_path, script, budget_s=0.5)
    (finding,) = result.findings
    assert finding.path is not None
    saved = load_regression(finding.path)
    assert isinstance(saved.case, DenseDecodeCase)
    assert saved.case.seq_lens == (2,)
    assert saved.finding.features == ("seq_len>1",)
    assert result.findings_of(KERNEL.target) == [finding]


def test_workers_hear_what_others_are_at_and_what_they_found(tmp_path: Path) -> None:
    """Otherwise every worker shrinks every bug."""

    def finder(worker: Worker) -> None:
        finds(worker, 9, "0-1")
        closes(worker, "0-1", "ragged")
        waits(worker)

    workers: list[Worker] = []
    result = campaign(tmp_path, finder, waits, budget_s=0.7, started=workers)
    known = Bug(
        kernel=KERNEL.target,
        oracle="accuracy",
        kind="out:value",
        features=named("ragged"),
        finding=result.findings[0].tag,
    )
    busy = Busy(kernel=KERNEL.target, oracle="accuracy", kind="out:value", busy=True)
    assert workers[1].heard == [busy, known, msgspec.structs.replace(busy, busy=False), Stop()]
    assert workers[0].heard == [known, Stop()]


def test_known_failures_of_all_workers_count_for_their_finding(tmp_path: Path) -> None:
    """A report would not tell the bug that most cases meet from one that a single case met."""

    def finder(worker: Worker) -> None:
        finds(worker, 9, "0-1")
        closes(worker, "0-1", "ragged")
        waits(worker)

    def meets_it_again(worker: Worker) -> None:
        known = worker.hear(Bug)
        assert isinstance(known, Bug)
        counts = {known.finding: 4, "": 3}
        worker.say(WorkerProgress(kernel=KERNEL.target, cases=5, seconds=0.1, known=7, known_by_finding=counts))
        waits(worker)

    (finding,) = campaign(tmp_path, finder, meets_it_again, budget_s=0.7).findings
    assert finding.cases_seen == 5


def test_a_duplicate_is_made_known_and_not_reported(tmp_path: Path) -> None:
    """A bug seen through another symptom must be recognised by all workers the next time."""

    def script(worker: Worker) -> None:
        finds(worker, 9, "0-1")
        known = Bug(kernel=KERNEL.target, oracle="accuracy", kind="lse:value", features=frozenset())
        worker.say(Duplicate(finding="0-1", bugs=(known,)))
        waits(worker)

    workers: list[Worker] = []
    result = campaign(tmp_path, script, waits, budget_s=0.5, started=workers)
    assert result.findings == ()
    assert [message.kind for message in workers[1].heard if isinstance(message, Bug)] == ["lse:value"]


def test_fail_fast_ends_at_the_first_minimised_finding(tmp_path: Path) -> None:
    """In a pre-merge check nobody wants to wait for the second bug."""

    def script(worker: Worker) -> None:
        finds(worker, 9, "0-1")
        closes(worker, "0-1")
        waits(worker)

    result = campaign(tmp_path, script, budget_s=60.0, fail_fast=True)
    assert (result.stop_reason, len(result.findings)) == ("fail_fast", 1)


def test_an_environment_that_cannot_run_kernels_ends_the_campaign(tmp_path: Path) -> None:
    """Its one sentence, with the remedy, is all there is to report."""

    def script(worker: Worker) -> None:
        worker.say(Trouble(message="Triton is too old; upgrade it", environment=True))
        waits(worker)

    result = campaign(tmp_path, script, waits, budget_s=60.0)
    assert (result.stop_reason, result.troubles) == ("environment", ("Triton is too old; upgrade it",))


def test_ctrl_c_ends_the_campaign_with_what_it_has(tmp_path: Path) -> None:
    """Whoever interrupts a long search wants to see what it found."""

    def script(worker: Worker) -> None:
        finds(worker, 9, "0-1")
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        worker.hear(Stop)
        closes(worker, "0-1")

    result = campaign(tmp_path, script, budget_s=60.0)
    assert result.stop_reason == "interrupted"
    assert result.findings[0].shrunk_s is not None
    assert len(list(tmp_path.iterdir())) == 1
