"""Ctrl-C, SIGTERM and SIGHUP: an exception while a campaign starts, a count to look at while it runs."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interrupted", "Interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENOUGH = 3
"""After so many signals in a row whoever sends them no longer wants an orderly end."""


class Interrupted(KeyboardInterrupt):
    """A signal asks the process to end. ``number`` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interrupts:
    """While entered, signals that would end the process are counted, so that state is never left half-written.

    While ``raising`` is set, the first of them raises Interrupted where the program is; the third always does. A signal
    that is ignored, as nohup has it for SIGHUP, stays ignored. Does nothing outside the main thread.
    """

    def __init__(self, *, raising: bool = False) -> None:
        self.raising = raising
        self.count = 0
        self.first: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.first is None:
            self.first = number
        if self.count >= _ENOUGH or (self.raising and self.count == 1):
            raise Interrupted(self.first)
