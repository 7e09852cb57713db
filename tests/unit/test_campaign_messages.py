"""attnfuzz.campaign.messages: messages between coordinator and worker arrive whole, in order, or not at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from attnfuzz.campaign.messages import Begin, Channel, ChannelClosed, FromWorker, ToWorker, Trouble
from attnfuzz.campaign.statistics import WorkerProgress
from attnfuzz.campaign.worker import _await_begin
from attnfuzz.identity.bug import Bug

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
