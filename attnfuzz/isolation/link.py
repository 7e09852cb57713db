"""One executor as the driver sees it: its channel, its output and the zygote's word on how it ended."""

import contextlib
import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable

import msgspec

from attnfuzz.isolation.memory_faults import MemoryFault, new_record, read_record
from attnfuzz.isolation.messages import (
    MAX_CONTROL_BYTES,
    UNREADABLE,
    ControlReply,
    ExecutorMessage,
    Exited,
    Forked,
    ForkFailed,
    FrameDecoder,
    FrameError,
    Hello,
    Signal,
)
from attnfuzz.isolation.process import (
    descendant_bytes,
    is_stopped,
    kill_group,
    peer_of,
    resident_bytes,
    signal_process,
    start_time,
)
from attnfuzz.untrusted_text import only_printable

_FRAME = re.compile(r'^  File "(?P<path>[^"]*)", line \d+ in ')
_FRAMEWORK = re.compile(r"[/\\]attnfuzz[/\\](safe_start|isolation[/\\](serve|zygote))\.py$|^<frozen runpy>$")


def strip_framework_frames(output: str) -> str:
    """`output` without the stack frames of the isolation layer and without the list of loaded extension modules."""
    return "".join(line for line in output.splitlines(keepends=True) if not _is_noise(line))


def _is_noise(line: str) -> bool:
    frame = _FRAME.match(line)
    return line.startswith("Extension modules: ") or (frame is not None and bool(_FRAMEWORK.search(frame["path"])))


OUTPUT_TAIL_BYTES = 8192
"""How much of an executor's latest output is kept. A fatal signal's stack ends in 2 KB of names of loaded modules."""

_READ_BYTES = 1 << 18
_DRAIN_S = 0.2
_LOOK_AT_DESCENDANTS_EVERY_S = 0.1


