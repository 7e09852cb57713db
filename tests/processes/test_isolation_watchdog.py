"""Judging an executor by what its link knows. How real executors die is in test_isolation_executor.py."""

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnfuzz.isolation import executor as watchdog
from attnfuzz.isolation.executor import ZygoteLostError, await_message
from attnfuzz.isolation.link import Link, strip_framework_frames
from attnfuzz.isolation.messages import (
    MAX_CONTROL_BYTES,
    MAX_DESCRIPTORS,
    ControlReply,
    Exited,
    Forked,
    ForkFailed,
    FrameDecoder,
    FrameError,
    Hello,
    Progress,
    encode_fork_request,
    encode_frame,
)
from attnfuzz.isolation.outcomes import Died, ExecutorUnavailable, TimedOut


class Peer:
    """A zygote and an executor, played by the test."""

    def __init__(self) -> None:
        ours, self.control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link = Link(ours, encode_fork_request({}))
        _, descriptors, _, _ = socket.recv_fds(self.control, MAX_CONTROL_BYTES, MAX_DESCRIPTORS)
        self.channel, self.output, self.fault_record = socket.socket(fileno=descriptors[0]), *descriptors[1:]

    def tell(self, message: ControlReply) -> None:
        self.control.send(msgspec.json.encode(message))

    def close(self) -> None:
        for end in (self.link, self.control, self.channel):
            end.close()
        os.close(self.output)
        os.close(self.fault_record)


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


def test_failed_fork_is_an_error_with_its_cause(peer: Peer) -> None:
    """A machine out of processes would look like a kernel that crashes."""
    peer.tell(ForkFailed("Resource temporarily unavailable"))
    with pytest.raises(ExecutorUnavailable, match="Resource temporarily unavailable"):
        await_message(peer.link, 5, None)


def test_death_of_the_zygote_is_not_the_kernels(peer: Peer) -> None:
    """A kernel would be blamed for the death of the process that forked it."""
    peer.channel.close()  # as the executor dies with the zygote, it may well be seen first
    peer.control.close()
    with pytest.raises(ZygoteLostError):
        await_message(peer.link, 5, None)


def test_message_counts_more_than_the_death_after_it(peer: Peer) -> None:
    """A verdict would be lost to a crash on the way out."""
    peer.channel.sendall(encode_frame(msgspec.json.encode(Hello(1))))
    peer.tell(Exited(-11))
    assert await_message(peer.link, 5, None) == Hello(1)
    assert await_message(peer.link, 5, None) == Died(-11, "SIGSEGV", "", "signal")


def test_answer_that_lies_ready_when_time_is_up_counts(peer: Peer) -> None:
    """On a busy machine a driver that was not scheduled would report hangs."""
    peer.channel.sendall(encode_frame(msgspec.json.encode(Hello(1))))
    assert await_message(peer.link, 1e-9, None) == Hello(1)


def test_closed_channel_takes_its_reason_from_the_exit_that_follows(peer: Peer) -> None:
    """Every crash would be reported as a lost channel: that is what a dying process loses first."""
    peer.channel.close()
    peer.link.pump(1)
    assert peer.link.channel_lost
    peer.tell(Exited(-6))
    assert await_message(peer.link, 5, None) == Died(-6, "SIGABRT", "", "signal")


def test_memory_of_a_process_that_is_gone_is_no_reason(peer: Peer) -> None:
    """The watchdog would raise when a process dies while it is being measured."""
    peer.tell(Forked(1 << 22))
    peer.tell(Exited(0))
    assert await_message(peer.link, 5, 1) == Died(0, None, "", "exit")


@pytest.fixture
def unkillable(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """One that says nothing, and is given up at once when its time is over."""
    monkeypatch.setattr(watchdog, "_STACK_WAIT_S", 0.01)
    monkeypatch.setattr(watchdog, "_HUNG_KILL_WAIT_S", 0.01)
    monkeypatch.setattr(Link, "signal", lambda *_: None)
    peer.link.pid = 1 << 30  # nobody's
    return peer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """What the watchdog takes for the time: it passes where it waits, and nowhere else."""
    now = [0.0]

    def wait(link: Link, seconds: float) -> None:
        now[0] += max(seconds, 0.001)

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Link, "pump", wait)
    return lambda: now[0]


@pytest.mark.parametrize(("share_waiting", "expected_s"), [(0.0, 0.1), (0.5, 0.2), (1.0, 0.4)])
def test_what_a_process_waits_for_a_cpu_is_not_its_own_time(
    unkillable: Peer,
    clock: Callable[[], float],
    monkeypatch: pytest.MonkeyPatch,
    share_waiting: float,
    expected_s: float,
) -> None:
    """A slow case on a busy machine would be a hang; or a real one, on a machine that stays busy, would never end."""
    monkeypatch.setattr(watchdog, "cpu_wait_s", lambda _: share_waiting * clock())
    assert isinstance(await_message(unkillable.link, 0.1, None), TimedOut)
    assert expected_s <= clock() < expected_s + 0.1


