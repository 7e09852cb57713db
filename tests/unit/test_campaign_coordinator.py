"""attnfuzz.campaign.coordinator: the budget is kept, workers hear of each other, and losing one loses nothing."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from attnfuzz.campaign.channel import Channel, ChannelClosed
from attnfuzz.campaign.coordinator import Coordinator, Plan
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.messages import (
    Busy,
    Confirmed,
    Duplicate,
    Found,
    FromWorker,
    Known,
    Minimised,
    Progress,
    Pursue,
    Setup,
    Smaller,
    Stop,
    ToWorker,
    Trouble,
    Unconfirmed,
)
from attnfuzz.campaign.reporter import Reporter, SilentReporter
from attnfuzz.campaign.result import CampaignResult, Statistics
from attnfuzz.campaign.worker_process import LastWords
from attnfuzz.corpus import load_regression
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import DEFAULT_ORACLES, Failure
from attnfuzz.problems.cases import DenseDecodeCase, encode_case

KERNEL = Declaration(name="k", problem="dense_decode", target="kernels.py:k")
FAILURE = Failure(oracle="accuracy", kind="out:value", message="wrong")
SHOWN_AS = (("accuracy", "out:value"),)


def raw(seq_len: int) -> msgspec.Raw:
    case = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(seq_len,), scale=0.25)
    return msgspec.Raw(encode_case(case))


class Worker:
    """A worker in a thread, which plays ``script`` and then hangs up."""

    def __init__(self, setup: Setup, script: Callable[[Worker], None]) -> None:
        self.setup = setup
        self.killed_by: str | None = None
        self.heard: list[ToWorker] = []
        mine, other = socket.socketpair()
        self._socket = mine
        self.channel: Channel[FromWorker] = Channel(other, msgspec.json.Decoder(FromWorker))
        self._channel: Channel[ToWorker] = Channel(mine, msgspec.json.Decoder(ToWorker))
        self._thread = threading.Thread(target=self._play, args=(script,))
        self._thread.start()

    def _play(self, script: Callable[[Worker], None]) -> None:
        try:
            script(self)
        except ChannelClosed:  # killed
            pass
        finally:
            self._socket.close()

    def say(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self._channel.send(message)

    def hear(self, kind: type[msgspec.Struct]) -> msgspec.Struct:
        """Wait for a message of ``kind``."""
        while True:
            for message in (received := self._channel.receive(10.0)):
                self.heard.append(message)
            for message in received:
                if isinstance(message, kind):
                    return message

    def stop(self) -> None:
        try:
            self.channel.send(Stop())
        except ChannelClosed:  # ended by itself
            return

    def kill(self, *, grace_s: float = 0.0) -> LastWords:
        self._socket.shutdown(socket.SHUT_RDWR) if self._socket.fileno() >= 0 else None
        self._thread.join(10.0)
        self.channel.close()
        return LastWords("last words", self.killed_by)


def campaign(
    folder: Path,
    *scripts: Callable[[Worker], None],
    budget_s: float = 10.0,
    fail_fast: bool = False,
    started: list[Worker] | None = None,
    reporter: Reporter | None = None,
    device_ids: tuple[str, ...] = (),
) -> CampaignResult:
    now = time.monotonic()
    statistics = Statistics(
        kernels=Statistics.of_kernels([KERNEL]),
        started=now,
        deadline=now + budget_s,
        device="cpu",
        device_name="cpu",
        workers=len(scripts),
        seed=7,
    )
    plan = Plan(
        statistics=statistics, oracles=DEFAULT_ORACLES, save_folder=folder, fail_fast=fail_fast, device_ids=device_ids
    )

    def launch(setup: Setup) -> Worker:
        worker = Worker(setup, scripts[setup.worker])
        if started is not None:
            started.append(worker)
        return worker

    return Coordinator(plan, launch=launch, reporter=reporter or SilentReporter()).run()


def finds(worker: Worker, seq_len: int, name: str, *, confirm: bool = True) -> None:
    worker.say(Found(finding=name, kernel=KERNEL.target, case=raw(seq_len), failure=FAILURE))
    if confirm:
        worker.say(Confirmed(finding=name, failed=3, runs=3))


def closes(worker: Worker, name: str, *features: str) -> None:
    worker.say(Minimised(finding=name, features=frozenset(features), shown_as=SHOWN_AS, complete=True))


def waits(worker: Worker) -> None:
    worker.hear(Stop)


def test_progress_of_all_workers_is_added_up(tmp_path: Path) -> None:
    """The number of cases is what makes "nothing found" worth believing."""

    def script(worker: Worker) -> None:
        for _ in range(3):
            worker.say(Progress(kernel=KERNEL.target, cases=5, seconds=0.1, known=1, max_error_ratio=0.5))
        worker.hear(Stop)
        worker.say(Progress(kernel=KERNEL.target, cases=1, seconds=0.1, max_error_ratio=0.75))

    result = campaign(tmp_path, script, script, budget_s=0.5)
    kernel = result.statistics.kernels[KERNEL.target]
    assert (kernel.cases, kernel.known, kernel.max_error_ratio) == (32, 6, 0.75)
    assert (result.stop_reason, result.findings) == ("budget", ())


def test_the_budget_is_kept_with_a_worker_that_does_not_stop(tmp_path: Path) -> None:
    """A worker that is stuck may cost three seconds of patience, not the night."""

    def stuck(worker: Worker) -> None:
        finds(worker, 9, "0-1", confirm=False)
        worker.hear(Trouble)  # which the coordinator never says

    started = time.monotonic()
    result = campaign(tmp_path, stuck, budget_s=0.5)
    assert 3.0 < time.monotonic() - started < 5.0
    assert result.stop_reason == "budget"
    assert "seen once" in result.findings[0].certainty()


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
    campaign(tmp_path, finder, waits, budget_s=0.7, started=workers)
    known = Known(kernel=KERNEL.target, oracle="accuracy", kind="out:value", features=frozenset({"ragged"}))
    busy = Busy(kernel=KERNEL.target, oracle="accuracy", kind="out:value", busy=True)
    assert workers[1].heard == [busy, known, msgspec.structs.replace(busy, busy=False), Stop()]
    assert workers[0].heard == [known, Stop()]


def test_a_duplicate_is_made_known_and_not_reported(tmp_path: Path) -> None:
    """A bug seen through another symptom must be recognised by all workers the next time."""

    def script(worker: Worker) -> None:
        finds(worker, 9, "0-1")
        worker.say(Duplicate(finding="0-1", features=frozenset(), shown_as=(("accuracy", "lse:value"),)))
        waits(worker)

    workers: list[Worker] = []
    result = campaign(tmp_path, script, waits, budget_s=0.5, started=workers)
    assert result.findings == ()
    assert [message.kind for message in workers[1].heard if isinstance(message, Known)] == ["lse:value"]


def test_fail_fast_ends_at_the_first_minimised_finding(tmp_path: Path) -> None:
    """In a pre-merge check nobody wants to wait for the second bug."""

    def script(worker: Worker) -> None:
        finds(worker, 9, "0-1")
        closes(worker, "0-1")
        waits(worker)

    result = campaign(tmp_path, script, budget_s=60.0, fail_fast=True)
    assert (result.stop_reason, len(result.findings)) == ("fail_fast", 1)
    assert result.elapsed_s < 10.0


def test_a_lost_worker_is_replaced_and_its_finding_kept(tmp_path: Path) -> None:
    """A worker killed for its memory must not take what it found along, nor halve the search."""
    workers: list[Worker] = []

    def script(worker: Worker) -> None:
        if len(workers) == 0:  # the first of them, not yet noted
            finds(worker, 9, "0-1")
        else:
            waits(worker)

    result = campaign(tmp_path, script, budget_s=1.0, started=workers)
    assert len(workers) == 2
    assert workers[0].setup.seed != workers[1].setup.seed
    assert len(result.findings) == 1
    assert any("last words" in trouble for trouble in result.troubles)


def test_a_worker_that_is_killed_again_and_again_is_started_again(tmp_path: Path) -> None:
    """A campaign of days would run out of workers, one by one, and report errors that are not its own."""
    workers: list[Worker] = []

    def script(worker: Worker) -> None:
        worker.say(Progress(kernel=KERNEL.target, cases=1, seconds=0.1))
        if worker.setup.seed >> 32 < 9:  # the number of starts before this one
            worker.killed_by = "SIGKILL"
        else:
            finds(worker, 9, "0-1")
            closes(worker, "0-1")
            waits(worker)

    result = campaign(tmp_path, script, budget_s=60.0, fail_fast=True, started=workers)
    assert len(workers) == 10
    assert (result.stop_reason, result.troubles) == ("fail_fast", ())


def test_what_a_killed_worker_was_looking_into_is_looked_into_by_another(tmp_path: Path) -> None:
    """A failure that was never confirmed would be reported as a finding, or one that was would never be shrunk."""
    workers: list[Worker] = []

    def script(worker: Worker) -> None:
        if len(workers) == 0:
            finds(worker, 9, "0-1", confirm=False)
            worker.killed_by = "SIGKILL"
            return
        pursue = worker.hear(Pursue)
        assert isinstance(pursue, Pursue)
        worker.say(Found(finding="0-1", kernel=pursue.kernel, case=pursue.case, failure=pursue.failure))
        worker.say(Unconfirmed(finding="0-1", runs=3))
        waits(worker)

    result = campaign(tmp_path, script, budget_s=1.0, started=workers)
    assert (len(workers), result.findings, len(result.unconfirmed)) == (2, (), 1)


def test_what_nobody_was_left_to_look_into_is_reported(tmp_path: Path) -> None:
    """A failure that takes every worker with it is the last that should get lost."""

    def script(worker: Worker) -> None:
        finds(worker, 9, f"0-{worker.setup.seed}", confirm=False)

    result = campaign(tmp_path, script, budget_s=60.0)
    assert result.stop_reason == "workers_lost"
    (finding,) = result.findings
    assert "seen once" in finding.certainty()
    assert finding.path is not None


def test_a_system_without_processes_ends_the_campaign_with_a_sentence(tmp_path: Path) -> None:
    """A traceback would be all that a user sees of a machine that is out of memory."""

    def refused(setup: Setup) -> Worker:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    now = time.monotonic()
    statistics = Statistics(
        kernels=Statistics.of_kernels([KERNEL]), started=now, deadline=now + 60, device="cpu", device_name="cpu",
        workers=2, seed=7,
    )  # fmt: skip
    plan = Plan(statistics=statistics, oracles=DEFAULT_ORACLES, save_folder=tmp_path)
    result = Coordinator(plan, launch=refused, reporter=SilentReporter()).run()
    assert result.stop_reason == "environment"
    assert "Resource temporarily unavailable" in result.troubles[0]


def test_output_that_is_gone_does_not_end_the_campaign(tmp_path: Path) -> None:
    """A closed terminal, or a log on a full disk, would lose the night's search."""

    class Gone(SilentReporter):
        def progress(self, statistics: Statistics) -> None:
            raise OSError(errno.EIO, "Input/output error")

        def found(self, finding: Finding) -> None:
            raise OSError(errno.EIO, "Input/output error")

        def shrunk(self, finding: Finding) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    def script(worker: Worker) -> None:
        finds(worker, 9, "0-1")
        closes(worker, "0-1")
        waits(worker)

    result = campaign(tmp_path, script, budget_s=0.5, reporter=Gone())
    assert (result.stop_reason, len(result.findings)) == ("budget", 1)


