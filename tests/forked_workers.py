"""`pytest -p tests.forked_workers --forks N`: tests run in N processes, forked once everything is collected.

Each worker of pytest-xdist imports torch and collects all tests by itself, which takes as long as a hundred of them.
Here a worker runs one file after the other, and gets the next when it begins the last test of the one that it has.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from attnfuzz.isolation.process import die_with_parent

# With this, torch asks the driver's library whether there is a GPU, as tests do when they are collected. A CUDA runtime
# that was asked is of no use in processes forked afterwards.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many processes run tests."""
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run tests in N processes, each file in one")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests in workers; None leaves that to pytest, also to say why there is nothing to run."""
    config = session.config
    if not config.option.forks or config.option.collectonly or session.testsfailed:
        return None
    _Workers(session).run(config.option.forks)
    return True


@dataclass(eq=False)
class _Worker:
    """``left``: numbers of the tests that it was given and has not ended; ``begun``: of the one that it runs."""

    process: ForkProcess
    connection: Connection
    left: deque[int] = field(default_factory=deque)
    begun: int | None = None


class _Workers:
    """Forks workers, gives them files, and tells pytest of this process what they report."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        files: dict[Path, list[int]] = {}
        for number, item in enumerate(session.items):
            files.setdefault(item.path, []).append(number)
        self._files = deque(files.values())
        self._workers: dict[Any, _Worker] = {}
        self._folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # as xdist does
        self._forked = 0

    def run(self, forks: int) -> None:
        """Return once every test has ended. Raises what pytest raises once enough have failed."""
        try:
            for _ in range(min(forks, len(self._files))):
                self._fork()
            while self._workers:
                for connection in wait(list(self._workers)):
                    self._hear(self._workers[connection])
        finally:
            for worker in self._workers.values():
                worker.process.kill()

    def _fork(self) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        folder = self._folder / f"fork{self._forked}"
        process = context.Process(target=_work, args=(self._session, theirs, folder, os.getpid()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, as BLAS has some
            process.start()
        theirs.close()
        self._workers[ours] = _Worker(process, ours)
        self._forked += 1

    def _hear(self, worker: _Worker) -> None:
        kind, said = _received(worker.connection)
        match kind:
            case "hung up":
                self._bury(worker)
            case "asks":
                file = self._files.popleft() if self._files else []
                worker.left.extend(file)
                worker.connection.send(file)
            case "begins":
                worker.begun = said
            case "ends":
                worker.left.remove(said)
                worker.begun = None
            case "reports":
                config = self._session.config
                self._tell(config.hook.pytest_report_from_serializable(config=config, data=said))

    def _bury(self, worker: _Worker) -> None:
        """Forget a worker that has ended. One that died in a test failed that, and another takes what it has left."""
        del self._workers[worker.connection]
        worker.connection.close()
        worker.process.join()
        if not worker.left:
            return
        ended = f"ended with status {worker.process.exitcode}"
        if worker.begun is None:
            raise RuntimeError(f"a process {ended} between two tests")
        worker.left.remove(worker.begun)
        if worker.left:
            self._files.appendleft(list(worker.left))
        self._fork()
        item = self._session.items[worker.begun]
        self._tell(pytest.TestReport(item.nodeid, item.location, {}, "failed", f"the test's process {ended}", "call"))

    def _tell(self, report: pytest.TestReport) -> None:
        self._session.config.hook.pytest_runtest_logreport(report=report)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)


def _received(connection: Connection) -> tuple[str, Any]:
    try:
        kind, said = connection.recv()
    except (EOFError, ConnectionError):
        return "hung up", None
    return kind, said


class _Reporter:
    """In a worker, in place of the terminal: what pytest reports of tests goes to the process that forked it."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("reports", data))


def _work(session: pytest.Session, connection: Connection, folder: Path, parent: int) -> None:
    die_with_parent(parent)
    _make_its_own(session.config, connection, folder)
    with contextlib.suppress(KeyboardInterrupt):  # which its parent tells, and kills it
        numbers = _given(connection)
        number = next(numbers, None)
        while number is not None:
            connection.send(("begins", number))
            following = next(numbers, None)
            nextitem = None if following is None else session.items[following]
            session.config.hook.pytest_runtest_protocol(item=session.items[number], nextitem=nextitem)
            connection.send(("ends", number))
            number = following


def _make_its_own(config: pytest.Config, connection: Connection, folder: Path) -> None:
    """Reports, captured output and temporary files, which this process would share with those beside it."""
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Reporter(config, connection))
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folder.mkdir(mode=0o700)
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]  # as above


def _given(connection: Connection) -> Iterator[int]:
    """The numbers of tests, of one file after the other."""
    while True:
        connection.send(("asks", None))
        file = connection.recv()
        if not file:
            return
        yield from file
