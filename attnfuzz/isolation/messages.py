"""Messages between driver, zygote and executor: JSON, in packets or in length-prefixed frames.

Two connections lead to an executor. On the *control* socket the driver talks to the zygote, which alone knows how the
executor ended; the executor has no descriptor for it, so code under test cannot corrupt an exit status. Each message
there is one packet. On the *channel* the driver talks to the executor itself; there each message is a *frame*: four
bytes, big-endian, then that many bytes of body.
"""

import socket
import struct
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from attnfuzz.untrusted_text import DETAILS_BYTES, printable

MAX_CONTROL_BYTES = 128 * 1024
"""Largest control message, in bytes; each is one packet, and Linux's default socket buffers hold one of this size."""

MAX_DESCRIPTORS = 3
"""That travel with `Fork`."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are no message: code under test can write to the channel too."""


class Fork(msgspec.Struct, tag="fork", frozen=True, forbid_unknown_fields=True):
    """Driver to zygote: fork an executor. The channel and the output pipe travel with it as file descriptors, and a
    fault record where there is one.
    """

    environment: dict[str, str]


class Signal(msgspec.Struct, tag="signal", frozen=True, forbid_unknown_fields=True):
    """Driver to zygote: signal the executor; SIGKILL goes to its whole process group.

    The zygote sends it because only the parent knows that the process ID has not been reused.
    """

    number: int


class Forked(msgspec.Struct, tag="forked", frozen=True, forbid_unknown_fields=True):
    """Zygote to driver: the executor's process ID."""

    pid: int


class ForkFailed(msgspec.Struct, tag="fork_failed", frozen=True, forbid_unknown_fields=True):
    """Zygote to driver: the system refused another process."""

    error: str


class Exited(msgspec.Struct, tag="exited", frozen=True, forbid_unknown_fields=True):
    """Zygote to driver, the last message: exit code, or minus the number of the signal that killed the executor."""

    status: int


class Hello(msgspec.Struct, tag="hello", frozen=True, forbid_unknown_fields=True):
    """Executor to driver: the service is loaded."""

    pid: int


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Driver to executor: one call, with a number that the answer repeats."""

    number: int
    method: str
    payload: msgspec.Raw


class Answer(msgspec.Struct, tag="answer", frozen=True, forbid_unknown_fields=True):
    """Executor to driver: what the service returned. After a `last` one the executor exits."""

    number: int
    body: msgspec.Raw
    last: bool = False


class Fault(msgspec.Struct, tag="fault", frozen=True, forbid_unknown_fields=True):
    """Executor to driver: the service raised; in making it, if `number` is 0."""

    number: int
    traceback: str

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "traceback", printable(self.traceback, DETAILS_BYTES, lines=True))


class Progress(msgspec.Struct, tag="progress", frozen=True, forbid_unknown_fields=True):
    """Executor to driver: a run is over of those that the call consists of, and it goes on with the next."""

    number: int


ControlRequest: TypeAlias = Fork | Signal
ControlReply: TypeAlias = Forked | ForkFailed | Exited
ExecutorMessage: TypeAlias = Hello | Answer | Fault | Progress


def encode_fork_request(environment: Mapping[str, str]) -> bytes:
    """The control message that asks for an executor with these environment variables set."""
    request = msgspec.json.encode(Fork(dict(environment)))
    if len(request) > MAX_CONTROL_BYTES:
        raise ValueError(f"environment takes {len(request)} bytes of at most {MAX_CONTROL_BYTES}; pass less of it")
    return request


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
