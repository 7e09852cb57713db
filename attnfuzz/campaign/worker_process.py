"""A worker as the coordinator holds it: its process, its channel and the zygote it borrows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Protocol

import msgspec

import attnfuzz
from attnfuzz.campaign.channel import Channel
from attnfuzz.campaign.messages import FromWorker, Setup, Stop
from attnfuzz.campaign.zygote_broker import lend_connection
from attnfuzz.execution.zygote_client import Zygote

__all__ = ["Launch", "WorkerHandle", "WorkerProcess"]

_LOG_TAIL_BYTES = 2000


class WorkerHandle(Protocol):
    """What the coordinator needs of a worker."""

    channel: Channel[FromWorker]

    @property
    def broker(self) -> socket.socket | None:
        """Where it asks for connections to the zygote."""

    def lend(self) -> bool:
        """Answer a request on ``broker``; False once it is closed."""

    def stop(self) -> None:
        """Ask it to end; it may be gone already."""

    def kill(self) -> str:
        """Make sure it has ended, and return the last of what it wrote."""


class Launch(Protocol):
    """Starts a worker."""

    def __call__(self, setup: Setup) -> WorkerHandle: ...


class WorkerProcess:
    """``python -m attnfuzz.campaign.worker`` in a session of its own, so that Ctrl-C is the coordinator's to handle."""

    def __init__(self, setup: Setup, zygote: Zygote, scratch: Path) -> None:
        self._zygote = zygote
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill()
        mine, channel = socket.socketpair()
        self.broker, broker = socket.socketpair()
        with channel, broker:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "attnfuzz.campaign.worker", str(channel.fileno()), str(broker.fileno())],
                pass_fds=(channel.fileno(), broker.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=_environment(scratch),
                start_new_session=True,
            )
        self.channel = Channel(mine, msgspec.json.Decoder(FromWorker))
        self.channel.send(setup)

    def lend(self) -> bool:
        """Hand a connection to the zygote to the worker."""
        return lend_connection(self._zygote, self.broker)

    def stop(self) -> None:
        """Ask it to end."""
        try:
            self.channel.send(Stop())
        except ConnectionError:  # it has ended: that is what was asked for
            return

    def kill(self) -> str:
        """Kill the process if it still runs, and return the last of its output."""
        self._process.kill()
        self._process.wait()
        self.channel.close()
        self.broker.close()
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - _LOG_TAIL_BYTES))
        tail = self._log.read().decode(errors="backslashreplace").strip()
        self._log.close()
        return tail


def _environment(scratch: Path) -> dict[str, str]:
    """In which attnfuzz can be imported from a clone, and Hypothesis keeps its files out of the user's folder."""
    root = Path(attnfuzz.__file__).parent.parent
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
    }
