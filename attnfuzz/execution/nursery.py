"""The zygote's event loop: forks executors on request, signals them, and tells each driver how its executor ended."""

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from typing import NoReturn

from attnfuzz.execution.control import ControlConnection
from attnfuzz.execution.messages import Exited, Fork, Forked, ForkFailed, Signal
from attnfuzz.execution.process import adopt_orphans, child_pids, ended_child, kill_group
from attnfuzz.execution.serve import ExecutorDescriptors, run_executor

__all__ = ["Nursery"]

_SHUTDOWN_S = 2.0


class Nursery:
    """Owns every executor forked from this process.

    `listener` takes drivers' control connections; `lifeline` is a file descriptor at whose end of file, when the driver
    that started the zygote is gone, everything is killed.
    """

    def __init__(self, listener: socket.socket, lifeline: int, loaded_service: object) -> None:
        self._listener = listener
        self._lifeline = lifeline
        self._loaded_service = loaded_service
        self._connections: set[ControlConnection] = set()
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_sender = socket.socketpair()

    def run(self) -> None:
        """Serve until the lifeline ends, then kill all executors."""
        adopt_orphans()
        self._watch_children()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._lifeline, selectors.EVENT_READ)
        gc.collect()
        gc.freeze()  # else each executor's first collection would copy the pages of everything imported
        try:
            while self._handle_events():
                pass
        finally:
            self._shut_down()

    def _watch_children(self) -> None:
        """Wake the selector when a child ends; with SIG_DFL as the handler nothing would be written."""
        for end in (self._wakeup, self._wakeup_sender):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_sender.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def _handle_events(self) -> bool:
        """Wait for events and handle them; False at the end of the lifeline."""
        for key, _ in self._selector.select():
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wakeup:
                with contextlib.suppress(BlockingIOError):  # an earlier wake-up has emptied it
                    self._wakeup.recv(4096)
                self._reap()
            elif isinstance(key.data, ControlConnection):
                self._receive(key.data)
            elif not os.read(self._lifeline, 4096):
                return False
        return True

    def _accept(self) -> None:
        connection = ControlConnection(self._listener.accept()[0])
        self._connections.add(connection)
        self._selector.register(connection.stream, selectors.EVENT_READ, connection)

    def _receive(self, connection: ControlConnection) -> None:
        """Act on one message; a driver that hung up or talks nonsense loses its executor."""
        request, descriptors = connection.receive()
        match request:
            case Fork(environment) if connection.pid is None and len(descriptors) >= 2:
                channel, output, *fault_record = descriptors
                given = ExecutorDescriptors(socket.socket(fileno=channel), output, *fault_record)
                self._fork(connection, environment, given)
            case Signal(number):
                connection.signal_executor(number)
            case _:
                for descriptor in descriptors:
                    os.close(descriptor)
                self._disconnect(connection)

    def _fork(self, connection: ControlConnection, environment: dict[str, str], given: ExecutorDescriptors) -> None:
        zygote_pid = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of threads. Those of BLAS libraries are safe: they re-create them after a fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                self._become_executor(given, environment, zygote_pid)
            connection.pid = pid
            connection.send(Forked(pid))
        except OSError as error:
            connection.send(ForkFailed(str(error)))
        finally:
            given.close()

    def _become_executor(self, given: ExecutorDescriptors, environment: dict[str, str], zygote_pid: int) -> NoReturn:
        """In the child: let go of all that is the zygote's, above all of other drivers' connections."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._selector.close()
            for owned in (self._listener, self._wakeup, self._wakeup_sender, *(c.stream for c in self._connections)):
                owned.close()
            run_executor(given, self._loaded_service, environment, zygote_pid)
        finally:
            os._exit(1)

    def _reap(self) -> None:
        """Collect ended children. An executor's group is killed while its process ID is still reserved for it."""
        while (pid := ended_child()) is not None:
            connection = next((c for c in self._connections if c.pid == pid), None)
            if connection is not None:
                kill_group(pid)
            _, status = os.waitpid(pid, 0)
            if connection is not None:
                connection.pid = None
                self._kill_adopted()
                self._report_exit(connection, os.waitstatus_to_exitcode(status))

    def _kill_adopted(self) -> None:
        """Kill what an executor left behind in sessions of its own; it became our child when the executor ended."""
        executors = {connection.pid for connection in self._connections}
        for pid in child_pids(os.getpid()):
            if pid not in executors:
                kill_group(pid)

    def _report_exit(self, connection: ControlConnection, status: int) -> None:
        """Tell the driver. It hangs up, not we: closing with a message of its own unread would reset the connection."""
        if connection.connected:
            connection.send(Exited(status))
        else:
            self._connections.discard(connection)

    def _disconnect(self, connection: ControlConnection) -> None:
        """Hang up and kill the executor, if there is one; the connection is forgotten once that is reaped."""
        if connection.connected:
            self._selector.unregister(connection.stream)
            connection.close()
        connection.signal_executor(signal.SIGKILL)
        if connection.pid is None:
            self._connections.discard(connection)

    def _shut_down(self) -> None:
        deadline = time.monotonic() + _SHUTDOWN_S
        for connection in list(self._connections):
            self._disconnect(connection)
        while self._connections and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.002)
