"""JSON lines over a socket between the coordinator and a worker."""

from __future__ import annotations

import select
import socket
import time
from typing import Generic, TypeVar

import msgspec

__all__ = ["Channel", "ChannelClosed"]

_READ_BYTES = 1 << 16

In = TypeVar("In")


class ChannelClosed(ConnectionError):  # noqa: N818 - a condition, named for what the caller sees
    """The other side is gone."""


class Channel(Generic[In]):
    """Sends any message and receives those that ``decoder`` knows. Raises ChannelClosed once the other side is gone.

    A side that is not ``patient`` never waits for the other to read: what does not fit into the socket is kept, and
    sent with what follows or by ``flush``. If both sides waited for each other to read, neither would.
    """

    def __init__(self, connection: socket.socket, decoder: msgspec.json.Decoder[In], *, patient: bool = True) -> None:
        self._connection = connection
        self._decoder = decoder
        self._buffer = bytearray()
        self._unsent = bytearray()
        self._patient = patient
        self._early: list[In] = []
        self._ended = False
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)

    def fileno(self) -> int:
        """The socket's file descriptor, for select."""
        return self._connection.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send one message."""
        self._unsent += msgspec.json.encode(message) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what could not be sent before, all of it on a side that is patient."""
        flags = 0 if self._patient else socket.MSG_DONTWAIT
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent, flags)]
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed(f"cannot send: {error}") from error

    def receive(self, timeout_s: float = 0.0, *, most: int | None = None) -> list[In]:
        """The messages that have arrived, after waiting up to ``timeout_s`` for the first.

        With ``most``, those beyond it are left for the next time.
        """
        if self._early:
            early, self._early = self._early[:most], self._early[most:] if most is not None else []
            return early
        if b"\n" in self._buffer:
            timeout_s = 0.0
        while not self._ended and self._poller.poll(1000 * timeout_s):
            try:
                data = self._connection.recv(_READ_BYTES)
            except OSError as error:
                raise ChannelClosed(f"cannot receive: {error}") from error
            self._ended = not data
            self._buffer += data
            timeout_s = 0.0
        *lines, rest = self._buffer.split(b"\n")
        taken = lines[:most]
        self._buffer = bytearray(b"\n".join([*lines[len(taken) :], rest]))
        if self._ended and not lines:
            raise ChannelClosed("the other side closed the connection")
        return [self._decoder.decode(line) for line in taken]

    def wait_for(self, *kinds: type[msgspec.Struct], timeout_s: float) -> In:
        """The first message of one of ``kinds``; those before it are left for `receive`. Raises TimeoutError."""
        until = time.monotonic() + timeout_s
        before: list[In] = []
        while time.monotonic() < until:
            for message in self.receive(until - time.monotonic(), most=1):
                if isinstance(message, kinds):
                    self._early = [*before, *self._early]
                    return message
                before.append(message)
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TimeoutError(f"no {names} came within {timeout_s:.0f} s")

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
