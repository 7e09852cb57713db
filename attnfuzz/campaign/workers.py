"""The workers of a campaign: how many there are, their processes, and the zygote that they borrow.

There is one for each core, as far as GPUs have memory for them. One zygote serves all workers: the coordinator owns it
and hands out connections to it as file descriptors. A worker so needs none of its own (seconds of imports and 300 MB
each), and one that dies is started again in one place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self, TypeAlias

import msgspec

from attnfuzz import safe_start
from attnfuzz.campaign.messages import Channel, ChannelClosed, FromWorker, Setup, Stop, Warm
from attnfuzz.isolation.devices import Gpu
from attnfuzz.isolation.outcomes import ExecutorUnavailable, signal_name
from attnfuzz.isolation.process import is_stopped
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.untrusted_text import only_printable

_EXECUTOR_BYTES = 3 << 29
"""GPU memory for one executor: about 0.6 GB of context and, most of the time, less than 1 GB of tensors."""
_MOST_PER_GPU = 32


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """Workers in all, and why so many; empty if they were asked for."""

    workers: int
    reason: str

    @property
    def sentence(self) -> str:
        """Both in one line."""
        return f"{self.workers} worker{'' if self.workers == 1 else 's'}, {self.reason}"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def by_formula(num_cores: int, gpus: Sequence[Gpu]) -> WorkerChoice:
    """One worker for each core, shared out among the GPUs, but no more on one than its memory holds."""
    if not gpus:
        return WorkerChoice(num_cores, "one for each CPU core")
    per_gpu = max(1, min(num_cores // len(gpus), _MOST_PER_GPU, *map(_held_by_memory, gpus)))
    total = per_gpu * len(gpus)
    return WorkerChoice(total, f"{per_gpu} for each GPU: by CPU cores and GPU memory")


def _held_by_memory(gpu: Gpu) -> int:
    free = gpu.free_bytes if gpu.free_bytes is not None else gpu.memory_bytes
    return _MOST_PER_GPU if free is None else max(1, free // _EXECUTOR_BYTES)


_MAX_FUTILE_STARTS = 4
"""Starts in a row of one worker, none of which led to a single case, before it is given up."""
_MAX_FUTILE_STARTS_WHEN_KILLED = 25
"""Most such starts of a worker that is killed each time: whoever does that may stop."""
_GRACE_S = 1.0
_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0


@dataclass(slots=True)
class _WorkerSlot:
    """One worker's place, whoever fills it. ``futile`` counts starts since it last judged a case."""

    handle: WorkerProcess | None = None
    starts: int = 0
    futile: int = 0
    start_at: float | None = None


