"""The checker of shapes in signatures that tests run under: beartype, for a sample of the calls of each function."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from beartype import beartype

__all__ = ["sampled"]

_FIRST = 32
_ONE_OF = 16


def sampled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` checked in its first calls in a process, and then in one of sixteen.

    Some are called ten thousand times in a test, and a check takes longer than what they do.
    """
    checked = beartype(function)
    calls = 0

    @wraps(function)
    def check(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= _FIRST or calls % _ONE_OF == 0:
            return checked(*args, **named)
        return None

    return check
