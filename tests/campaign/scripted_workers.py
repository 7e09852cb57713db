"""Workers of a coordinator that play a script in a thread, and campaigns of such workers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from attnfuzz.campaign.coordinator import Coordinator
from attnfuzz.campaign.messages import (
    Channel,
    ChannelClosed,
    Confirmed,
    Found,
    FromWorker,
    Minimised,
    Setup,
    Stop,
    ToWorker,
)
from attnfuzz.campaign.readiness import Readiness
from attnfuzz.campaign.request import CampaignRequest
from attnfuzz.campaign.result import CampaignResult, Reporter, Statistics
from attnfuzz.campaign.workers import LastWords, StartWorker
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import Bug
from attnfuzz.problems.cases import DenseDecodeCase, encode_case
from attnfuzz.verdict import Failure
from tests.common.named_features import named

KERNEL = Declaration(name="k", problem="dense_decode", target="kernels.py:k")
FAILURE = Failure(oracle="accuracy", kind="out:value", message="wrong")


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

    def end_if_stopped(self) -> None:
        return

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
    start_up_s: float = 0.0,
    fail_fast: bool = False,
    started: list[Worker] | None = None,
    reporter: Reporter | None = None,
    device_ids: tuple[str, ...] = (),
    readiness: Readiness | None = None,
) -> CampaignResult:
    now = time.monotonic()
    statistics = Statistics(
        kernels=Statistics.of_kernels([KERNEL]),
        started=now,
        deadline=now + start_up_s + budget_s,
        budget_s=budget_s,
        device="cpu",
        device_name="cpu",
        workers=len(scripts),
        seed=7,
    )
    request = CampaignRequest(
        kernels=(KERNEL.target,), started=now, budget_s=budget_s, save_folder=folder, fail_fast=fail_fast
    )

    def launch(setup: Setup) -> Worker:
        worker = Worker(setup, scripts[setup.worker])
        if started is not None:
            started.append(worker)
        return worker

    coordinator = Coordinator(
        request,
        statistics,
        launch=cast(StartWorker, launch),
        reporter=reporter or Reporter(),
        readiness=readiness,
        device_ids=device_ids,
    )
    return coordinator.run()


def finds(worker: Worker, seq_len: int, name: str, *, confirm: bool = True) -> None:
    worker.say(Found(finding=name, kernel=KERNEL.target, case=raw(seq_len), failure=FAILURE))
    if confirm:
        worker.say(Confirmed(finding=name, failed=3, runs=3))


def closes(worker: Worker, name: str, *features: str) -> None:
    known = Bug(kernel=KERNEL.target, oracle="accuracy", kind="out:value", features=named(*features))
    worker.say(Minimised(finding=name, features=known.features, bugs=(known,), complete=True))


def waits(worker: Worker) -> None:
    worker.hear(Stop)
