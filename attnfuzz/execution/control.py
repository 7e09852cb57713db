"""A driver's control connection, as the zygote holds it."""

import contextlib
import os
import signal
import socket

import msgspec

from attnfuzz.execution.messages import MAX_CONTROL_BYTES, MAX_DESCRIPTORS, ControlReply, ControlRequest
from attnfuzz.execution.process import kill_group

__all__ = ["ControlConnection"]


class ControlConnection:
    """The connection and the executor forked for it; `pid` is None before the fork and after the executor is reaped."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.pid: int | None = None
        self.connected = True

    def receive(self) -> tuple[ControlRequest | None, list[int]]:
        """The next message and its file descriptors; None if the driver hung up or sent something else."""
        descriptors: list[int] = []
        try:
            packet, descriptors, _, _ = socket.recv_fds(self.stream, MAX_CONTROL_BYTES, MAX_DESCRIPTORS)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            return msgspec.json.decode(packet, type=ControlRequest), descriptors
        except (ConnectionError, msgspec.DecodeError):
            return None, descriptors

    def send(self, message: ControlReply) -> None:
        """Tell the driver, if it is still there; that it is not shows when its end of the connection closes."""
        with contextlib.suppress(OSError):
            self.stream.send(msgspec.json.encode(message))

    def signal_executor(self, number: int) -> None:
        """Signal the executor, its whole process group if `number` is SIGKILL. Nothing if there is none (any more)."""
        if self.pid is None:
            return
        if number == signal.SIGKILL:
            kill_group(self.pid)
        else:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
                os.kill(self.pid, number)

    def close(self) -> None:
        """Hang up."""
        self.connected = False
        self.stream.close()
