"""Messages of an executor in the middle of a call: a run is over, so that the next has the time of a run. Torch-free.

A relation makes dozens of runs for one case. A time limit for all of them together is either too short for a slow
kernel, which is then told to hang, or too long for one that does.
"""

import contextlib
import os
import time
from collections.abc import Callable

_LEAST_S = 0.1
"""Between two messages: shorter runs are not worth one each."""


class _Teller:
    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._pid = os.getpid()
        self._told_at = time.monotonic()

    def run_is_over(self) -> None:
        now = time.monotonic()
        if now - self._told_at >= _LEAST_S and os.getpid() == self._pid:  # not in a process that a kernel has forked
            self._told_at = now
            with contextlib.suppress(OSError):  # a channel that is lost is noticed when the answer is sent
                self._tell()


_teller: _Teller | None = None


def expect_runs(tell: Callable[[], None] | None) -> None:
    """Have ``tell`` called in this process from now on when runs are over, if they take their time; None ends that."""
    global _teller
    _teller = None if tell is None else _Teller(tell)


def run_is_over() -> None:
    """To be called after each run of a kernel; nothing where nobody waits for an answer."""
    if _teller is not None:
        _teller.run_is_over()
