"""One zygote for all workers: the coordinator owns it and hands out connections to it as file descriptors.

A worker so needs no zygote of its own (seconds of imports and 300 MB each), and a zygote that dies is started again in
one place.
"""

from __future__ import annotations

import socket

from attnfuzz.isolation.outcomes import ExecutorUnavailable
from attnfuzz.isolation.zygote_client import Zygote

__all__ = ["BorrowedZygote", "lend_connection", "lend_connections"]

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
