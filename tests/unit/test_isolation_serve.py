"""The loop that answers calls, without the process around it."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from attnfuzz.isolation.messages import Answer, ExecutorMessage, Fault, Hello, Request, receive_frame, send_frame
from attnfuzz.isolation.serve import CHANNEL_LOST_STATUS, ExitAfterReply, instantiate_service, load_service, serve


class Scripted:
    """Does what the method's name says."""

    def handle(self, method: str, payload: bytes) -> bytes:
        match method:
            case "echo":
                return payload
            case "plain text":
                return b"plain text"
            case "none":
                return None  # type: ignore[return-value]  # the mistake under test
            case "last":
                raise ExitAfterReply(payload)
            case "bad last":
                raise ExitAfterReply(b"{")
        raise LookupError(method)


class Conversation:
    """Speaks to a `serve` that runs in a thread."""

    def __init__(self, service: object) -> None:
        self.channel, self._theirs = socket.socketpair()
        self._status: list[int] = []
        self._thread = threading.Thread(target=lambda: self._status.append(serve(self._theirs, service)))
        self._thread.start()

    def hear(self) -> ExecutorMessage:
        frame = receive_frame(self.channel)
        assert frame is not None
        message: ExecutorMessage = msgspec.json.decode(frame, type=ExecutorMessage)
        return message

    def ask(self, method: str, payload: bytes = b"null", number: int = 1) -> ExecutorMessage:
        send_frame(self.channel, msgspec.json.encode(Request(number, method, msgspec.Raw(payload))))
        return self.hear()

    def end(self) -> int:
        """Hang up; the exit code."""
        self.channel.close()
        return self.join()

    def join(self) -> int:
        """The exit code, once serving has ended by itself."""
        self._thread.join(10)
        self._theirs.close()
        (status,) = self._status
        return status


@pytest.fixture
def converse() -> Iterator[Callable[[object], Conversation]]:
    started: list[Conversation] = []

    def start(service: object) -> Conversation:
        started.append(Conversation(service))
        return started[-1]

    yield start
    for conversation in started:
        conversation.end()


def test_greets_answers_and_ends_when_the_driver_hangs_up(converse: Callable[[object], Conversation]) -> None:
    """Executors would not start, not answer, or never end."""
    conversation = converse(Scripted)
    assert conversation.hear() == Hello(os.getpid())
    assert conversation.ask("echo", b'{"a":[1]}', number=7) == Answer(7, msgspec.Raw(b'{"a":[1]}'))
    assert conversation.ask("echo", b"2", number=8) == Answer(8, msgspec.Raw(b"2"))
    assert conversation.end() == 0


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("unknown", "LookupError: unknown"),
        ("plain text", "b'plain text', which is not JSON"),
        ("none", "NoneType"),
        ("bad last", "which is not JSON"),
    ],
)
def test_fault_of_the_service_is_told_and_survived(
    converse: Callable[[object], Conversation], method: str, message: str
) -> None:
    """A bug of the framework would pass for a crash of the kernel."""
    conversation = converse(Scripted)
    conversation.hear()
    fault = conversation.ask(method, number=3)
    assert isinstance(fault, Fault)
    assert fault.number == 3
    assert message in fault.traceback
    assert conversation.ask("echo", b"1") == Answer(1, msgspec.Raw(b"1"))


def test_last_answer_ends_the_loop(converse: Callable[[object], Conversation]) -> None:
    """The next case would run on a broken CUDA context."""
    conversation = converse(Scripted)
    conversation.hear()
    assert conversation.ask("last", b'"verdict"') == Answer(1, msgspec.Raw(b'"verdict"'), last=True)
    assert conversation.join() == 0  # with the channel still open


def test_service_that_cannot_be_made_is_told(converse: Callable[[object], Conversation]) -> None:
    """The driver would wait for a greeting that never comes."""
    conversation = converse({"not": "a service"})
    fault = conversation.hear()
    assert isinstance(fault, Fault)
    assert "must have a method handle" in fault.traceback
    assert conversation.end() == 1


def test_torn_request_is_a_lost_channel(
    converse: Callable[[object], Conversation], capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage to the channel would look like an orderly end."""
    conversation = converse(Scripted)
    conversation.hear()
    conversation.channel.sendall(b"\x00\x00")
    assert conversation.end() == CHANNEL_LOST_STATUS
    assert "the stream ended after" in capsys.readouterr().err


SERVICES = Path(__file__).with_name("execution_services.py")


class Echo:
    def handle(self, method: str, payload: bytes) -> bytes:
        return payload


def make_echo() -> Echo:
    return Echo()


@pytest.mark.parametrize("loaded", [Echo, Echo(), make_echo])
def test_class_object_and_function_are_services(loaded: object) -> None:
    """One of the ways to give a service would not work."""
    assert instantiate_service(loaded).handle("any", b"1") == b"1"


@pytest.mark.parametrize("loaded", [3, dict, lambda: None, {"handle": None}])
def test_what_cannot_answer_is_refused(loaded: object) -> None:
    """The mistake would show as an AttributeError at the first call."""
    with pytest.raises(TypeError, match="must have a method handle"):
        instantiate_service(loaded)


@pytest.mark.parametrize("spec", ["", "module", ":attribute", "module:", "file.py"])
def test_incomplete_name_is_refused(spec: str) -> None:
    """The wrong half of a name would be looked up."""
    with pytest.raises(ValueError, match="must read 'module:attribute'"):
        load_service(spec)


def test_module_and_file_are_found() -> None:
    """Services of installed packages or of single files could not be loaded."""
    assert load_service("attnfuzz.isolation.serve:load_service") is load_service
    assert type(load_service(f"{SERVICES}:ready_made")).__name__ == "Rogue"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{SERVICES}:Nobody", "names 'Nobody', which .* does not define"),
        ("attnfuzz.isolation.serve:nobody", "names 'nobody', which attnfuzz.isolation.serve does not define"),
        ("/no/such/file.py:Service", "'/no/such/file.py' does not exist"),
    ],
)
def test_what_does_not_exist_is_named(spec: str, message: str) -> None:
    """The error would not say which name is wrong."""
    with pytest.raises(ValueError, match=message):
        load_service(spec)
