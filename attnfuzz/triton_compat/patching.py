"""Changes to Triton's own classes and functions, and how they are known to be built as these changes expect."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard


def takes(function: Any, *parameters: str) -> TypeGuard[Callable[..., Any]]:
    """Whether it is a function, or a method, with these parameters."""
    return inspect.isfunction(function) and list(inspect.signature(function).parameters) == [*parameters]


@contextlib.contextmanager
def replaced(owner: Any, members: Mapping[str, Any]) -> Iterator[None]:
    """Within, ``owner`` has ``members`` in place of its own, or of those that it inherits."""
    before = {name: vars(owner)[name] for name in members if name in vars(owner)}
    try:
        for name, member in members.items():
            setattr(owner, name, member)
        yield
    finally:
        for name in members:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
