"""Messages between driver, zygote and executor."""

import itertools
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnfuzz.isolation.messages import (
    MAX_FRAME_BYTES,
    Answer,
    ControlReply,
    ControlRequest,
    ExecutorMessage,
    Exited,
    Fault,
    Fork,
    Forked,
    ForkFailed,
    FrameDecoder,
    FrameError,
    Hello,
    Signal,
    encode_frame,
    receive_frame,
    send_frame,
)


@pytest.mark.parametrize(
    ("message", "union"),
    [
        (Fork({"A": "b"}), ControlRequest),
        (Signal(9), ControlRequest),
        (Forked(7), ControlReply),
        (ForkFailed("full"), ControlReply),
        (Exited(-11), ControlReply),
        (Hello(7), ExecutorMessage),
        (Answer(1, msgspec.Raw(b"[1]"), last=True), ExecutorMessage),
        (Fault(1, "Traceback"), ExecutorMessage),
    ],
)
def test_messages_survive_the_wire_and_are_told_apart(message: object, union: type) -> None:
    """One kind of message would be taken for another."""
    assert msgspec.json.decode(msgspec.json.encode(message), type=union) == message


@pytest.mark.parametrize("text", [b'{"type":"exited","status":"0"}', b'{"type":"exited","status":0,"x":1}', b"{}"])
def test_malformed_messages_are_refused(text: bytes) -> None:
    """A garbled message would be believed."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=ControlReply)


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


def test_too_large_body_is_not_encoded() -> None:
    """The other side would refuse the stream without saying what was wrong."""
    with pytest.raises(FrameError, match=f"a frame of {MAX_FRAME_BYTES + 1} bytes exceeds the limit"):
        encode_frame(bytes(MAX_FRAME_BYTES + 1))


def test_too_large_announcement_is_refused_before_its_body() -> None:
    """Four stray bytes could make the driver collect gigabytes."""
    decoder = FrameDecoder()
    decoder.feed(b"\xff\xff\xff\xff")
    with pytest.raises(FrameError, match="a frame of 4294967295 bytes"):
        decoder.next_frame()


def test_frames_pass_a_blocking_socket() -> None:
    """Executors could not read requests, or would not see the driver hang up."""
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            send_frame(ours, b"first")
            send_frame(ours, b"")
        assert [receive_frame(theirs) for _ in range(3)] == [b"first", b"", None]


@pytest.mark.parametrize("torn", [b"\x00", b"\x00\x00\x00\x05abc", b"\x00\x00\x00\x05"])
def test_torn_frame_is_an_error(torn: bytes) -> None:
    """Half a request would be acted upon."""
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(torn)
        with pytest.raises(FrameError, match="the stream ended after"):
            receive_frame(theirs)


def test_too_large_announcement_is_refused_by_the_blocking_reader() -> None:
    """An executor would allocate what stray bytes announce."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(FrameError, match="exceeds the limit"):
            receive_frame(theirs)
