"""Frames over byte streams."""

import itertools
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnfuzz.execution.framing import (
    MAX_FRAME_BYTES,
    FrameDecoder,
    FrameError,
    encode_frame,
    receive_frame,
    send_frame,
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
