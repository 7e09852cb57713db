"""attnfuzz.campaign.workers: how many there are, how they are started again, and what they borrow."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest

from attnfuzz.campaign.messages import Channel, FromWorker, Ready, Setup
from attnfuzz.campaign.workers import (
    BorrowedZygote,
    LastWords,
    StartWorker,
    WorkerPool,
    WorkerProcess,
    Workers,
    by_formula,
    lend_connection,
)
from attnfuzz.isolation.devices import Gpu
from attnfuzz.isolation.outcomes import ExecutorUnavailable
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.judging.runner import SERVICE
from attnfuzz.oracles.registry import DEFAULT_ORACLES


class Worker:
    """One that never says anything."""

    def __init__(self) -> None:
        mine, self.other = socket.socketpair()
        self.channel: Channel[FromWorker] = Channel(mine, msgspec.json.Decoder(FromWorker), patient=False)

    def end_if_stopped(self) -> None:
        return

    def stop(self) -> None:
        return

    def kill(self, *, grace_s: float = 0.0) -> LastWords:
        self.channel.close()
        self.other.close()
        return LastWords("")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def some_workers(size: int = 1, *, refuse: bool = False) -> tuple[Workers, Clock, list[Setup]]:
    """A workers, its clock and what its workers were started with."""
    setups: list[Setup] = []

    def launch(setup: Setup) -> Worker:
        setups.append(setup)
        if refuse:
            raise OSError("no more processes")
        return Worker()

    def setup_for(number: int, starts: int) -> Setup:
        return Setup(
            worker=number, num_workers=size, seed=starts, kernels=(), deadline=0.0, device="cpu",
            oracles=DEFAULT_ORACLES,
        )  # fmt: skip

    clock = Clock()
    return Workers(size, launch=cast(StartWorker, launch), setup_for=setup_for, clock=clock), clock, setups


def deaths_until_given_up(workers: Workers, clock: Clock, *, killed: bool) -> int:
    for death in range(1, 100):
        clock.now += 100.0
        assert workers.start_due() == [0]
        workers.lose(0)
        if not workers.start_again(0, killed=killed):
            return death
    raise AssertionError("never given up")


@pytest.mark.parametrize(("killed", "deaths"), [(False, 4), (True, 25)])
def test_a_worker_that_gets_nowhere_is_given_up(killed: bool, deaths: int) -> None:
    """It would be started for ever; but whoever kills it may stop, which a bug does not."""
    workers, clock, setups = some_workers()
    assert deaths_until_given_up(workers, clock, killed=killed) == deaths
    assert workers.is_lost
    assert [setup.seed for setup in setups] == list(range(deaths))
    workers.close()


def test_a_worker_that_judges_cases_is_started_again_at_once_and_for_ever() -> None:
    """A campaign of days would slow down and end, if something kills a worker now and then."""
    workers, clock, _ = some_workers()
    for _ in range(50):
        assert workers.start_due() == [0]
        workers.has_judged(0)
        workers.lose(0)
        assert workers.start_again(0)
    assert clock.now == 0.0
    workers.close()


def test_starts_in_vain_are_spread_out() -> None:
    """Starting processes that die at once would take the machine's time from the others."""
    workers, clock, _ = some_workers()
    for _ in range(2):
        workers.start_due()
        workers.lose(0)
        workers.start_again(0)
    assert workers.start_due() == []
    clock.now += 60.0
    assert workers.start_due() == [0]
    workers.close()


def start_for_ever(workers: Workers, clock: Clock) -> None:
    while True:
        clock.now += 100.0
        workers.start_due()


def test_the_system_s_refusal_is_raised_once_nothing_is_left() -> None:
    """A machine out of processes would be waited for without a word."""
    workers, clock, setups = some_workers(size=2, refuse=True)
    with pytest.raises(OSError, match="no more processes"):
        start_for_ever(workers, clock)
    assert len(setups) > 2


def test_one_that_is_given_up_stays_away() -> None:
    """Workers of a GPU that does not answer would come back to it."""
    workers, _, _ = some_workers(size=2)
    assert workers.start_due() == [0, 1]
    assert workers.give_up(0)
    workers.lose(0)
    assert not workers.start_again(0, killed=True)
    assert (workers.working, workers.is_lost) == ([1], False)
    workers.close()
    assert workers.working == []


GIB = 1 << 30
LARGE = Gpu("GPU-a", "large", 80 * GIB, 79 * GIB)


def test_without_a_gpu_every_core_has_a_worker() -> None:
    """Cores would be idle, or shared."""
    assert by_formula(6, ()).workers == 6


def test_gpus_share_the_cores() -> None:
    """Workers of all GPUs together would be more than there are cores."""
    assert by_formula(16, [LARGE] * 4).workers == 16
    assert by_formula(2, [LARGE] * 4).workers == 4, "each GPU has one at least"


def test_a_small_gpu_takes_what_its_memory_holds() -> None:
    """Executors would run out of GPU memory, which looks like a fault of the kernel."""
    assert by_formula(16, [Gpu("0", "small", 8 * GIB, 6 * GIB)]).workers == 4


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote.start("cpu", service=SERVICE) as started:
        yield started


