"""A worker as the coordinator holds it: its process, its channel and the zygote it borrows."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import msgspec

from attnfuzz import safe_start
from attnfuzz.campaign.channel import Channel, ChannelClosed
from attnfuzz.campaign.messages import FromWorker, Setup, Stop
from attnfuzz.campaign.zygote_broker import lend_connections
from attnfuzz.isolation.outcomes import signal_name
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.said import only_printable

__all__ = ["LastWords", "Launch", "WorkerHandle", "WorkerProcess"]

_LOG_TAIL_BYTES = 2000
_LENDER_WAIT_S = 0.2
"""It ends by itself once its zygote has started; nothing waits for that."""


@dataclass(frozen=True, slots=True)
class LastWords:
    """The last of what a worker wrote, and the signal that had ended it before it was killed here, if one had."""

    tail: str
    signal_name: str | None = None


class WorkerHandle(Protocol):
    """What the coordinator needs of a worker."""

    channel: Channel[FromWorker]

    def stop(self) -> None:
        """Ask it to end; it may be gone already."""

    def kill(self, *, grace_s: float = 0.0) -> LastWords:
        """Make sure it has ended, which it may still do by itself within ``grace_s``."""


class Launch(Protocol):
    """Starts a worker. Raises OSError where the system has no process, memory or file descriptor left for it."""

    def __call__(self, setup: Setup) -> WorkerHandle: ...


class WorkerProcess:
    """``python -m attnfuzz.campaign.worker`` in a session of its own, so that Ctrl-C is the coordinator's to handle.

    A thread lends it connections to the zygote, so that nobody else waits while a zygote that died starts again.
    """

    def __init__(self, setup: Setup, zygote: Zygote, scratch: Path) -> None:
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
        self._lender = threading.Thread(target=lend_connections, args=(zygote, self._broker), daemon=True)
        try:
            self._lender.start()
        except RuntimeError as error:  # "can't start new thread"
            self.kill()
            raise OSError(errno.EAGAIN, str(error)) from error
        with contextlib.suppress(ChannelClosed):  # it has ended already: noticed when it is listened to
            self.channel.send(setup)

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
        if self._lender.ident is not None:
            self._lender.join(_LENDER_WAIT_S)
        self._broker.close()
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - _LOG_TAIL_BYTES))
        tail = only_printable(self._log.read().decode(errors="backslashreplace")).strip()
        self._log.close()
        return LastWords(tail, signal_name(status) if status is not None else None)
