"""attnfuzz.campaign.workers: workers borrow connections to the coordinator's zygote."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import cast

import pytest

from attnfuzz.campaign.workers import BorrowedZygote, lend_connection
from attnfuzz.isolation.outcomes import ExecutorUnavailable
from attnfuzz.isolation.zygote_client import Zygote

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
