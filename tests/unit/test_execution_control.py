"""A driver's connection as the zygote holds it."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator

import msgspec
import pytest

from attnfuzz.execution.control import ControlConnection
from attnfuzz.execution.messages import Exited, Fork, Signal


@pytest.fixture
def ends() -> Iterator[tuple[ControlConnection, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = ControlConnection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


def test_messages_and_descriptors_arrive_together(ends: tuple[ControlConnection, socket.socket]) -> None:
    """An executor would be forked without its channel, or programs it starts would inherit it."""
    connection, driver = ends
    socket.send_fds(driver, [msgspec.json.encode(Fork({}))], [driver.fileno()])
    request, (descriptor,) = connection.receive()
    assert request == Fork({})
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_nonsense_and_hanging_up_are_no_message(ends: tuple[ControlConnection, socket.socket]) -> None:
    """One bad driver would end the zygote of all."""
    connection, driver = ends
    driver.send(b"nonsense")
    assert connection.receive() == (None, [])
    driver.close()
    assert connection.receive() == (None, [])
    connection.send(Exited(0))


def test_signal_without_executor_hits_nobody(ends: tuple[ControlConnection, socket.socket]) -> None:
    """A signal that crossed the executor's end could hit its successor in the process table."""
    connection, driver = ends
    driver.send(msgspec.json.encode(Signal(9)))
    assert connection.receive() == (Signal(9), [])
    connection.signal_executor(signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signal_reaches_the_executor(ends: tuple[ControlConnection, socket.socket], number: int) -> None:
    """A hanging executor could not be asked for its stack, or killed."""
    connection, _ = ends
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as process:
        connection.pid = process.pid
        connection.signal_executor(number)
        assert process.wait() == -number
