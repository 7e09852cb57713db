"""The driver's handle on a zygote: start it, connect to it, start it again if it dies, end it."""

import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from attnfuzz.execution.launch import LaunchSettings, ZygoteProcess
from attnfuzz.execution.outcomes import ExecutorUnavailable
from attnfuzz.execution.process import why_no_proc

__all__ = ["DEFAULT_PRELOAD", "Zygote"]

DEFAULT_PRELOAD = ("numpy", "torch", "triton")
"""Modules that the zygote imports, as far as they are installed, before it loads the service."""

_SETTLED_S = 5.0
"""A zygote that lived this long is no sign that the next will die too."""


class Zygote:
    """A running zygote, for any number of executors and threads of this process. Made by `Zygote.start`."""

    def __init__(self, settings: LaunchSettings, max_restarts: int) -> None:
        self._settings = settings
        self._max_restarts = max_restarts
        self._lock = threading.Lock()
        self._closed = False
        self._given_up: str | None = None
        self._ready_at = 0.0
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
    ) -> Self:
        """Start a zygote and wait until it has imported everything.

        `service` is `module:attribute` or `path/to/file.py:attribute`; it is loaded in the zygote and instantiated in
        each executor. On "cpu" Triton interprets its kernels and no GPU is visible. A zygote that dies is started
        again, unless `max_restarts` have died in a row within seconds. `python`: an interpreter (`pythons.examine` has
        looked at it) in place of this process's own. `ExecutorUnavailable` if it cannot be started.
        """
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device={device!r} must be 'cpu' or 'cuda'")
        return cls(LaunchSettings(device, service, tuple(preload), startup_timeout_s, python), max_restarts)

    @property
    def pid(self) -> int:
        """The zygote's process ID."""
        return self._zygote.process.pid

    def connect(self) -> socket.socket:
        """A new control connection, to a zygote started anew if need be; `ExecutorUnavailable` once too often."""
        with self._lock:
            while True:
                self._check_usable()
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise ExecutorUnavailable("the zygote was closed; start a new one with Zygote.start()")
        if self._given_up is not None:
            raise ExecutorUnavailable(self._given_up)

    def _launch(self) -> None:
        """Start a zygote; again if it is killed before it is ready."""
        if (no_proc := why_no_proc()) is not None:
            raise ExecutorUnavailable(no_proc)
        while True:
            try:
                self._zygote = zygote = ZygoteProcess(self._settings)
            except OSError as error:
                raise ExecutorUnavailable(
                    f"the zygote cannot be started ({error}); free memory, process IDs or room for temporary files"
                ) from error
            try:
                failure = zygote.await_ready()
            except BaseException:
                zygote.stop()
                raise
            if failure is None:
                self._ready_at = time.monotonic()
                return
            killed = zygote.process.returncode == -signal.SIGKILL
            zygote.stop()
            if self._closed or not killed:
                self._given_up = failure
                raise ExecutorUnavailable(failure)
            self._count_death(failure)

    def _restart(self) -> None:
        log = self._zygote.log_tail()
        self._zygote.stop()
        if time.monotonic() - self._ready_at > _SETTLED_S:
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
