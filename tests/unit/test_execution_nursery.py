"""The zygote's event loop against drivers that do not keep to the protocol."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from attnfuzz.execution import Executor, Reply, Zygote
from attnfuzz.execution.fault_record import new_record
from attnfuzz.execution.framing import receive_frame
from attnfuzz.execution.messages import MAX_CONTROL_BYTES, ControlReply, Exited, Forked, Signal, encode_fork_request
from attnfuzz.execution.process import child_pids

SERVICES = Path(__file__).with_name("execution_services.py")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote.start(service=f"{SERVICES}:Rogue", preload=()) as started:
        yield started


def hear(control: socket.socket) -> ControlReply:
    control.settimeout(10)
    message: ControlReply = msgspec.json.decode(control.recv(MAX_CONTROL_BYTES), type=ControlReply)
    return message


@pytest.mark.parametrize("message", [b"nonsense", b"{}", encode_fork_request({}), b'{"type":"fork"}'])
def test_driver_that_talks_nonsense_is_dropped_alone(zygote: Zygote, message: bytes) -> None:
    """One driver's mistake, a request to fork without a channel among them, would end every other's executors."""
    with Executor(zygote) as executor, zygote.connect() as control:
        pid = executor.pid
        control.settimeout(10)
        control.send(message)
        assert control.recv(MAX_CONTROL_BYTES) == b""
        assert executor.call("pid", b"null", timeout_s=20) == Reply(str(pid).encode())


def test_driver_that_hangs_up_before_asking_is_forgotten(zygote: Zygote) -> None:
    """Connections that come to nothing would pile up in the zygote."""
    folder = Path(f"/proc/{zygote.pid}/fd")
    before = len(list(folder.iterdir()))
    for _ in range(10):
        zygote.connect().close()
    deadline = time.monotonic() + 10
    while len(list(folder.iterdir())) > before:
        assert time.monotonic() < deadline, "the zygote keeps descriptors of connections that are closed"
        time.sleep(0.005)


@pytest.fixture
def raw(zygote: Zygote) -> Iterator[tuple[socket.socket, socket.socket, list[int]]]:
    """A control connection, the driver's end of a channel, and the executor's descriptors."""
    channel, executor_end = socket.socketpair()
    reader, writer = os.pipe()
    record = new_record()
    assert record is not None
    with zygote.connect() as control, channel, executor_end:
        yield control, channel, [executor_end.fileno(), writer, record]
    for descriptor in (reader, writer, record):
        os.close(descriptor)


def test_second_fork_on_one_connection_is_refused(
    zygote: Zygote, raw: tuple[socket.socket, socket.socket, list[int]]
) -> None:
    """The first executor would be forgotten, and run for ever."""
    control, _, descriptors = raw
    for _ in range(2):
        socket.send_fds(control, [encode_fork_request({})], descriptors)
    forked = hear(control)
    assert isinstance(forked, Forked)
    assert control.recv(MAX_CONTROL_BYTES) == b""
    deadline = time.monotonic() + 10
    while forked.pid in child_pids(zygote.pid):
        assert time.monotonic() < deadline, "the first executor is still there"
        time.sleep(0.005)


def test_exit_status_is_sent_and_a_signal_that_crosses_it_is_harmless(
    zygote: Zygote, raw: tuple[socket.socket, socket.socket, list[int]]
) -> None:
    """A kill that comes too late would hit another process, or the status would be lost with the connection."""
    control, channel, descriptors = raw
    socket.send_fds(control, [encode_fork_request({})], descriptors)
    forked = hear(control)
    assert isinstance(forked, Forked)
    assert receive_frame(channel) is not None
    os.kill(forked.pid, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while forked.pid in child_pids(zygote.pid):  # until the zygote has collected it
        assert time.monotonic() < deadline, "the executor is still there"
        time.sleep(0.005)
    control.send(msgspec.json.encode(Signal(signal.SIGKILL)))
    assert hear(control) == Exited(-signal.SIGTERM)
    with Executor(zygote) as executor:
        assert executor.call("echo", b"1", timeout_s=20) == Reply(b"1")
