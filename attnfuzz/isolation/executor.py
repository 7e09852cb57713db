"""An isolated process that answers calls, and dies alone: of itself, of a watchdog's limits on time and memory."""

import functools
import signal
import time
from collections.abc import Mapping
from typing import Self

import msgspec

from attnfuzz.isolation.builds import BUILD_PATIENCE_S, LOOK_EVERY_S, BuildWatch, GiveUp, never
from attnfuzz.isolation.link import Link
from attnfuzz.isolation.messages import (
    Answer,
    Fault,
    Hello,
    Progress,
    Request,
    encode_fork_request,
    encode_frame,
)
from attnfuzz.isolation.outcomes import (
    DeathReason,
    Died,
    ExecutorUnavailable,
    Outcome,
    Reply,
    ServiceError,
    TimedOut,
    signal_name,
)
from attnfuzz.isolation.process import cpu_s, cpu_wait_s, is_blocked
from attnfuzz.isolation.serve import CHANNEL_LOST_STATUS, STACK_SIGNAL
from attnfuzz.isolation.zygote_client import Zygote

_MEMORY_POLL_S = 0.02
_MOST_PATIENCE = 4.0
_MOST_RUNS = 128
"""Most runs of a call that have their time each, twice as many as a relation makes: code under test can end a run."""
_BLOCKED_S = 0.5
"""How long a process that is blocked at the end of its time has until it is looked at again."""
_CHANNEL_GRACE_S = 1.0
_STACK_WAIT_S = 2.0
_STACK_SILENCE_S = 0.05
_SILENCE_S = 0.1
"""Without a word from the zygote, after which it is looked at whether it is stopped."""
_FORK_WAIT_S = 60.0
"""For a zygote that works off what others have asked of it, and forks in milliseconds."""
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
    longest_s: float | None = None,
) -> Hello | Answer | Fault | Died | TimedOut:
    """The executor's next message, or how it ended: by itself, or killed here for taking too long or too much memory.

    ``timeout_s`` is for each run of a call that says when one is over (`Progress`).

    What it waits for a CPU on a busy machine is not its own time, nor what it waits for a driver's lock: so much longer
    it may take, up to `_MOST_PATIENCE` times as long in all. Its time begins anew when a build ends (see `builds`),
    which may take `BUILD_PATIENCE_S`, unless the caller chooses to `give_up` before, or in the time that begins anew.
    With ``longest_s``, what it computes is not its own time either, up to so long in all. The limit of memory is for
    the process itself; what it starts may take what is free. A zygote that is stopped is made to go on.

    `ZygoteLostError` if the executor's end cannot be known, `ExecutorUnavailable` if it could not be forked.
    """
    builds = BuildWatch(link.pid) if builds is None else builds
    most_s = _MOST_PATIENCE * timeout_s if longest_s is None else max(longest_s, timeout_s)
    excused_s = functools.partial(_excused_s, link, computing=longest_s is not None)
    began, excused_before = time.monotonic(), excused_s()
    deadline, next_look = began + timeout_s, began + LOOK_EVERY_S
    first_deadline = deadline
    expired = False
    runs = 0
    while True:
        if isinstance(message := link.next_message(), Progress):
            runs += 1
            if runs <= _MOST_RUNS:
                began, excused_before = time.monotonic(), excused_s()
                deadline = began + timeout_s
        elif message is not None:
            return message
        if (died := _death(link, memory_limit_bytes)) is not None:
            return died
        now = time.monotonic()
        if expired or now >= next_look:
            next_look = now + LOOK_EVERY_S
            link.wake_zygote()
            if builds.look() and builds.seconds < BUILD_PATIENCE_S:
                began, excused_before = now, excused_s()
                expired = True  # so that the deadline is set anew
            if builds.takes_too_much_memory():
                return _kill_for(link, "children")
        if expired:
            ends = began + timeout_s + min(excused_s() - excused_before, most_s - timeout_s)
            if ends <= now < (last := began + most_s) and link.pid and is_blocked(link.pid):
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


