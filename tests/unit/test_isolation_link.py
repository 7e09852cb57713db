"""The driver's end of an executor, against a zygote and an executor that are played by the test."""

import os
import select
import signal
import socket
from collections.abc import Iterator

import msgspec
import pytest

from attnfuzz.isolation.link import OUTPUT_TAIL_BYTES, Link, strip_framework_frames
from attnfuzz.isolation.messages import (
    MAX_CONTROL_BYTES,
    MAX_DESCRIPTORS,
    Answer,
    ControlReply,
    ControlRequest,
    ExecutorMessage,
    Exited,
    Fault,
    Fork,
    Forked,
    ForkFailed,
    Hello,
    Signal,
    encode_fork_request,
    encode_frame,
)


class Peer:
    """Zygote and executor in one, with the link that talks to them."""

    def __init__(self) -> None:
        ours, self.control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link = Link(ours, encode_fork_request({"A": "b"}))
        packet, descriptors, _, _ = socket.recv_fds(self.control, MAX_CONTROL_BYTES, MAX_DESCRIPTORS)
        channel, self.output, self.fault_record = descriptors
        self.request: ControlRequest = msgspec.json.decode(packet, type=ControlRequest)
        self.channel = socket.socket(fileno=channel)

    def tell(self, message: ControlReply) -> None:
        self.control.send(msgspec.json.encode(message))

    def say(self, message: ExecutorMessage) -> None:
        self.channel.sendall(encode_frame(msgspec.json.encode(message)))

    def pump(self) -> None:
        """Take in all that has been said."""
        while self.link.pump(0):
            pass

    def close(self) -> None:
        self.link.close()
        self.control.close()
        self.channel.close()
        os.close(self.output)
        os.close(self.fault_record)


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


def test_asks_for_a_fork_with_its_environment(peer: Peer) -> None:
    """The zygote would not know what to start."""
    assert peer.request == Fork({"A": "b"})


def test_learns_the_process_id_and_the_exit_status(peer: Peer) -> None:
    """A death would be noticed only by its silence."""
    peer.tell(Forked(1 << 22))
    peer.tell(Exited(-11))
    peer.pump()
    assert (peer.link.pid, peer.link.exit_status, peer.link.zygote_lost) == (1 << 22, -11, False)


def test_message_sent_before_the_end_is_not_lost(peer: Peer) -> None:
    """A verdict would be replaced by the death that followed it."""
    peer.link.send(b"", 4)
    peer.say(Answer(4, msgspec.Raw(b'"' + b"x" * 100_000 + b'"')))
    os.write(peer.output, b"last words")
    peer.tell(Exited(1))
    peer.pump()
    assert peer.link.exit_status == 1
    assert isinstance(peer.link.next_message(), Answer)
    assert peer.link.output() == "last words"


def test_answers_to_other_requests_are_skipped(peer: Peer) -> None:
    """A late answer would be taken for the one to the latest request."""
    peer.link.send(b"", 2)
    peer.say(Hello(1))
    peer.say(Answer(1, msgspec.Raw(b"1")))
    peer.say(Fault(2, "mine"))
    peer.pump()
    assert [peer.link.next_message() for _ in range(3)] == [Hello(1), Fault(2, "mine"), None]
    assert not peer.link.channel_lost


@pytest.mark.parametrize("garbage", [b"HTTP/1.1 200 OK", encode_frame(b"{}"), encode_frame(b"\xff")])
def test_garbage_is_a_lost_channel(peer: Peer, garbage: bytes) -> None:
    """Stray bytes would raise in the driver, or make it wait for ever."""
    peer.channel.sendall(garbage)
    peer.pump()
    assert peer.link.next_message() is None
    assert peer.link.garbled
    assert peer.link.channel_lost


def test_closed_channel_is_noticed_after_its_messages(peer: Peer) -> None:
    """The last message would be lost, or the end of the channel not seen."""
    peer.say(Hello(1))
    peer.channel.close()
    peer.pump()
    assert peer.link.channel_lost
    assert not peer.link.garbled
    assert peer.link.next_message() == Hello(1)