class Workers:
    """``size`` workers, started by ``launch`` with what ``setup_for(number, starts)`` says."""

    def __init__(
        self,
        size: int,
        *,
        launch: StartWorker,
        setup_for: Callable[[int, int], Setup],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launch = launch
        self._setup_for = setup_for
        self._clock = clock
        self._places = {number: _WorkerSlot(start_at=clock()) for number in range(size)}
        self._selector = selectors.DefaultSelector()

    @property
    def working(self) -> list[int]:
        """Workers that run."""
        return [number for number, place in self._places.items() if place.handle is not None]

    @property
    def is_lost(self) -> bool:
        """Whether no worker runs and none will be started again."""
        return all(place.handle is None and place.start_at is None for place in self._places.values())

    def start_due(self) -> list[int]:
        """Start the workers whose time it is. Raises OSError if the system cannot, unless one runs or will later."""
        return [
            number
            for number, place in self._places.items()
            if place.start_at is not None and self._clock() >= place.start_at and self._start(number, place)
        ]

    def receive(self, timeout_s: float) -> Iterable[tuple[int, list[FromWorker] | None]]:
        """Messages that workers send within ``timeout_s``; None from one that has hung up."""
        for key, _ in self._selector.select(timeout_s):
            number: int = key.data
            handle = self._places[number].handle
            if handle is None:  # lost earlier in this very loop
                continue
            try:
                yield number, handle.channel.receive()
            except (ChannelClosed, msgspec.DecodeError):  # the latter: its memory or its channel is broken
                yield number, None

    def send(self, number: int, message: msgspec.Struct) -> None:
        """Tell one worker; that it is gone is noticed when it is listened to."""
        handle = self._places[number].handle
        if handle is not None:
            with contextlib.suppress(ChannelClosed):  # noticed when it is listened to
                handle.channel.send(message)

    def broadcast(self, message: msgspec.Struct, *, but: int | None = None) -> None:
        """Tell all workers, except ``but``."""
        for number in self.working:
            if number != but:
                self.send(number, message)

    def flush(self) -> None:
        """Pass on what busy workers could not take so far."""
        for place in self._places.values():
            if place.handle is not None:
                with contextlib.suppress(ChannelClosed):  # noticed when it is listened to, as in `send`
                    place.handle.channel.flush()

    def end_stopped(self) -> None:
        """Kill workers that somebody has stopped, which is noticed when they are listened to."""
        for place in self._places.values():
            if place.handle is not None:
                place.handle.end_if_stopped()

    def stop(self) -> None:
        """Ask all to end, and start none again."""
        for place in self._places.values():
            place.start_at = None
            if place.handle is not None:
                place.handle.stop()

    def has_judged(self, number: int) -> None:
        """Note that a worker gets somewhere."""
        self._places[number].futile = 0

    def lose(self, number: int, *, hung_up: bool = False) -> LastWords:
        """Make sure that a worker has ended; one that has hung up is doing so."""
        place = self._places[number]
        if place.handle is None:
            raise RuntimeError(f"worker {number} does not run")
        handle, place.handle = place.handle, None
        self._selector.unregister(handle.channel)
        return handle.kill(grace_s=_GRACE_S if hung_up else 0.0)

    def start_again(self, number: int, *, killed: bool = False) -> bool:
        """Have a lost worker started again, after a pause if that is in vain; whether it will be."""
        place = self._places[number]
        if place.futile >= (_MAX_FUTILE_STARTS_WHEN_KILLED if killed else _MAX_FUTILE_STARTS):
            return False
        pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2**place.futile) if place.futile > 1 else 0.0
        place.start_at = self._clock() + pause_s
        return True

    def give_up(self, number: int) -> bool:
        """Never start a worker again; whether it still runs."""
        self._places[number].start_at = None
        self._places[number].futile = _MAX_FUTILE_STARTS_WHEN_KILLED
        return self._places[number].handle is not None

    def close(self) -> None:
        """End all workers."""
        for number in self.working:
            self.lose(number)
        self._selector.close()

    def _start(self, number: int, place: _WorkerSlot) -> bool:
        place.start_at = None
        place.starts += 1
        place.futile += 1
        try:
            place.handle = self._launch(self._setup_for(number, place.starts - 1))
        except OSError:
            if not self.start_again(number) and self.is_lost:
                raise
            return False
        self._selector.register(place.handle.channel, selectors.EVENT_READ, number)
        return True


_LOG_TAIL_BYTES = 2000
_LENDER_WAIT_S = 0.2
"""It ends by itself once its zygote has started; nothing waits for that."""


@dataclass(frozen=True, slots=True)
class LastWords:
    """The last of what a worker wrote, and the signal that had ended it before it was killed here, if one had."""

    tail: str
    signal_name: str | None = None


StartWorker: TypeAlias = "Callable[[Setup], WorkerProcess]"
"""Starts a worker. Raises OSError where the system has no process, memory or file descriptor left for it."""


