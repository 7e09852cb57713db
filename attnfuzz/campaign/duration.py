"""Durations as people write them: ``90s``, ``10m``, ``1h30m``."""

from __future__ import annotations

import re

__all__ = ["format_duration", "parse_duration"]

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