def test_workers_on_a_gpu_that_does_not_answer_are_ended(tmp_path: Path) -> None:
    """They would wait for it, one case after the other, until the budget is spent."""

    def script(worker: Worker) -> None:
        worker.say(Trouble(message="GPU 0 does not answer", environment=True, device_lost=True))

    result = campaign(tmp_path, script, waits, budget_s=60.0)
    assert (result.stop_reason, result.troubles) == ("environment", ("GPU 0 does not answer",))
    assert result.elapsed_s < 10.0


def test_the_other_gpus_go_on_without_one_that_does_not_answer(tmp_path: Path) -> None:
    """One GPU of eight would end the search on all; what its workers had met has to be looked into elsewhere."""
    pursued: list[Pursue] = []

    def script(worker: Worker) -> None:
        if worker.setup.device_id == "GPU-dead":
            if worker.setup.worker == 0:
                finds(worker, 9, "0-1", confirm=False)
            worker.say(Trouble(message="GPU-dead does not answer", environment=True, device_lost=True))
            return
        pursue = worker.hear(Pursue)
        assert isinstance(pursue, Pursue)
        pursued.append(pursue)
        waits(worker)

    workers: list[Worker] = []
    devices = ("GPU-dead", "GPU-alive")
    result = campaign(tmp_path, script, script, budget_s=1.0, started=workers, device_ids=devices)
    assert [worker.setup.device_id for worker in workers] == list(devices)
    assert (result.stop_reason, result.troubles, len(pursued)) == ("budget", ("GPU-dead does not answer",), 1)


def test_when_every_worker_is_lost_again_and_again_the_campaign_ends(tmp_path: Path) -> None:
    """Starting processes that die at once for an hour helps nobody."""
    result = campaign(tmp_path, lambda worker: None, budget_s=60.0)
    assert result.stop_reason == "workers_lost"
    assert result.elapsed_s < 10.0


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