class WorkerProcess:
    """``python -m attnfuzz.campaign.worker`` in a session of its own, so that Ctrl-C is the coordinator's to handle.

    Until it is told to `warm` up or to `begin` it imports what it needs. From then on a thread lends it connections to
    the zygote, so that nobody else waits while a zygote that died starts again.
    """

    def __init__(self, scratch: Path) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill()
        mine, channel = socket.socketpair()
        self._broker, broker = socket.socketpair()
        with channel, broker:
            self._process = subprocess.Popen(
                safe_start.command("attnfuzz.campaign.worker", str(channel.fileno()), str(broker.fileno())),
                pass_fds=(channel.fileno(), broker.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # Hypothesis keeps its files out of the user's folder
                env={**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis")},
                start_new_session=True,
            )
        self.channel = Channel(mine, msgspec.json.Decoder(FromWorker), patient=False)
        self._lender: threading.Thread | None = None

    def warm(self, device_id: str, zygote: Zygote, targets: Sequence[str]) -> None:
        """Have it start CUDA on a GPU and import kernels before it can begin.

        Raises OSError where there is no thread left for it.
        """
        self._lend(zygote)
        with contextlib.suppress(ChannelClosed):  # as in `begin`
            self.channel.send(Warm(device_id=device_id, targets=tuple(targets)))

    def begin(self, setup: Setup, zygote: Zygote) -> None:
        """Have it search. Raises OSError where there is no thread left for it."""
        if self._lender is None:
            self._lend(zygote)
        with contextlib.suppress(ChannelClosed):  # it has ended already: noticed when it is listened to
            self.channel.send(setup)

    def _lend(self, zygote: Zygote) -> None:
        lender = threading.Thread(target=lend_connections, args=(zygote, self._broker), daemon=True)
        try:
            lender.start()
        except RuntimeError as error:  # "can't start new thread"
            self.kill()
            raise OSError(errno.EAGAIN, str(error)) from error
        self._lender = lender

    def end_if_stopped(self) -> None:
        """Send SIGKILL if it stands still, as SIGSTOP has it; all else is for when it has hung up."""
        if is_stopped(self._process.pid):
            self._process.kill()

    def stop(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(ChannelClosed):  # it has ended: that is what was asked for
            self.channel.send(Stop())

    def kill(self, *, grace_s: float = 0.0) -> LastWords:
        """Kill the process if it still runs after ``grace_s``, and return the last of its output."""
        try:
            status: int | None = self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            status = None
            self._process.kill()
            self._process.wait()
        self.channel.close()
        with contextlib.suppress(OSError):  # the worker hung up first
            self._broker.shutdown(socket.SHUT_RDWR)
        if self._lender is not None:
            self._lender.join(_LENDER_WAIT_S)
        self._broker.close()
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - _LOG_TAIL_BYTES))
        tail = only_printable(self._log.read().decode(errors="backslashreplace")).strip()
        self._log.close()
        return LastWords(tail, signal_name(status) if status is not None else None)


class WorkerPool:
    """Worker processes, of which some import what they need while nothing can be told to them yet. A context manager.

    ``scratch`` is a folder for what they keep while they run.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._idle: list[WorkerProcess] = []

    def prepare(self, number: int) -> None:
        """Have so many, and no more. What the system has no room for now is started when it is launched, or never."""
        while len(self._idle) > number:
            self._idle.pop().kill()
        with contextlib.suppress(OSError):
            while len(self._idle) < number:
                self._idle.append(WorkerProcess(self._scratch))

    def warm(self, device_ids: Sequence[str], zygote: Zygote, targets: Sequence[str]) -> None:
        """Have those that there are start CUDA on the GPUs in turn, in the order in which they will be launched, and
        import the kernels that ``targets`` name."""
        for number, process in enumerate(list(self._idle)):
            try:
                process.warm(device_ids[number % len(device_ids)], zygote, targets)
            except OSError:  # there is no thread left for it, and it was ended
                self._idle.remove(process)

    def launch(self, setup: Setup, zygote: Zygote) -> WorkerProcess:
        """A worker that does as ``setup`` says. Raises OSError."""
        process = self._idle.pop(0) if self._idle else WorkerProcess(self._scratch)
        process.begin(setup, zygote)
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.prepare(0)


_MAX_REASON_BYTES = 1 << 14
_TIMEOUT_S = 300.0


def lend_connection(zygote: Zygote, broker: socket.socket) -> bool:
    """Answer one request on ``broker``, the coordinator's end; False once the worker has hung up."""
    try:
        if not broker.recv(1):
            return False
        try:
            connection = zygote.connect()
        except ExecutorUnavailable as error:
            broker.sendall(str(error).encode()[:_MAX_REASON_BYTES])
            return True
        with connection:
            socket.send_fds(broker, [b"\0"], [connection.fileno()])
    except OSError:
        return False
    return True


def lend_connections(zygote: Zygote, broker: socket.socket) -> None:
    """Answer requests on ``broker`` until the worker hangs up."""
    while lend_connection(zygote, broker):
        pass


class BorrowedZygote:
    """A worker's stand-in for the coordinator's zygote; ``broker`` is the worker's end of a socket pair."""

    def __init__(self, broker: socket.socket) -> None:
        self._broker = broker
        self._broker.settimeout(_TIMEOUT_S)

    def connect(self) -> socket.socket:
        """A new control connection. ExecutorUnavailable if none can be had."""
        try:
            self._broker.sendall(b"?")
            reason, descriptors, _, _ = socket.recv_fds(self._broker, _MAX_REASON_BYTES, 1)
        except OSError as error:
            raise ExecutorUnavailable(f"the coordinator lent no zygote ({error}); start the campaign again") from error
        if not descriptors:
            text = reason.decode(errors="replace") or "the coordinator has ended"
            raise ExecutorUnavailable(text)
        return socket.socket(fileno=descriptors[0])

    def wait_ended(self, timeout_s: float) -> bool:
        """Whether the zygote is known to have ended: never, the next connection is to a live one."""
        return False
