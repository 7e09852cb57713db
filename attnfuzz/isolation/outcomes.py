"""Outcomes of one call to an executor, and the errors of the isolation layer itself."""

import signal
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import msgspec

from attnfuzz.isolation.memory_faults import MemoryFault
from attnfuzz.isolation.messages import UNREADABLE

DeathReason: TypeAlias = Literal["exit", "signal", "memory", "children", "channel", "zygote"]
"""Why an executor died: it exited, a signal killed it, it outgrew its memory limit, the processes that it started took
almost all of the machine's memory, it lost or garbled its channel to the driver (code that closes or writes to file
descriptors that are not its own), or its zygote died or was stopped each time."""

Answered = TypeVar("Answered", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Reply:
    """The service answered with `body`, a JSON document; for `built_s` seconds it had waited for builds before."""

    body: bytes
    built_s: float = 0.0

    def read(self, kind: type[Answered]) -> Answered | None:
        """The message; None if it is no `kind`: code under test has written to the channel, or to the service."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except UNREADABLE:
            return None


@dataclass(frozen=True, slots=True)
class Died:
    """The executor ended without an answer.

    `exit_status` is as `subprocess` gives it: the exit code, or minus the signal's number. `output_tail` holds the last
    of what it wrote to stdout and stderr; after a fatal signal that includes the Python stack. `fault` is what it died
    of, if it was a page fault and is known (see `attnfuzz.isolation.memory_faults`).
    """

    exit_status: int
    signal_name: str | None
    output_tail: str
    reason: DeathReason
    fault: MemoryFault | None = None


@dataclass(frozen=True, slots=True)
class TimedOut:
    """No answer within `after_s` seconds, so the executor was killed.

    `stack` is the Python stack of each of its threads when time was up, empty if it could not be had. `still_alive`
    says that SIGKILL did not end it in time (a process inside a driver call): do not use its device again. `cut_off`:
    the caller's deadline came first, in a build or too soon after one, so it need not be a hang.
    """

    after_s: float
    stack: str
    still_alive: bool = False
    cut_off: bool = False


Outcome: TypeAlias = Reply | Died | TimedOut


class ServiceError(RuntimeError):
    """The service raised instead of answering: a bug of the framework, not of a kernel. Carries its traceback."""


class ExecutorUnavailable(RuntimeError):  # noqa: N818 - a condition with a remedy, named for what the caller sees
    """No executor can be started; the message says why and what to do."""


class DeadlinePassed(Exception):  # noqa: N818 - control flow, like StopIteration
    """The caller's deadline came while a kernel was being built, or soon after: nothing is known of the case."""


class DeviceLost(ExecutorUnavailable):
    """The GPU does not answer any more. Others may."""


def signal_name(exit_status: int) -> str | None:
    """The name of the signal behind a negative exit status (-11 is SIGSEGV), None for an ordinary exit."""
    if exit_status >= 0:
        return None
    try:
        return signal.Signals(-exit_status).name
    except ValueError:  # real-time signals between SIGRTMIN and SIGRTMAX have no name
        return f"SIG{-exit_status}"
