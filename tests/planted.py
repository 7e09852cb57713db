"""Kernels of one file that differ in an argument or two, declared in a line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attnfuzz


def planted(name: str, function: Callable[..., Any], problem: Any = "dense_decode", **declared: Any) -> Any:
    """``function``, a lambda at the top level of a file, as the kernel ``name``, under which that file must have it."""
    function.__name__ = function.__qualname__ = name
    return attnfuzz.kernel(problem, **declared)(function)