@pytest.mark.parametrize(("runs", "expected_s"), [(0, 0.1), (3, 0.4), (9, 0.5)])
def test_each_run_of_a_call_has_its_time(
    unkillable: Peer, clock: Callable[[], float], monkeypatch: pytest.MonkeyPatch, runs: int, expected_s: float
) -> None:
    """A relation's dozens of runs of a slow kernel would be a hang; or one that says to go on would go on for ever."""
    monkeypatch.setattr(watchdog, "_MOST_RUNS", 4)
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.01)
    over = [0.099 * (i + 1) for i in range(runs)]

    def next_message(link: Link) -> Progress | None:
        return Progress(1) if over and clock() >= over[0] and over.pop(0) else None

    monkeypatch.setattr(Link, "next_message", next_message)
    assert isinstance(await_message(unkillable.link, 0.1, None), TimedOut)
    assert expected_s - 0.01 <= clock() < expected_s + 0.05


@pytest.mark.parametrize(("blocked_s", "expected_s"), [(0.0, 0.1), (0.25, 0.25), (9.0, 0.4)])
def test_what_a_process_waits_for_a_driver_is_not_its_own_time(
    unkillable: Peer, clock: Callable[[], float], monkeypatch: pytest.MonkeyPatch, blocked_s: float, expected_s: float
) -> None:
    """A process that waits for the lock of a GPU's driver would be killed, and the next wait for it to start CUDA."""
    monkeypatch.setattr(watchdog, "is_blocked", lambda _: clock() < blocked_s)
    monkeypatch.setattr(watchdog, "_BLOCKED_S", 0.01)
    assert isinstance(await_message(unkillable.link, 0.1, None), TimedOut)
    assert expected_s <= clock() < expected_s + 0.1


@pytest.mark.parametrize(("dies_after_s", "still_alive"), [(0.3, False), (None, True)])
def test_a_hung_process_may_take_its_time_to_die(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, dies_after_s: float | None, still_alive: bool
) -> None:
    """A busy driver would pass for a lost GPU and end the campaign, or a lost one for a busy driver for ever."""
    monkeypatch.setattr(watchdog, "_STACK_WAIT_S", 0.01)
    monkeypatch.setattr(watchdog, "_HUNG_KILL_WAIT_S", 1.0)
    monkeypatch.setattr(Link, "signal", lambda *_: None)
    if dies_after_s is not None:
        death = threading.Timer(dies_after_s, peer.tell, [Exited(-9)])
        death.start()
    outcome = await_message(peer.link, 0.1, None)
    assert isinstance(outcome, TimedOut)
    assert outcome.still_alive is still_alive


@pytest.mark.parametrize("garbage", [b"HTTP/1.1 200 OK", encode_frame(b"{}"), encode_frame(b"\xff")])
def test_garbage_is_a_lost_channel(peer: Peer, garbage: bytes) -> None:
    """Stray bytes would raise in the driver, or make it wait for ever."""
    peer.channel.sendall(garbage)
    peer.link.pump(1)
    assert peer.link.next_message() is None
    assert peer.link.garbled
    assert peer.link.channel_lost


def test_output_that_is_not_text_is_shown(peer: Peer) -> None:
    """Binary output would raise in the driver."""
    os.write(peer.output, b"\xff\x00ok")
    while peer.link.pump(0):
        pass
    assert peer.link.output() == r"\xff\x00ok"


def test_stranger_with_the_executors_old_id_is_spared(peer: Peer) -> None:
    """Without a zygote, a link left alone for long would kill whatever process has that ID by then."""
    peer.tell(Forked(os.getpid()))  # this test is the stranger
    while peer.link.pump(0):
        pass
    peer.link._start_time = 1  # the executor was older
    peer.control.close()
    while peer.link.pump(0):
        pass
    assert peer.link.zygote_lost
    peer.link.close()


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


def decode_in_pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    decoder = FrameDecoder()
    bodies = []
    bounds = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in itertools.pairwise(bounds):
        decoder.feed(stream[start:end])
        while (body := decoder.next_frame()) is not None:
            bodies.append(body)
    return bodies


@given(bodies=st.lists(st.binary(max_size=300)), cuts=st.lists(st.integers(0, 5000)))
def test_frames_survive_any_fragmentation(bodies: list[bytes], cuts: list[int]) -> None:
    """A message that arrives in pieces, or with the next one, would be torn or merged."""
    assert decode_in_pieces(b"".join(map(encode_frame, bodies)), cuts) == bodies


def test_too_large_announcement_is_refused_before_its_body() -> None:
    """Four stray bytes could make the driver collect gigabytes."""
    decoder = FrameDecoder()
    decoder.feed(b"\xff\xff\xff\xff")
    with pytest.raises(FrameError, match="a frame of 4294967295 bytes"):
        decoder.next_frame()
