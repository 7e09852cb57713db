"""A second runner that gets ready while the first is at work: a fresh process that need not be waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from attnfuzz.declaration import Declaration
from attnfuzz.judging.runner import Runner

__all__ = ["Spare"]


class Spare:
    """A runner of ``make`` whose executor has started CUDA and imported ``kernels``, and has run nothing.

    On a GPU that takes as long as a case does with its compilation. A context manager; not for several threads.
    """

    def __init__(self, make: Callable[[], Runner], kernels: Sequence[Declaration]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._runner: Future[Runner] = self._pool.submit(make)
        self._ready = self._pool.submit(self._get_ready, kernels)
        self._is_taken = False

    def take(self) -> Runner | None:
        """The runner, once; it is closed with the spare. Raises what starting and importing raise."""
        if self._is_taken:
            return None
        self._is_taken = True
        return self._ready.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        if self._runner.exception() is None:
            self._runner.result().close()

    def _get_ready(self, kernels: Sequence[Declaration]) -> Runner:
        runner = self._runner.result()
        runner.start_device()
        runner.declarations([one.target for one in kernels])
        return runner
