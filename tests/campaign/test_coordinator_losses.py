"""Workers that are lost, and messages between processes that may be."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from attnfuzz.campaign.coordinator import Coordinator
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.messages import (
    Begin,
    Channel,
    ChannelClosed,
    Found,
    FromWorker,
    Setup,
    ToWorker,
    Trouble,
    Unconfirmed,
    Unfinished,
)
from attnfuzz.campaign.request import CampaignRequest
from attnfuzz.campaign.result import FindingEvent, Reporter, Statistics
from attnfuzz.campaign.statistics import WorkerProgress
from attnfuzz.campaign.worker import _await_begin
from attnfuzz.campaign.workers import StartWorker, WorkerProcess
from attnfuzz.identity.bug import Bug
from attnfuzz.isolation.zygote_client import Zygote
from tests.campaign.scripted_workers import KERNEL, Worker, campaign, closes, finds, waits


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
        worker.say(WorkerProgress(kernel=KERNEL.target, cases=1, seconds=0.1))
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
        unfinished = worker.hear(Unfinished)
        assert isinstance(unfinished, Unfinished)
        worker.say(Found(finding="0-1", kernel=unfinished.kernel, case=unfinished.case, failure=unfinished.failure))
        worker.say(Unconfirmed(finding="0-1", runs=3))
        waits(worker)

    result = campaign(tmp_path, script, budget_s=1.0, started=workers)
    (finding,) = result.findings
    assert (len(workers), finding.certainty(), result.unconfirmed) == (2, "flaky: failed 1 of 4 runs", ())


@pytest.mark.parametrize(("devices", "sharing"), [((), 3), (("0", "1"), 2)])
def test_a_worker_knows_how_many_share_its_gpu(tmp_path: Path, devices: tuple[str, ...], sharing: int) -> None:
    """What a kernel leaks may take of a GPU depends on it."""
    workers: list[Worker] = []
    campaign(tmp_path, waits, waits, waits, budget_s=0.5, started=workers, device_ids=devices)
    assert [worker.setup.sharing for worker in workers] == [sharing] * 3


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
    request = CampaignRequest(kernels=(KERNEL.target,), started=now, budget_s=60.0, save_folder=tmp_path)
    result = Coordinator(request, statistics, launch=cast(StartWorker, refused), reporter=Reporter()).run()
    assert result.stop_reason == "environment"
    assert "Resource temporarily unavailable" in result.troubles[0]


def test_a_worker_without_a_thread_to_serve_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit on processes, the campaign would end in a traceback and leave the worker behind."""

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    started: list[int] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self.pid)

    monkeypatch.setattr(threading, "Thread", NoThread)
    monkeypatch.setattr(subprocess, "Popen", Noted)
    setup = Setup(worker=0, num_workers=1, seed=1, kernels=(KERNEL,), deadline=0.0, device="cpu", oracles=())
    with pytest.raises(BlockingIOError, match="can't start new thread"):  # the type of EAGAIN
        WorkerProcess(tmp_path).begin(setup, cast(Zygote, None))
    (pid,) = started
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_output_that_is_gone_does_not_end_the_campaign(tmp_path: Path) -> None:
    """A closed terminal, or a log on a full disk, would lose the night's search."""

    class Gone(Reporter):
        def progress(self, statistics: Statistics) -> None:
            raise OSError(errno.EIO, "Input/output error")

        def finding(self, event: FindingEvent, finding: Finding) -> None:
            raise OSError(errno.EIO if event == "found" else errno.ENOSPC, "Input/output error, no space left")

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


