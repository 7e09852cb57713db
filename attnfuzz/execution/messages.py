"""The JSON messages of the isolation layer.

Two connections lead to an executor. On the *control* socket the driver talks to the zygote, which alone knows how the
executor ended; the executor has no descriptor for it, so code under test cannot corrupt an exit status. On the
*channel* the driver talks to the executor itself.
"""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from attnfuzz.said import DETAILS_BYTES, printable

__all__ = [
    "MAX_CONTROL_BYTES",
    "MAX_DESCRIPTORS",
    "UNREADABLE",
    "Answer",
    "ControlReply",
    "ControlRequest",
    "ExecutorMessage",
    "Exited",
    "Fault",
    "Fork",
    "ForkFailed",
    "Forked",
    "Hello",
    "Request",
    "Signal",
    "encode_fork_request",
]

MAX_CONTROL_BYTES = 128 * 1024
"""Largest control message, in bytes; each is one packet, and Linux's default socket buffers hold one of this size."""

MAX_DESCRIPTORS = 3
"""That travel with `Fork`."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no message: code under test can write to the channel too."""


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


ControlRequest: TypeAlias = Fork | Signal
ControlReply: TypeAlias = Forked | ForkFailed | Exited
ExecutorMessage: TypeAlias = Hello | Answer | Fault


def encode_fork_request(environment: Mapping[str, str]) -> bytes:
    """The control message that asks for an executor with these environment variables set."""
    request = msgspec.json.encode(Fork(dict(environment)))
    if len(request) > MAX_CONTROL_BYTES:
        raise ValueError(f"environment takes {len(request)} bytes of at most {MAX_CONTROL_BYTES}; pass less of it")
    return request
