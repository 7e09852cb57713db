"""Messages between driver, zygote and executor."""

import msgspec
import pytest

from attnfuzz.execution.messages import (
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
