"""Length-prefixed frames over a byte stream: four bytes, big-endian, then that many bytes of body."""

import socket
import struct

__all__ = ["MAX_FRAME_BYTES", "FrameDecoder", "FrameError", "encode_frame", "receive_frame", "send_frame"]

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Largest body of one frame, in bytes. A larger announced length means that the stream is not ours."""

_HEADER = struct.Struct("!I")


class FrameError(ValueError):
    """A frame is too large, or the stream broke off in the middle of one."""


def _check_length(num_bytes: int) -> None:
    if num_bytes > MAX_FRAME_BYTES:
        raise FrameError(
            f"a frame of {num_bytes} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes; "
            "send a description of the data, not the data (or the stream holds something other than frames)"
        )


def encode_frame(body: bytes) -> bytes:
    """The bytes to put on the wire for `body`; `FrameError` above `MAX_FRAME_BYTES`."""
    _check_length(len(body))
    return _HEADER.pack(len(body)) + body


class FrameDecoder:
    """Splits a byte stream, arriving in pieces of any size, into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Append the next bytes of the stream."""
        self._buffer += data

    def next_frame(self) -> bytes | None:
        """The next complete body, or None while it is incomplete; `FrameError` if its length is over the limit."""
        if len(self._buffer) < _HEADER.size:
            return None
        (num_bytes,) = _HEADER.unpack_from(self._buffer)
        _check_length(num_bytes)
        end = _HEADER.size + num_bytes
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return body


def send_frame(stream: socket.socket, body: bytes) -> None:
    """Write one frame to a blocking socket."""
    stream.sendall(encode_frame(body))


def receive_frame(stream: socket.socket) -> bytes | None:
    """Read one frame from a blocking socket; None when the peer closed it between two frames."""
    header = _receive_exactly(stream, _HEADER.size)
    if not header:
        return None
    if len(header) < _HEADER.size:
        raise FrameError(f"the stream ended after {len(header)} of the {_HEADER.size} bytes of a frame's header")
    (num_bytes,) = _HEADER.unpack(header)
    _check_length(num_bytes)
    body = _receive_exactly(stream, num_bytes)
    if len(body) < num_bytes:
        raise FrameError(f"the stream ended after {len(body)} of the {num_bytes} bytes of a frame")
    return bytes(body)


def _receive_exactly(stream: socket.socket, num_bytes: int) -> bytearray:
    """Up to `num_bytes`, fewer only at the end of the stream, none only if it ended before the first."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    received = 0
    while received < num_bytes:
        count = stream.recv_into(view[received:])
        if count == 0:
            break
        received += count
    view.release()
    del data[received:]
    return data
