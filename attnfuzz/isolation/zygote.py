"""The zygote: a process that has imported what executors need, forks them on request and tells how each ended.

Run as `python -m attnfuzz.isolation.zygote SOCKET --service module:attribute`. Forking a process that has torch loaded
takes milliseconds, importing torch seconds. It never initialises CUDA, which does not survive a fork, so each executor
may still choose its device. It lives as long as its standard input is open: the driver holds the other end. One that
code under test has stopped goes on when the driver ends, and so ends too. (Android and Chromium call such a process a
zygote.)
"""

import argparse
import contextlib
import gc
import importlib
import importlib.util
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import msgspec

from attnfuzz.isolation.messages import (
    MAX_CONTROL_BYTES,
    MAX_DESCRIPTORS,
    ControlReply,
    ControlRequest,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    Signal,
)
from attnfuzz.isolation.process import adopt_orphans, child_pids, ended_child, kill_group, wake_with_parent
from attnfuzz.isolation.serve import ExecutorDescriptors, flush_standard_streams, load_service, run_executor
from attnfuzz.own_files import OwnFolder
from attnfuzz.triton_compat.compiling import prepare_compiler


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
        with contextlib.suppress(OSError):  # nobody is there any more to be told
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


_SHUTDOWN_S = 2.0


class ForkServer:
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
        wake_with_parent()
        self._watch_children()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._lifeline, selectors.EVENT_READ)
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
                connection = ControlConnection(self._listener.accept()[0])
                self._connections.add(connection)
                self._selector.register(connection.stream, selectors.EVENT_READ, connection)
            elif key.fileobj is self._wakeup:
                with contextlib.suppress(BlockingIOError):  # an earlier wake-up has emptied it
                    self._wakeup.recv(4096)
                self._reap()
            elif isinstance(key.data, ControlConnection):
                self._receive(key.data)
            elif not os.read(self._lifeline, 4096):
                return False
        return True

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


READY = b"ready\n"
"""Written to the original standard output once connections are accepted."""

_LIFELINE = 0


def prepare_environment(device: str) -> None:
    """Set what torch and Triton read from the environment when they are imported."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch.cuda.is_available() must not initialise CUDA here
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        os.environ.pop("TRITON_INTERPRET", None)


def _preload(modules: Sequence[str]) -> None:
    """Import `modules`, as far as they are installed: Triton is not, on some systems."""
    for name in modules:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
        if name == "torch":
            _use_one_thread()


def _load(preload: Sequence[str], service: str) -> object:
    """The service. Meanwhile Triton, if it is wanted, hashes its compiler and builds its launcher for all executors."""
    with ThreadPoolExecutor(1) as beside:  # which has ended before anything is forked
        prepared = beside.submit(prepare_compiler) if "triton" in preload else None
        _preload(preload)
        loaded = load_service(service)
    if prepared is not None:
        prepared.result()
    return loaded


def _use_one_thread() -> None:
    """An OpenMP pool started before a fork would hang the child's first parallel loop, so none may start here."""
    import torch

    torch.set_num_threads(1)


def _check_cuda_untouched() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(
            "importing the service initialised CUDA in the zygote, which does not survive a fork; "
            "move calls to torch.cuda from module level into functions"
        )


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="attnfuzz.isolation.zygote", description=__doc__)
    parser.add_argument("socket", type=Path, help="Unix domain socket to listen on")
    parser.add_argument("--service", required=True, help="module:attribute or path/to/file.py:attribute")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--preload", action="append", default=[], metavar="MODULE", help="import before forking")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Import, listen, fork; returns when standard input ends."""
    options = _parse_arguments(arguments)
    ready = os.dup(1)
    os.dup2(2, 1)  # what imports print must not be taken for the ready message
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as an exception, so that executors are killed on the way
    prepare_environment(options.device)
    gc.disable()  # hardly anything imported is garbage: looking for it took a fifth of the start
    loaded = _load(options.preload, options.service)
    gc.freeze()  # else each executor's first collection would copy the pages of everything imported
    gc.enable()
    _check_cuda_untouched()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(options.socket))
        try:
            listener.listen()
            os.write(ready, READY)
            os.close(ready)
            ForkServer(listener, _LIFELINE, loaded).run()
        finally:
            with contextlib.suppress(OSError):  # the driver may have removed them first
                folder = OwnFolder(options.socket.parent)
                folder.remove(options.socket.name)
                folder.remove_empty()


if __name__ == "__main__":
    main()
    flush_standard_streams()
    os._exit(0)  # to take apart what was imported takes half a second, for which the driver would wait
