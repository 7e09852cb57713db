"""One zygote process as its driver started it: its socket, its lifeline and its log."""

import os
import select
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from attnfuzz import safe_start
from attnfuzz.execution.claims import PrivateFolder
from attnfuzz.said import only_printable

__all__ = ["LaunchSettings", "ZygoteProcess"]

_MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes (unix(7))
_LOG_TAIL_BYTES = 4000
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """What a zygote is started with; see `Zygote.start`."""

    device: str
    service: str
    preload: tuple[str, ...]
    startup_timeout_s: float
    python: Path | None = None


class ZygoteProcess:
    """Starts a zygote; `await_ready` before the first `connect`, `stop` at the end."""

    def __init__(self, settings: LaunchSettings) -> None:
        self._settings = settings
        self._folder = _private_folder()
        self._socket_path = self._folder.path / "zygote.sock"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        self.process = subprocess.Popen(
            _command(self._socket_path, settings),
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
        if not poller.poll(self._settings.startup_timeout_s * 1000):
            return (
                f"the zygote was not ready within startup_timeout_s={self._settings.startup_timeout_s!r}; "
                f"raise that limit, or find what takes so long to import. Its output:\n{self.log_tail()}"
            )
        if os.read(stdout.fileno(), 64):
            return None
        return (
            f"the zygote ended with status {self.process.wait()} while importing {list(self._settings.preload)} and "
            f"service {self._settings.service!r}; repair what its output shows:\n{self.log_tail()}"
        )

    def connect(self) -> socket.socket | None:
        """A new control connection; None if the process has ended."""
        if self.process.poll() is not None:
            return None
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


def _command(socket_path: Path, settings: LaunchSettings) -> list[str]:
    preload = [argument for name in settings.preload for argument in ("--preload", name)]
    python = None if settings.python is None else os.fspath(settings.python)
    module = safe_start.command("attnfuzz.execution.zygote", os.fspath(socket_path), python=python)
    return [*module, "--service", settings.service, "--device", settings.device, *preload]