def test_the_other_gpus_go_on_without_one_that_does_not_answer(tmp_path: Path) -> None:
    """One GPU of eight would end the search on all; what its workers had met has to be looked into elsewhere."""
    taken_up: list[Unfinished] = []

    def script(worker: Worker) -> None:
        if worker.setup.device_id == "GPU-dead":
            if worker.setup.worker == 0:
                finds(worker, 9, "0-1", confirm=False)
            worker.say(Trouble(message="GPU-dead does not answer", environment=True, device_lost=True))
            return
        unfinished = worker.hear(Unfinished)
        assert isinstance(unfinished, Unfinished)
        taken_up.append(unfinished)
        waits(worker)

    workers: list[Worker] = []
    devices = ("GPU-dead", "GPU-alive")
    result = campaign(tmp_path, script, script, budget_s=1.0, started=workers, device_ids=devices)
    assert [worker.setup.device_id for worker in workers] == list(devices)
    assert (result.stop_reason, result.troubles, len(taken_up)) == ("budget", ("GPU-dead does not answer",), 1)


def test_when_every_worker_is_lost_again_and_again_the_campaign_ends(tmp_path: Path) -> None:
    """Starting processes that die at once for an hour helps nobody."""
    result = campaign(tmp_path, lambda worker: None, budget_s=60.0)
    assert result.stop_reason == "workers_lost"


Pair = tuple[Channel[ToWorker], Channel[FromWorker]]


@pytest.fixture
def ends() -> Iterator[Pair]:
    worker, coordinator = socket.socketpair()
    with worker, coordinator:
        yield (
            Channel(worker, msgspec.json.Decoder(ToWorker)),
            Channel(coordinator, msgspec.json.Decoder(FromWorker)),
        )


def test_what_comes_before_the_search_begins_is_there_afterwards(ends: Pair) -> None:
    """What a worker is told while it starts, open failures of others above all, would be lost."""
    worker, coordinator = ends
    known = [Bug(kernel="k", oracle="crash", kind=kind, features=frozenset()) for kind in ("a", "b", "c")]
    mail: list[ToWorker] = [known[0]]
    for message in (known[1], Begin(deadline=5.0), known[2]):
        coordinator.send(message)
    assert _await_begin(worker, mail) == Begin(deadline=5.0)
    assert mail == known


def test_a_message_larger_than_the_socket_buffer_arrives_whole(ends: Pair) -> None:
    """A long traceback must not be cut, nor taken for two messages."""
    worker, coordinator = ends
    trouble = Trouble(message="line\n" * 200_000)
    sender = threading.Thread(target=worker.send, args=(trouble,))
    sender.start()
    received: list[FromWorker] = []
    while not received:
        received = coordinator.receive(1.0)
    sender.join()
    assert received == [trouble]


def test_what_was_sent_before_hanging_up_is_still_heard(ends: Pair) -> None:
    """The last words of a worker are its most important ones."""
    worker, coordinator = ends
    progress = WorkerProgress(kernel="k", cases=1, seconds=0.5)
    worker.send(progress)
    worker.close()
    assert coordinator.receive(1.0) == [progress]
    with pytest.raises(ChannelClosed):
        coordinator.receive(1.0)


def test_half_a_message_before_hanging_up_ends_the_channel() -> None:
    """A worker killed in the middle of a message must not keep the coordinator waiting for the rest."""
    mine, other = socket.socketpair()
    with mine, other:
        channel: Channel[FromWorker] = Channel(mine, msgspec.json.Decoder(FromWorker))
        other.sendall(b'{"type":"prog')
        assert channel.receive(1.0) == []
        other.close()
        with pytest.raises(ChannelClosed):
            channel.receive(1.0)


def test_a_side_that_is_not_patient_does_not_wait_for_the_other_to_read() -> None:
    """Two sides that each wait for the other to read would stop the campaign for good."""
    mine, other = socket.socketpair()
    with mine, other:
        busy: Channel[ToWorker] = Channel(other, msgspec.json.Decoder(ToWorker))
        coordinator: Channel[FromWorker] = Channel(mine, msgspec.json.Decoder(FromWorker), patient=False)
        known = Bug(kernel="k" * 100_000, oracle="crash", kind="SIGSEGV", features=frozenset())
        for _ in range(30):
            coordinator.send(known)
        received: list[ToWorker] = []
        while len(received) < 30:
            coordinator.flush()
            received += busy.receive(1.0)
        assert received == [known] * 30
