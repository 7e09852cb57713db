"""An isolated process that answers calls, and dies alone."""

import signal
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import msgspec

from attnfuzz.execution.builds import BuildWatch, GiveUp, never
from attnfuzz.execution.framing import encode_frame
from attnfuzz.execution.link import Link
from attnfuzz.execution.messages import Answer, Fault, Hello, Request, encode_fork_request
from attnfuzz.execution.outcomes import Died, ExecutorUnavailable, Outcome, Reply, ServiceError, TimedOut
from attnfuzz.execution.watchdog import ZygoteLostError, await_message, describe_death, kill, was_killed_from_outside
from attnfuzz.execution.zygote_client import Zygote

__all__ = ["Executor"]

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
    ) -> None:
        if memory_limit_bytes is not None and memory_limit_bytes <= 0:
            raise ValueError(f"memory_limit_bytes={memory_limit_bytes!r} must be positive, or None for no limit")
        self._zygote = zygote
        self._fork_request = encode_fork_request(environment or {})
        self._memory_limit_bytes = memory_limit_bytes
        self._link: Link | None = None
        self._closed = False
        self._num_starts = 0
        self._num_calls = 0
        self.last_idle_death: Died | None = None
        self._start()

    @property
    def pid(self) -> int | None:
        """The executor's process ID; None after it died, until the next call."""
        return None if self._link is None else self._link.pid

    @property
    def memory_bytes(self) -> int:
        """Of the process and of what it has started; 0 after the process died, until the next call."""
        return 0 if self._link is None else self._link.memory_bytes()

    @property
    def restarts(self) -> int:
        """How many processes have taken the place of an earlier one."""
        return max(0, self._num_starts - 1)

    def call(self, method: str, payload: bytes, *, timeout_s: float, give_up: GiveUp = never) -> Outcome:
        """Have the service handle `method` with `payload`, a JSON document. `give_up` says which builds to wait for.

        After `Died` and `TimedOut` the next call goes to a fresh executor. A death between two calls belongs to
        neither: it is kept in `last_idle_death`. The call is repeated if the zygote dies meanwhile, or the executor of
        a SIGKILL that was not sent here: only if that happens three times is it taken for the doing of the call.
        `ServiceError` if the service raised, `ExecutorUnavailable` if no executor can be started.
        """
        self._num_calls += 1
        frame = _encode_request(self._num_calls, method, payload)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s!r} must be positive")
        try:
            outcome = self._call_until_heard(frame, timeout_s, give_up)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call_until_heard(self, frame: bytes, timeout_s: float, give_up: GiveUp) -> Outcome | Fault:
        for _ in range(_MAX_KILLS_PER_CALL):
            link = self._live_link()
            link.forget_output()
            link.send(frame, self._num_calls)
            try:
                outcome: Outcome | Fault = self._outcome(link, timeout_s, give_up)
            except ZygoteLostError:
                outcome = describe_death(link, "zygote")
                self._discard()
            if not was_killed_from_outside(outcome):
                break
        return outcome

    def _outcome(self, link: Link, timeout_s: float, give_up: GiveUp) -> Outcome | Fault:
        builds = BuildWatch(link.pid)
        match await_message(link, timeout_s, self._memory_limit_bytes, builds=builds, give_up=give_up):
            case Answer(body=body, last=last):
                if last:
                    self._end()
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
        first = await_message(link, _STARTUP_TIMEOUT_S, self._memory_limit_bytes)
        if isinstance(first, Fault):
            raise ServiceError(f"the service could not be made:\n{first.traceback}")
        if was_killed_from_outside(first):
            return False
        if not isinstance(first, Hello):
            raise ExecutorUnavailable(f"the executor ended before its service was ready: {first}")
        # The greeting may be read before the zygote's notice of the process ID: they come on two sockets.
        while link.pid is None and not link.zygote_lost:
            link.pump(1.0)
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
