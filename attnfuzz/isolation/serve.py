"""The executor's side: from a freshly forked child of the zygote to a loop that answers calls until it is told to stop.

What answers is a *service*, named as `module:attribute` or `path/to/file.py:attribute`. Nothing here returns to the
caller: a child that fell back into the zygote's loop would act as a second zygote.
"""

import contextlib
import faulthandler
import functools
import importlib
import importlib.util
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn, Protocol, runtime_checkable

import msgspec

from attnfuzz.isolation.memory_faults import FatalSignals
from attnfuzz.isolation.messages import Answer, Fault, FrameError, Hello, Progress, Request, receive_frame, send_frame
from attnfuzz.isolation.process import die_with_parent, disable_core_dumps, prefer_as_oom_victim
from attnfuzz.isolation.progress import expect_runs
from attnfuzz.overlay import install_overlay


@runtime_checkable
class Service(Protocol):
    """Answers calls, one at a time, inside an executor."""

    def handle(self, method: str, payload: bytes) -> bytes:
        """The answer to `method`, a JSON document; `payload` is one too."""
        ...


class ExitAfterReply(Exception):  # noqa: N818 - control flow, like StopIteration
    """Raised by a service to answer with `body` and end its process, whose state can no longer be trusted."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self.body = body


def load_service(spec: str) -> object:
    """Import what `spec` names: a service, or a class or function without arguments that makes one."""
    location, separator, attribute = spec.rpartition(":")
    if not separator or not location or not attribute:
        raise ValueError(f"service={spec!r} must read 'module:attribute' or 'path/to/file.py:attribute'")
    module = _load_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    try:
        loaded: object = getattr(module, attribute)
    except AttributeError:
        raise ValueError(f"service={spec!r} names {attribute!r}, which {location} does not define") from None
    return loaded


def instantiate_service(loaded: object) -> Service:
    """The service that `load_service` found, made now if it is a class or a function."""
    made = loaded() if isinstance(loaded, type) or (callable(loaded) and not isinstance(loaded, Service)) else loaded
    if not isinstance(made, Service):
        raise TypeError(f"a service must have a method handle(method, payload) -> bytes; {made!r} has none")
    return made


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"service file {str(path)!r} does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


CHANNEL_LOST_STATUS = 113
"""Exit code of an executor whose channel no longer works: the code under test has closed or replaced it."""

STACK_SIGNAL = signal.SIGUSR1
"""Makes the executor write the Python stack of each thread to its output."""


@dataclass(frozen=True, slots=True)
class ExecutorDescriptors:
    """File descriptors that the driver gives an executor.

    `output` takes stdout, stderr and the stack after a fatal signal, `fault_record` what a memory fault came of.
    """

    channel: socket.socket
    output: int
    fault_record: int | None = None

    def close(self) -> None:
        """Close them all: they are the executor's."""
        self.channel.close()
        os.close(self.output)
        if self.fault_record is not None:
            os.close(self.fault_record)


def run_executor(
    given: ExecutorDescriptors, loaded: object, environment: Mapping[str, str], zygote_pid: int
) -> NoReturn:
    """Turn the current process, just forked, into an executor, and serve until the driver hangs up."""
    status = 1
    try:
        os.setsid()  # so that a signal to the group reaches whatever the code under test starts
        die_with_parent(zygote_pid)
        os.register_at_fork(after_in_child=die_with_parent)
        _redirect_standard_streams(given.output)
        signals = FatalSignals(given.output, given.fault_record)  # the code under test may have closed descriptor 2
        faulthandler.register(STACK_SIGNAL, file=given.output, all_threads=True)
        disable_core_dumps()
        prefer_as_oom_victim()
        os.environ.update(environment)
        install_overlay()
        status = serve(given.channel, loaded, signals.take_back)
    except SystemExit as error:
        status = _exit_code(error)
    except BaseException:
        _print_traceback()
        raise
    finally:
        flush_standard_streams()
        os._exit(status)


def serve(channel: socket.socket, loaded: object, after_each: Callable[[], None] = lambda: None) -> int:
    """Make the service, say hello, answer requests; the exit code once the driver hung up or the channel is lost."""
    try:
        service = _make_service(channel, loaded)
        if service is None:
            return 1
        own_pid = os.getpid()
        send_frame(channel, msgspec.json.encode(Hello(own_pid)))
        while (frame := receive_frame(channel)) is not None:
            request = msgspec.json.decode(frame, type=Request)
            progress = msgspec.json.encode(Progress(request.number))
            expect_runs(functools.partial(send_frame, channel, progress))
            answer = _answer(service, request)
            expect_runs(None)
            if os.getpid() != own_pid:  # code under test forked and returned twice; only the original answers
                return 0
            after_each()
            _send_answer(channel, answer)
            if isinstance(answer, Answer) and answer.last:
                break
    except (OSError, FrameError):
        _print_traceback()
        return CHANNEL_LOST_STATUS
    return 0


def _make_service(channel: socket.socket, loaded: object) -> Service | None:
    try:
        return instantiate_service(loaded)
    except Exception:  # noqa: BLE001 - whatever it is, the driver raises it as ServiceError
        send_frame(channel, msgspec.json.encode(Fault(0, traceback.format_exc())))
        return None


def _answer(service: Service, request: Request) -> Answer | Fault:
    try:
        return _checked_answer(request.number, service.handle(request.method, bytes(request.payload)))
    except ExitAfterReply as stop:
        return _checked_answer(request.number, stop.body, last=True)
    except Exception:  # noqa: BLE001 - whatever it is, the driver raises it as ServiceError
        return Fault(request.number, traceback.format_exc())


def _checked_answer(number: int, body: bytes, *, last: bool = False) -> Answer | Fault:
    try:
        return Answer(number, msgspec.json.decode(body, type=msgspec.Raw), last)
    except (msgspec.DecodeError, TypeError) as error:
        return Fault(number, f"the service answered {body[:200]!r}, which is not JSON: {error}")


def _send_answer(channel: socket.socket, answer: Answer | Fault) -> None:
    try:
        send_frame(channel, msgspec.json.encode(answer))
    except FrameError as error:
        fault = Fault(answer.number, f"the service's answer was not sent: {error}")
        send_frame(channel, msgspec.json.encode(fault))


def _redirect_standard_streams(output: int) -> None:
    with open(os.devnull, "rb") as null:  # noqa: PTH123 - a descriptor is wanted, not a path
        os.dup2(null.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Unbuffered enough that what was printed before a crash is not lost with the process.
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - for good
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - for good


def _exit_code(error: SystemExit) -> int:
    """The exit code that the interpreter would use."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _print_traceback() -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed, and the exit code matters more
        traceback.print_exc()


def flush_standard_streams() -> None:
    """Before a process ends by `os._exit`."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or replaced by the code under test
            stream.flush()
