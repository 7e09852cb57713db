"""When a campaign ends: budgets as people write them, and the signals that end one before."""

from __future__ import annotations

import re
import signal
import threading
from types import FrameType
from typing import Any, Self

_PATTERN = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_MAX_S = 366 * 24 * 3600.0


def parse_duration(text: str) -> float:
    """Seconds in ``text``. Raises ValueError unless it is hours, minutes and seconds in this order and above zero."""
    match = _PATTERN.fullmatch(text.strip())
    hours, minutes, seconds = (float(part or 0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
    total = 3600 * hours + 60 * minutes + seconds
    if not 0 < total <= _MAX_S:
        raise ValueError(f"{text!r} must be a duration above zero and at most a year, such as 90s, 10m or 1h30m")
    return total


def format_duration(seconds: float) -> str:
    """``seconds`` to a reader's precision: ``0.8s``, ``42s``, ``9m05s``, ``1h30m``."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


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

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.first is None:
            self.first = number
        if self.count >= _ENOUGH or (self.raising and self.count == 1):
            raise Interrupted(self.first)