def test_request_larger_than_the_buffers_is_written_as_it_is_read(peer: Peer) -> None:
    """Sending would block the driver, beyond any time limit."""
    frame = encode_frame(bytes(5_000_000))
    peer.link.send(frame, 1)
    received = 0
    peer.channel.setblocking(False)
    while received < len(frame):
        peer.link.pump(0)
        if select.select([peer.channel], [], [], 0)[0]:
            received += len(peer.channel.recv(1 << 20))
    assert received == len(frame)
    assert not peer.link.pump(0)


def test_sending_to_a_closed_channel_is_harmless(peer: Peer) -> None:
    """The driver would crash with the executor."""
    peer.channel.close()
    peer.link.send(encode_frame(bytes(5_000_000)), 1)
    peer.pump()
    peer.link.send(encode_frame(b"1"), 2)
    assert peer.link.channel_lost


def test_zygote_that_hangs_up_is_lost(peer: Peer) -> None:
    """The driver would wait for an exit status from nobody."""
    peer.control.close()
    peer.pump()
    assert peer.link.zygote_lost
    peer.link.signal(signal.SIGKILL)


def test_failed_fork_is_kept(peer: Peer) -> None:
    """The driver would wait for a process that was never started."""
    peer.tell(ForkFailed("out of processes"))
    peer.pump()
    assert peer.link.fork_error == "out of processes"


def test_signals_go_through_the_zygote(peer: Peer) -> None:
    """A signal could hit a process that took over the executor's ID."""
    peer.link.signal(signal.SIGKILL)
    assert msgspec.json.decode(peer.control.recv(MAX_CONTROL_BYTES), type=ControlRequest) == Signal(9)


def test_output_is_kept_in_bounds_and_forgotten_on_request(peer: Peer) -> None:
    """Output would fill the driver's memory, or be attributed to a later call."""
    for _ in range(40):
        os.write(peer.output, b"y" * 4000 + b"\n")
        peer.pump()
    assert peer.link.output().endswith("yyy\n")
    assert len(peer.link.output()) == OUTPUT_TAIL_BYTES
    peer.link.forget_output()
    assert peer.link.output() == ""


def test_output_that_is_not_text_is_shown(peer: Peer) -> None:
    """Binary output would raise in the driver."""
    os.write(peer.output, b"\xff\x00ok")
    peer.pump()
    assert peer.link.output() == r"\xff\x00ok"


def test_stranger_with_the_executors_old_id_is_spared(peer: Peer) -> None:
    """Without a zygote, a link left alone for long would kill whatever process has that ID by then."""
    peer.tell(Forked(os.getpid()))  # this test is the stranger
    peer.pump()
    peer.link._start_time = 1  # the executor was older
    peer.control.close()
    peer.pump()
    assert peer.link.zygote_lost
    peer.link.close()


def test_oversized_environment_is_refused() -> None:
    """The packet would not fit, and the zygote hang up."""
    with pytest.raises(ValueError, match="environment takes"):
        encode_fork_request({"A": "b" * MAX_CONTROL_BYTES})


STACK = """what the kernel printed
Fatal Python error: Segmentation fault

Current thread 0x00007fa2f58a4b80 (most recent call first):
  File "/home/me/kernels.py", line 5 in launch
  File "/site-packages/attnfuzz/declaration.py", line 9 in run
  File "/site-packages/attnfuzz/isolation/serve.py", line 88 in _answer
  File "/site-packages/attnfuzz/isolation/zygote.py", line 147 in _become_executor
  File "/site-packages/attnfuzz/isolation/zygote.py", line 95 in main
  File "<frozen runpy>", line 88 in _run_code

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""


def test_only_frames_of_the_isolation_layer_are_left_out() -> None:
    """The kernel's frames would drown among the executor's, or be left out with them."""
    assert strip_framework_frames(STACK) == (
        "what the kernel printed\nFatal Python error: Segmentation fault\n\n"
        "Current thread 0x00007fa2f58a4b80 (most recent call first):\n"
        '  File "/home/me/kernels.py", line 5 in launch\n'
        '  File "/site-packages/attnfuzz/declaration.py", line 9 in run\n\n'
    )
