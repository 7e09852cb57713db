"""The checker of shapes in signatures that tests run under: beartype, made for a function when it is first checked."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import jaxtyping
from beartype import beartype
from jaxtyping import config, install_import_hook, jaxtyped

_ONE_OF = 8
_BY_DAY = 2_000
_left = 0
"""How often arguments or results are still checked in the test that runs."""


def checker(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` checked; most of those that are imported are not called, and to make all took seconds."""
    made = cache(lambda: beartype(function))

    @wraps(function)
    def check(*args: Any, **named: Any) -> Any:
        global _left
        _left -= 1
        if _left == 0:
            config.update("jaxtyping_disable", True)
        return made()(*args, **named)

    return check


def check_signatures_of(modules: Iterable[str]) -> None:
    """Have the functions and classes of ``modules`` checked that state a shape, once these are imported."""
    # What the hook decorates with: in all functions, it took a tenth of the time of tests.
    jaxtyping.jaxtyped = _where_shapes_are  # type: ignore[assignment]
    install_import_hook(list(modules), f"{__name__}.{checker.__name__}")


def _where_shapes_are(*, typechecker: Any) -> Callable[[Any], Any]:
    decorated = jaxtyped(typechecker=typechecker)
    return lambda made: decorated(made) if isinstance(made, type) or _states_a_shape(made) else made


def _states_a_shape(function: Any) -> bool:
    """Not those within others, which are made anew each time these are called."""
    if "<locals>" in function.__qualname__:
        return False
    names = re.findall(r"\w+", " ".join(map(str, function.__annotations__.values())))
    known = (function.__globals__.get(name) for name in names)
    return any(getattr(one, "__module__", "").startswith("jaxtyping") for one in known)


def check_shapes(test: str, *, by_day: bool) -> None:
    """In the test of this id, which begins: by day in one of eight, and there so many times, else throughout.

    Some functions are called ten thousand times in a test, and a check takes longer than what they do.
    """
    global _left
    _left = _BY_DAY if by_day else 0
    config.update("jaxtyping_disable", by_day and zlib.crc32(test.encode()) % _ONE_OF != 0)


def check_inputs() -> None:
    """Have what kernels of bundled problems get checked when it is made, in files that import no torch themselves."""
    import torch

    from attnfuzz.problems.cases import PROBLEMS
    from attnfuzz.problems.module import module_of

    for problem in PROBLEMS:
        kind = module_of(problem).inputs_type
        names = {
            "Tensor": torch.Tensor,
            **{name: getattr(jaxtyping, name) for name in ("Bool", "Float", "Float32", "Int32")},
        }
        vars(sys.modules[kind.__module__]).update(names)
        jaxtyped(kind, typechecker=checker)