class Link:
    """Asks for an executor over `control`, a connection to the zygote, and follows it without ever blocking on it.

    `pump` takes in what has arrived; the attributes then say what is known. Output is read through a pipe rather than
    left in a file, so that it can neither fill a disk nor outlive the driver.
    """

    def __init__(self, control: socket.socket, fork_request: bytes) -> None:
        self.pid: int | None = None
        self.exit_status: int | None = None
        self.fork_error: str | None = None
        self.zygote_lost = False
        self._channel_ended = False
        self.garbled = False
        self._start_time: int | None = None
        self._descendant_bytes = 0
        self._next_look_at_descendants = 0.0
        self._decoder = FrameDecoder()
        self._unsent = memoryview(b"")
        self._awaited = 0
        self._tail = bytearray()
        self._poller = select.poll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._control = control
        self._zygote = peer_of(control)
        self._channel, executor_end = socket.socketpair()
        self._output, output_writer = os.pipe()
        self._fault_record = new_record()
        try:
            with contextlib.suppress(OSError):  # `pump` finds out that the zygote is gone
                given = [executor_end.fileno(), output_writer, self._fault_record]
                socket.send_fds(control, [fork_request], [one for one in given if one is not None])
        finally:
            executor_end.close()
            os.close(output_writer)
        self._watch()

    @property
    def channel_lost(self) -> bool:
        """No more messages can come: the channel has ended, or carries something other than messages."""
        return self._channel_ended or self.garbled

    def send(self, frame: bytes, number: int) -> None:
        """Queue the encoded request `number`; `pump` writes it as the executor reads."""
        self._awaited = number
        if not self._channel_ended:
            self._unsent = memoryview(frame)
            self._poller.modify(self._channel, select.POLLIN | select.POLLOUT)

    def pump(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for something to happen and take in what is there; whether there was anything."""
        ready = self._poller.poll(max(0.0, timeout_s) * 1000)
        for descriptor, events in ready:
            if descriptor in self._handlers:
                self._handlers[descriptor](events)
        return bool(ready)

    def next_message(self) -> ExecutorMessage | None:
        """The greeting or the answer to the latest request; None if it has not come, or cannot (`channel_lost`)."""
        try:
            while not self.garbled and (frame := self._decoder.next_frame()) is not None:
                message: ExecutorMessage = msgspec.json.decode(frame, type=ExecutorMessage)
                if isinstance(message, Hello) or message.number == self._awaited:
                    return message
        except (FrameError, *UNREADABLE):
            self.garbled = True
        return None

    def output(self) -> str:
        """The last `OUTPUT_TAIL_BYTES` of output since `forget_output`, fit to be shown."""
        tail = self._tail[-OUTPUT_TAIL_BYTES:].decode(errors="backslashreplace")
        return strip_framework_frames(only_printable(tail))

    def memory_fault(self) -> MemoryFault | None:
        """The cause of a SIGSEGV or SIGBUS that ended the executor, if it is known."""
        if self._fault_record is None or self.exit_status is None:
            return None
        return read_record(self._fault_record) if -self.exit_status in (signal.SIGSEGV, signal.SIGBUS) else None

    def own_bytes(self) -> int:
        """Resident memory of the executor itself."""
        return 0 if self.pid is None else resident_bytes(self.pid) or 0

    def memory_bytes(self) -> int:
        """Resident memory of the executor, and of what it started as of the last look, which takes longer."""
        if self.pid is None:
            return 0
        if (now := time.monotonic()) >= self._next_look_at_descendants:
            self._next_look_at_descendants = now + _LOOK_AT_DESCENDANTS_EVERY_S
            self._descendant_bytes = descendant_bytes(self.pid)
        return self.own_bytes() + self._descendant_bytes

    def wake_zygote(self) -> bool:
        """Have a zygote go on that is stopped, which would send no signal and tell of no end; whether it was."""
        if not is_stopped(self._zygote[0]):
            return False
        signal_process(*self._zygote, signal.SIGCONT)
        return True

    def end_zygote(self) -> None:
        """End a zygote that says nothing, and so its executors; `pump` finds out that it is gone."""
        signal_process(*self._zygote, signal.SIGKILL)

    def forget_output(self) -> None:
        """Drop the output so far."""
        self._tail.clear()

    def signal(self, number: int) -> None:
        """Have the zygote send a signal; SIGKILL goes to the whole process group."""
        with contextlib.suppress(OSError):  # `pump` finds out that the zygote is gone
            self._control.send(msgspec.json.encode(Signal(number)))

    def close(self) -> None:
        """Hang up, upon which the zygote kills the executor; without a zygote, kill what is left of its group here."""
        self._handlers.clear()
        self._control.close()
        self._channel.close()
        if self._output >= 0:
            os.close(self._output)
            self._output = -1
        if self._fault_record is not None:
            os.close(self._fault_record)
            self._fault_record = None
        # The group outlives its dead leader, whose ID stays reserved meanwhile; a leader of another age is a stranger.
        if self.zygote_lost and self.pid is not None and start_time(self.pid) in (None, self._start_time):
            kill_group(self.pid)

    def _watch(self) -> None:
        self._channel.setblocking(False)
        os.set_blocking(self._output, False)
        self._handlers = {
            self._channel.fileno(): self._on_channel,
            self._output: self._on_output,
            self._control.fileno(): self._on_control,
        }
        for descriptor in self._handlers:
            self._poller.register(descriptor, select.POLLIN)

    def _ignore(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)
        del self._handlers[descriptor]

    def _on_channel(self, events: int) -> None:
        try:
            if events & select.POLLOUT:
                self._unsent = self._unsent[self._channel.send(self._unsent) :]
                if not self._unsent:
                    self._poller.modify(self._channel, select.POLLIN)
            if events & ~select.POLLOUT:
                data = self._channel.recv(_READ_BYTES)
                self._decoder.feed(data)
                if not data:
                    self._lose_channel()
        except BlockingIOError:
            pass
        except OSError:
            self._lose_channel()

    def _lose_channel(self) -> None:
        self._ignore(self._channel.fileno())
        self._channel_ended = True

    def _on_output(self, _: int) -> None:
        data = os.read(self._output, _READ_BYTES)
        if not data:
            self._ignore(self._output)
        self._tail += data
        if len(self._tail) > 4 * OUTPUT_TAIL_BYTES:
            del self._tail[:-OUTPUT_TAIL_BYTES]

    def _on_control(self, _: int) -> None:
        try:
            packet = self._control.recv(MAX_CONTROL_BYTES)
        except OSError:
            packet = b""
        match msgspec.json.decode(packet, type=ControlReply) if packet else None:
            case Forked(pid):
                self.pid, self._start_time = pid, start_time(pid)
            case ForkFailed(error):
                self.fork_error = error
            case Exited(status):
                self._ignore(self._control.fileno())
                self._drain()
                self.exit_status = status
            case _:
                self._ignore(self._control.fileno())
                self.zygote_lost = True

    def _drain(self) -> None:
        """Take in what the executor sent before it ended."""
        deadline = time.monotonic() + _DRAIN_S
        while time.monotonic() < deadline and self.pump(0):
            pass
