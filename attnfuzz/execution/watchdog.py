"""Waits for an executor's answer, and establishes what became of it when none comes."""

import signal
import time

from attnfuzz.execution.builds import BUILD_PATIENCE_S, LOOK_EVERY_S, BuildWatch, GiveUp, never
from attnfuzz.execution.link import Link
from attnfuzz.execution.messages import ExecutorMessage
from attnfuzz.execution.outcomes import DeathReason, Died, ExecutorUnavailable, TimedOut, signal_name
from attnfuzz.execution.process import cpu_wait_s, is_blocked
from attnfuzz.execution.serve import CHANNEL_LOST_STATUS, STACK_SIGNAL

__all__ = ["ZygoteLostError", "await_message", "describe_death", "kill", "was_killed_from_outside"]

_MEMORY_POLL_S = 0.02
_MOST_PATIENCE = 4.0
_BLOCKED_S = 0.5
"""How long a process that is blocked at the end of its time has until it is looked at again."""
_CHANNEL_GRACE_S = 1.0
_STACK_WAIT_S = 2.0
_STACK_SILENCE_S = 0.05
_KILL_WAIT_S = 10.0
_HUNG_KILL_WAIT_S = 60.0
"""For one that hung. What it waits for in a GPU's driver it finishes before it dies, and dozens of processes that share
GPUs can keep each other waiting there; one that does not end is taken for the loss of the device."""


class ZygoteLostError(Exception):
    """The zygote ended, and the executor with it: says nothing about the code under test."""


def await_message(
    link: Link,
    timeout_s: float,
    memory_limit_bytes: int | None,
    *,
    builds: BuildWatch | None = None,
    give_up: GiveUp = never,
) -> ExecutorMessage | Died | TimedOut:
    """The executor's next message, or how it ended: by itself, or killed here for taking too long or too much memory.

    What it waits for a CPU on a busy machine is not its own time, nor what it waits for a driver's lock: so much longer
    it may take, up to `_MOST_PATIENCE` times as long in all. Its time begins anew when a build ends (see `builds`),
    which may take `BUILD_PATIENCE_S`, unless the caller chooses to `give_up` before, or in the time that begins anew.
    The limit of memory is for the process itself; what it starts may take what is free. `ZygoteLostError` if its end
    cannot be known, `ExecutorUnavailable` if it could not be forked.
    """
    builds = BuildWatch(link.pid) if builds is None else builds
    began, waited_before = time.monotonic(), _cpu_wait_s(link)
    deadline, next_look = began + timeout_s, began + LOOK_EVERY_S
    first_deadline = deadline
    expired = False
    while True:
        if (message := link.next_message()) is not None:
            return message
        if (died := _death(link, memory_limit_bytes)) is not None:
            return died
        now = time.monotonic()
        if expired or now >= next_look:
            next_look = now + LOOK_EVERY_S
            if builds.look() and builds.seconds < BUILD_PATIENCE_S:
                began, waited_before = now, _cpu_wait_s(link)
                expired = True  # so that the deadline is set anew
            if builds.takes_too_much_memory():
                return _kill_for(link, "children")
        if expired:
            ends = began + timeout_s + min(_cpu_wait_s(link) - waited_before, (_MOST_PATIENCE - 1) * timeout_s)
            if ends <= now < (last := began + _MOST_PATIENCE * timeout_s) and link.pid and is_blocked(link.pid):
                ends = min(last, now + _BLOCKED_S)
            deadline = ends
            if now >= deadline:
                return _time_out(link, timeout_s)
        if (builds.seconds or now >= first_deadline) and give_up(builds):
            return TimedOut(timeout_s, "", still_alive=not kill(link), cut_off=True)
        now = time.monotonic()
        expired = now >= deadline  # and yet look once more: an answer that lies ready counts
        remaining_s = min(deadline, next_look) - now
        link.pump(remaining_s if memory_limit_bytes is None else min(remaining_s, _MEMORY_POLL_S))


def describe_death(link: Link, reason: DeathReason | None = None) -> Died:
    """How the executor ended; `reason` if it was killed for one."""
    status = -int(signal.SIGKILL) if link.exit_status is None else link.exit_status
    if reason is None:
        reason = "signal" if status < 0 else "channel" if status == CHANNEL_LOST_STATUS else "exit"
    return Died(status, signal_name(status), link.output(), reason, link.memory_fault() if reason == "signal" else None)


def was_killed_from_outside(outcome: object) -> bool:
    """Whether an executor ended by a SIGKILL that the watchdog did not send: the system is out of memory, or somebody
    killed it or its zygote. That says little about the code under test."""
    return isinstance(outcome, Died) and (
        outcome.reason == "zygote" or (outcome.reason == "signal" and outcome.exit_status == -signal.SIGKILL)
    )


def kill(link: Link, *, wait_s: float = _KILL_WAIT_S) -> bool:
    """SIGKILL the executor's process group; whether it is gone."""
    link.signal(signal.SIGKILL)
    return _await_exit(link, wait_s)


def _cpu_wait_s(link: Link) -> float:
    return 0.0 if link.pid is None else cpu_wait_s(link.pid)


def _death(link: Link, memory_limit_bytes: int | None) -> Died | None:
    """How the executor died, killed now if it cannot or may not go on; None if all is well."""
    if link.fork_error is not None:
        raise ExecutorUnavailable(f"no process could be forked: {link.fork_error}; free memory or process IDs")
    if link.channel_lost:
        # A dying process closes its channel first, so its exit status follows at once; a garbled one may live on.
        _await_exit(link, 0.0 if link.garbled else _CHANNEL_GRACE_S)
    if link.exit_status is not None:
        return describe_death(link)
    if link.zygote_lost:
        raise ZygoteLostError
    if link.channel_lost:
        return _kill_for(link, "channel")
    if memory_limit_bytes is not None and link.own_bytes() > memory_limit_bytes:
        return _kill_for(link, "memory")
    return None


def _kill_for(link: Link, reason: DeathReason) -> Died:
    kill(link)
    return describe_death(link, reason)


def _time_out(link: Link, after_s: float) -> TimedOut:
    """Ask for the Python stacks, wait until they have been written, kill."""
    link.forget_output()
    link.signal(STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_WAIT_S
    while (remaining_s := deadline - time.monotonic()) > 0:
        if not link.pump(min(remaining_s, _STACK_SILENCE_S)) and link.output():
            break
    stack = link.output()
    return TimedOut(after_s, stack, still_alive=not kill(link, wait_s=_HUNG_KILL_WAIT_S))


def _await_exit(link: Link, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not (ended := link.exit_status is not None or link.zygote_lost):
        if (remaining_s := deadline - time.monotonic()) <= 0:
            break
        link.pump(remaining_s)
    return ended
