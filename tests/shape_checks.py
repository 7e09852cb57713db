"""The checker of shapes in signatures that tests run under: beartype, made for a function when it is first checked."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from beartype import beartype

__all__ = ["checker", "is_checked_by_day"]

_ONE_OF = 8


def checker(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` checked; most of those that are imported are not called, and to make all took seconds."""
    made = cache(lambda: beartype(function))

    @wraps(function)
    def check(*args: Any, **named: Any) -> Any:
        return made()(*args, **named)

    return check


def is_checked_by_day(test: str) -> bool:
    """Whether the shapes in signatures are checked in the test of this id: in one of eight.

    Some functions are called ten thousand times in a test, and a check takes longer than what they do.
    """
    return zlib.crc32(test.encode()) % _ONE_OF == 0