def _excused_s(link: Link, *, computing: bool) -> float:
    """Seconds that the process has waited for a CPU so far, and has computed, if that is not its own time."""
    if link.pid is None:
        return 0.0
    return cpu_wait_s(link.pid) + (cpu_s(link.pid) if computing else 0.0)


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
    """Whether the executor is gone within so long. A zygote that is stopped, and would not say so, is made to go on."""
    deadline = time.monotonic() + timeout_s
    while not (ended := link.exit_status is not None or link.zygote_lost):
        if (remaining_s := deadline - time.monotonic()) <= 0:
            break
        if not link.pump(min(remaining_s, _SILENCE_S)):
            link.wake_zygote()
    return ended


_MAX_START_ATTEMPTS = 8
_MAX_KILLS_PER_CALL = 3
"""How often a call is begun, if each time something from outside ends the executor or its zygote."""
_STARTUP_TIMEOUT_S = 120.0


class Executor:
    """Runs the zygote's service in a process of its own, replaced by a fresh one whenever it dies.

    `environment` is set right after the fork, early enough for CUDA_VISIBLE_DEVICES. `memory_limit_bytes` bounds the
    resident memory of the process, that of imported libraries included (about 300 MB with torch); what it starts, a
    compiler, may take what the machine has free. It is checked every 20 ms during a call; RLIMIT_AS is no use, CUDA
    reserves more address space than there is memory. Not to be shared between threads.
    """

    def __init__(
        self,
        zygote: Zygote,
        *,
        environment: Mapping[str, str] | None = None,
        memory_limit_bytes: int | None = None,
        wait: bool = True,
    ) -> None:
        """With ``wait=False`` whoever calls it first waits until it has started."""
        if memory_limit_bytes is not None and memory_limit_bytes <= 0:
            raise ValueError(f"memory_limit_bytes={memory_limit_bytes!r} must be positive, or None for no limit")
        self._zygote = zygote
        self._fork_request = encode_fork_request(environment or {})
        self.memory_limit_bytes = memory_limit_bytes
        self._link: Link | None = None
        self._closed = False
        self._num_starts = 0
        self._num_calls = 0
        self.last_idle_death: Died | None = None
        if wait:
            self._start()

    @property
    def pid(self) -> int | None:
        """The executor's process ID; None after it died, until the next call."""
        return None if self._link is None else self._link.pid

    @property
    def memory_bytes(self) -> int:
        """Memory of the process and of those it has started; 0 after the process died, until the next call."""
        return 0 if self._link is None else self._link.memory_bytes()

    @property
    def restarts(self) -> int:
        """How many processes have taken the place of an earlier one."""
        return max(0, self._num_starts - 1)

    def call(
        self,
        method: str,
        payload: bytes,
        *,
        timeout_s: float,
        give_up: GiveUp = never,
        longest_s: float | None = None,
    ) -> Outcome:
        """Have the service handle `method` with `payload`, a JSON document. `give_up` says which builds to wait for.

        With `longest_s`, only the time counts against `timeout_s` in which the process does nothing, up to so long.

        After `Died` and `TimedOut` the next call goes to a fresh executor. A death between two calls belongs to
        neither: it is kept in `last_idle_death`. The call is repeated if the zygote dies or is stopped meanwhile, or if
        the executor dies of a SIGKILL that was not sent here: only if that happens three times is it taken for the
        doing of the call.
        `ServiceError` if the service raised, `ExecutorUnavailable` if no executor can be started.
        """
        self._num_calls += 1
        frame = _encode_request(self._num_calls, method, payload)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s!r} must be positive")
        try:
            outcome = self._call_until_heard(frame, timeout_s, give_up, longest_s)
        except BaseException:  # an interrupt, say: the answer to this call must not be taken for that to the next
            self._discard()
            raise
        if isinstance(outcome, Fault):
            raise ServiceError(f"the service raised in the executor:\n{outcome.traceback}")
        return outcome

    def distrust(self) -> Died:
        """End the process, whose latest answer is none that its service gives; how that counts."""
        died = Died(-signal.SIGKILL, "SIGKILL", "" if self._link is None else self._link.output(), "channel")
        self._end()
        return died

    def restart(self) -> None:
        """Replace the process by a fresh one."""
        self._end()
        self._start()

    def close(self) -> None:
        """End the process; the executor cannot be used again."""
        self._closed = True
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _call_until_heard(
        self, frame: bytes, timeout_s: float, give_up: GiveUp, longest_s: float | None
    ) -> Outcome | Fault:
        for _ in range(_MAX_KILLS_PER_CALL):
            link = self._live_link()
            link.forget_output()
            link.send(frame, self._num_calls)
            try:
                outcome: Outcome | Fault = self._outcome(link, timeout_s, give_up, longest_s)
            except ZygoteLostError:
                outcome = describe_death(link, "zygote")
                self._discard()
            if not was_killed_from_outside(outcome):
                return outcome
        self._end()  # it lives on where it has but stopped the zygote
        return outcome

    def _outcome(self, link: Link, timeout_s: float, give_up: GiveUp, longest_s: float | None) -> Outcome | Fault:
        builds = BuildWatch(link.pid)
        limit = self.memory_limit_bytes
        match await_message(link, timeout_s, limit, builds=builds, give_up=give_up, longest_s=longest_s):
            case Answer(body=body, last=last):
                if last:
                    self._end()
                elif link.wake_zygote():  # nobody is more likely to have stopped it than the code that just ran
                    return describe_death(link, "zygote")
                return Reply(bytes(body), builds.seconds)
            case Fault() as fault:
                return fault
            case Hello():  # sent once, before the first call, unless forged
                self._end()
                return describe_death(link, "channel")
            case Died() | TimedOut() as failure:
                self._discard()
                return failure

    def _live_link(self) -> Link:
        """The link to a live executor, a new one if that or its zygote died since the last call."""
        link = self._link
        if link is not None:
            link.pump(0)
            if link.exit_status is not None:
                self.last_idle_death = describe_death(link)
            if link.exit_status is not None or link.zygote_lost or link.channel_lost:
                self._discard()
        return self._link or self._start()

    def _start(self) -> Link:
        if self._closed:
            raise RuntimeError("the executor was closed; make a new one to go on")
        for _ in range(_MAX_START_ATTEMPTS):
            self._link = Link(self._zygote.connect(), self._fork_request)
            try:
                ready = self._await_hello(self._link)
            except ZygoteLostError:
                ready = False
                self._zygote.wait_ended(timeout_s=1.0)
            except BaseException:
                self._discard()
                raise
            if ready:
                self._num_starts += 1
                return self._link
            self._discard()
        raise ExecutorUnavailable(
            f"{_MAX_START_ATTEMPTS} executors in a row were killed, or their zygote was, before they were ready; "
            "look for what kills them (out of memory?)"
        )

    def _await_hello(self, link: Link) -> bool:
        """Whether the service is ready; not if something from outside killed the executor."""
        deadline = time.monotonic() + _FORK_WAIT_S
        while link.pid is None and link.fork_error is None and not link.zygote_lost:
            if time.monotonic() >= deadline:
                link.end_zygote()
            if not link.pump(_SILENCE_S):
                link.wake_zygote()
        first = await_message(link, _STARTUP_TIMEOUT_S, self.memory_limit_bytes)
        if isinstance(first, Fault):
            raise ServiceError(f"the service could not be made:\n{first.traceback}")
        if was_killed_from_outside(first):
            return False
        if not isinstance(first, Hello):
            raise ExecutorUnavailable(f"the executor ended before its service was ready: {first}")
        return True

    def _end(self) -> None:
        """Kill the process and wait until it is gone, so that what it held on a device is free again."""
        if self._link is not None:
            kill(self._link)
            self._discard()

    def _discard(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def _encode_request(number: int, method: str, payload: bytes) -> bytes:
    try:
        document = msgspec.json.decode(payload, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        raise ValueError(f"payload={payload[:80]!r} must be a JSON document: {error}") from None
    return encode_frame(msgspec.json.encode(Request(number, method, document)))