class Lending:
    """Counts connections to a zygote, the first of which can be waited for."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self.lent = 0
        self.has_lent = threading.Event()

    def connect(self) -> socket.socket:
        self.lent += 1
        self.has_lent.set()
        return self._zygote.connect()


def setup(device_id: str = "") -> Setup:
    return Setup(
        worker=0, num_workers=1, seed=1, kernels=(), deadline=time.monotonic() + 60.0, device="cpu",
        oracles=DEFAULT_ORACLES, device_id=device_id,
    )  # fmt: skip


@pytest.mark.parametrize(("device_id", "executors"), [("", 1), ("7", 2)])
def test_warm_worker_goes_on_with_its_executor(device_id: str, executors: int, zygote: Zygote, tmp_path: Path) -> None:
    """CUDA would be started only once kernels are imported, or again; or on another GPU than the worker is to have.
    And kernels would be imported only once they have been elsewhere."""
    lending = Lending(zygote)
    worker = WorkerProcess(tmp_path)
    imported = tmp_path / "imported"
    (kernels := tmp_path / "mine.py").write_text(f"open({str(imported)!r}, 'w').close()\n", encoding="utf-8")
    try:
        worker.warm("", cast(Zygote, lending), [str(kernels)])
        assert lending.has_lent.wait(60.0)
        until = time.monotonic() + 60.0
        while not imported.exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert imported.exists()
        worker.begin(setup(device_id), cast(Zygote, lending))
        assert worker.channel.receive(60.0) == [Ready()]
        assert lending.lent == executors
    finally:
        worker.kill()


def test_workers_are_launched_as_they_were_warmed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On several GPUs, each worker would start CUDA on one and then again on another."""
    warmed: list[tuple[int, str]] = []
    launched: list[int] = []

    class Noted:
        made = 0

        def __init__(self, scratch: Path) -> None:
            self.number, Noted.made = Noted.made, Noted.made + 1

        def warm(self, device_id: str, zygote: Zygote, targets: Sequence[str]) -> None:
            warmed.append((self.number, device_id))

        def begin(self, setup: Setup, zygote: Zygote) -> None:
            launched.append(self.number)

        def kill(self) -> None:
            return

    monkeypatch.setattr("attnfuzz.campaign.workers.WorkerProcess", Noted)
    zygote = cast(Zygote, None)
    with WorkerPool(tmp_path) as pool:
        pool.prepare(4)
        pool.warm(("a", "b"), zygote, ())
        pool.prepare(3)
        for _ in range(3):
            pool.launch(setup(), zygote)
    assert warmed == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
    assert launched == [0, 1, 2]


Pair = tuple[socket.socket, socket.socket]


class PretendedZygote:
    """Hands out one end of a socket pair and keeps the other."""

    def __init__(self, failure: str = "") -> None:
        self.failure = failure
        self.mine: list[socket.socket] = []

    def connect(self) -> socket.socket:
        if self.failure:
            raise ExecutorUnavailable(self.failure)
        mine, other = socket.socketpair()
        self.mine.append(mine)
        return other


@pytest.fixture
def pair() -> Iterator[Pair]:
    coordinator, worker = socket.socketpair()
    with coordinator, worker:
        yield coordinator, worker


def lend(pretended: PretendedZygote, broker: socket.socket) -> threading.Thread:
    thread = threading.Thread(target=lend_connection, args=(cast(Zygote, pretended), broker))
    thread.start()
    return thread


def test_a_borrowed_connection_reaches_the_zygote(pair: Pair) -> None:
    """The descriptor that arrives must be the connection, and the only copy of it."""
    coordinator, worker = pair
    zygote = PretendedZygote()
    thread = lend(zygote, coordinator)
    with BorrowedZygote(worker).connect() as connection, zygote.mine[0] as mine:
        thread.join()
        connection.sendall(b"fork")
        assert mine.recv(16) == b"fork"
        connection.close()
        assert mine.recv(16) == b""


def test_why_there_is_no_connection_is_passed_on(pair: Pair) -> None:
    """The reason names the remedy, and only the coordinator knows it."""
    coordinator, worker = pair
    thread = lend(PretendedZygote("the zygote died 4 times"), coordinator)
    with pytest.raises(ExecutorUnavailable, match="died 4 times"):
        BorrowedZygote(worker).connect()
    thread.join()


def test_a_worker_notices_that_the_coordinator_is_gone(pair: Pair) -> None:
    """It has to end instead of waiting for a connection."""
    coordinator, worker = pair
    coordinator.close()
    with pytest.raises(ExecutorUnavailable):
        BorrowedZygote(worker).connect()


def test_the_coordinator_notices_that_a_worker_is_gone(pair: Pair) -> None:
    """A socket that is always readable would keep the coordinator's loop spinning."""
    coordinator, worker = pair
    worker.close()
    assert not lend_connection(cast(Zygote, PretendedZygote()), coordinator)
