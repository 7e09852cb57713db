"""The driver's handle on a zygote: start it, connect to it, start it again if it dies, end it."""

import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Literal, Self

from attnfuzz import safe_start
from attnfuzz.isolation.claims import PrivateFolder
from attnfuzz.isolation.outcomes import ExecutorUnavailable
from attnfuzz.isolation.process import is_stopped, why_no_proc
from attnfuzz.untrusted_text import only_printable

_MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes (unix(7))
_LOG_TAIL_BYTES = 4000
_STOP_S = 5.0

DEFAULT_PRELOAD = ("numpy", "torch", "triton")
"""Modules that the zygote imports, as far as they are installed, before it loads the service."""

_SETTLED_S = 5.0
"""A zygote that lived this long is no sign that the next will die too."""


class ZygoteProcess:
    """Starts a zygote; `await_ready` before the first `connect`, `stop` at the end."""

    def __init__(
        self,
        device: str,
        *,
        service: str,
        preload: tuple[str, ...] = (),
        startup_timeout_s: float = 120.0,
        python: Path | None = None,
    ) -> None:
        """See `Zygote.start`."""
        self._startup_timeout_s = startup_timeout_s
        self._imports = f"{list(preload)} and service {service!r}"
        self._folder = _private_folder()
        self._socket_path = self._folder.path / "zygote.sock"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        self.process = subprocess.Popen(
            [
                *safe_start.command("attnfuzz.isolation.zygote", os.fspath(self._socket_path), python=python),
                *("--service", service, "--device", device),
                *(argument for name in preload for argument in ("--preload", name)),
            ],
            stdin=subprocess.PIPE,  # the zygote ends when this closes, however this process ends
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is the driver's to handle
        )

    def await_ready(self) -> str | None:
        """Wait until connections are accepted; the reason if they never will be."""
        stdout = self.process.stdout
        if stdout is None:  # Popen's type allows it; with PIPE it cannot be
            return "the zygote was started without a pipe for its readiness"
        poller = select.poll()
        poller.register(stdout, select.POLLIN)
        if not poller.poll(self._startup_timeout_s * 1000):
            return (
                f"the zygote was not ready within startup_timeout_s={self._startup_timeout_s!r}; "
                f"raise that limit, or find what takes so long to import. Its output:\n{self.log_tail()}"
            )
        if os.read(stdout.fileno(), 64):
            return None
        return (
            f"the zygote ended with status {self.process.wait()} while importing {self._imports}; "
            f"repair what its output shows:\n{self.log_tail()}"
        )

    @property
    def has_said(self) -> bool:
        """Whether `await_ready` would not wait."""
        poller = select.poll()
        if self.process.stdout is not None:
            poller.register(self.process.stdout, select.POLLIN)
        return bool(poller.poll(0))

    def connect(self) -> socket.socket | None:
        """A new control connection; None if the process has ended. One that is stopped is made to go on."""
        if self.process.poll() is not None:
            return None
        if is_stopped(self.process.pid):
            self.process.send_signal(signal.SIGCONT)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(os.fspath(self._socket_path))
        except (ConnectionError, FileNotFoundError):
            connection.close()
            return None
        return connection

    def log_tail(self) -> str:
        """The last of what the zygote wrote to stdout and stderr."""
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - _LOG_TAIL_BYTES))
        return only_printable(self._log.read().decode(errors="backslashreplace")).strip() or "(none)"

    def stop(self) -> None:
        """End the process, and with it its executors; may be called again."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.send_signal(signal.SIGCONT)  # in case that it is stopped
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
        self._folder.remove()


def _private_folder() -> PrivateFolder:
    """With a path short enough for a socket in it."""
    folder = PrivateFolder()
    if len(os.fsencode(folder.path)) < _MAX_SOCKET_PATH - len("/zygote.sock"):
        return folder
    folder.remove()
    return PrivateFolder(Path("/tmp"))


class Zygote:
    """A zygote, for any number of executors and threads of this process. Made by `Zygote.start`."""

    def __init__(self, start_process: Callable[[], ZygoteProcess], max_restarts: int) -> None:
        self._start_process = start_process
        self._max_restarts = max_restarts
        self._lock = threading.Lock()
        self._closed = False
        self._given_up: str | None = None
        self._ready_at: float | None = None
        self._deaths_in_a_row = 0
        self.restarts = 0
        self._launch()

    @classmethod
    def start(
        cls,
        device: Literal["cpu", "cuda"] = "cpu",
        *,
        service: str,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        startup_timeout_s: float = 120.0,
        max_restarts: int = 3,
        python: Path | None = None,
        wait: bool = True,
    ) -> Self:
        """Start a zygote and wait until it has imported everything; or else whoever connects to it first waits.

        `service` is `module:attribute` or `path/to/file.py:attribute`; it is loaded in the zygote and instantiated in
        each executor. On "cpu" Triton interprets its kernels and no GPU is visible. A zygote that dies is started
        again, unless `max_restarts` have died in a row within seconds. `python`: an interpreter (`pythons.examine` has
        looked at it) in place of this process's own. `ExecutorUnavailable` if it cannot be started.
        """
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device={device!r} must be 'cpu' or 'cuda'")
        start_process = functools.partial(
            ZygoteProcess,
            device,
            service=service,
            preload=tuple(preload),
            startup_timeout_s=startup_timeout_s,
            python=python,
        )
        zygote = cls(start_process, max_restarts)
        if wait:
            zygote.await_ready()
        return zygote

    @property
    def pid(self) -> int:
        """The zygote's process ID."""
        return self._zygote.process.pid

    @property
    def is_ready(self) -> bool:
        """Whether nobody would have to wait for imports."""
        return self._ready_at is not None or self._zygote.has_said

    def await_ready(self) -> None:
        """Wait until everything is imported; `ExecutorUnavailable` if that fails. What has failed is ended."""
        try:
            with self._lock:
                self._check_usable()
                self._await_imports()
        except BaseException:
            self.close()
            raise

    def connect(self) -> socket.socket:
        """A new control connection, to a zygote started anew if need be; `ExecutorUnavailable` once too often."""
        with self._lock:
            while True:
                self._check_usable()
                self._await_imports()
                if (connection := self._zygote.connect()) is not None:
                    return connection
                self._restart()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the process to end; whether it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._zygote.process.wait(timeout_s)
        return self._zygote.process.returncode is not None

    def close(self) -> None:
        """End the zygote and with it every executor; at once, also while another thread waits for it to start."""
        self._closed = True
        if not self._lock.acquire(blocking=False):
            self._zygote.process.kill()
            self._lock.acquire()
        try:
            self._zygote.stop()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise ExecutorUnavailable("the zygote was closed; start a new one with Zygote.start()")
        if self._given_up is not None:
            raise ExecutorUnavailable(self._given_up)

    def _launch(self) -> None:
        if (no_proc := why_no_proc()) is not None:
            raise ExecutorUnavailable(no_proc)
        self._ready_at = None
        try:
            self._zygote = self._start_process()
        except OSError as error:
            raise ExecutorUnavailable(
                f"the zygote cannot be started ({error}); free memory, process IDs or room for temporary files"
            ) from error

    def _await_imports(self) -> None:
        """Wait for the zygote's imports; it is started again if it is killed before they are done."""
        while self._ready_at is None:
            zygote = self._zygote
            failure = zygote.await_ready()
            if failure is None:
                self._ready_at = time.monotonic()
                return
            killed = zygote.process.returncode == -signal.SIGKILL
            zygote.stop()
            if self._closed or not killed:
                self._given_up = failure
                raise ExecutorUnavailable(failure)
            self._count_death(failure)
            self._launch()

    def _restart(self) -> None:
        log = self._zygote.log_tail()
        self._zygote.stop()
        if self._ready_at is not None and time.monotonic() - self._ready_at > _SETTLED_S:
            self._deaths_in_a_row = 0
        self._count_death(log)
        self._launch()

    def _count_death(self, log: str) -> None:
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > self._max_restarts:
            self._given_up = (
                f"the zygote died {self._deaths_in_a_row} times, more than max_restarts={self._max_restarts!r} allows "
                f"within seconds; look for what kills it (out of memory?). Its last output:\n{log}"
            )
            raise ExecutorUnavailable(self._given_up)
        self.restarts += 1
