"""The driver's handle on a zygote: start it, connect to it, start it again if it dies, end it."""

import contextlib
import socket
import subprocess
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, Self

from attnfuzz.execution.launch import LaunchSettings, ZygoteProcess
from attnfuzz.execution.outcomes import ExecutorUnavailable

__all__ = ["DEFAULT_PRELOAD", "Zygote"]

DEFAULT_PRELOAD = ("numpy", "torch", "triton")
"""Modules that the zygote imports, as far as they are installed, before it loads the service."""


class Zygote:
    """A running zygote, for any number of executors and threads of this process. Made by `Zygote.start`."""

    def __init__(self, settings: LaunchSettings, max_restarts: int) -> None:
        self._settings = settings
        self._max_restarts = max_restarts
        self._lock = threading.Lock()
        self._closed = False
        self.restarts = 0
        self._zygote = self._launch()

    @classmethod
    def start(
        cls,
        device: Literal["cpu", "cuda"] = "cpu",
        *,
        service: str,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        startup_timeout_s: float = 120.0,
        max_restarts: int = 3,
    ) -> Self:
        """Start a zygote and wait until it has imported everything.

        `service` is `module:attribute` or `path/to/file.py:attribute`; it is loaded in the zygote and instantiated in
        each executor. On "cpu" Triton interprets its kernels and no GPU is visible. A zygote that dies is started again
        up to `max_restarts` times in all. `ExecutorUnavailable` if it cannot be started.
        """
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device={device!r} must be 'cpu' or 'cuda'")
        return cls(LaunchSettings(device, service, tuple(preload), startup_timeout_s), max_restarts)

    @property
    def pid(self) -> int:
        """The zygote's process ID."""
        return self._zygote.process.pid

    def connect(self) -> socket.socket:
        """A new control connection, to a zygote started anew if need be; `ExecutorUnavailable` once too often."""
        with self._lock:
            if self._closed:
                raise ExecutorUnavailable("the zygote was closed; start a new one with Zygote.start()")
            while (connection := self._zygote.connect()) is None:
                self._restart()
            return connection

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the process to end; whether it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._zygote.process.wait(timeout_s)
        return self._zygote.process.returncode is not None

    def close(self) -> None:
        """End the zygote and with it every executor."""
        with self._lock:
            self._closed = True
            self._zygote.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _launch(self) -> ZygoteProcess:
        zygote = ZygoteProcess(self._settings)
        try:
            failure = zygote.await_ready()
        except BaseException:
            zygote.stop()
            raise
        if failure is not None:
            zygote.stop()
            raise ExecutorUnavailable(failure)
        return zygote

    def _restart(self) -> None:
        log = self._zygote.log_tail()
        self._zygote.stop()
        self._closed = True  # for good, unless the launch below succeeds
        if self.restarts >= self._max_restarts:
            raise ExecutorUnavailable(
                f"the zygote died {self.restarts + 1} times, more than max_restarts={self._max_restarts!r} allows; "
                f"look for what kills it (out of memory?). Its last output:\n{log}"
            )
        self.restarts += 1
        self._zygote = self._launch()
        self._closed = False
