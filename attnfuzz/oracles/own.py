"""`attnfuzz.oracle`: what a user's file objects to in results that attnfuzz is content with. Torch-free by itself.

An oracle is asked about the kernels of the file that it stands in, or is imported into. It runs in executors only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attnfuzz.oracles.registry import KNOWN, NAME_PATTERN

if TYPE_CHECKING:
    from torch import Tensor


class OracleError(ValueError):
    """A user's oracle cannot judge; the message is one sentence."""


class Run:
    """One run of a kernel on a case, as a user's oracle gets it, in memory of its own on the CPU.

    ``case`` has the fields of the problem. ``results``: what the kernel returned or wrote, by name. ``expected``: what
    is right, in float64, by name: ``out`` and ``lse`` of attention, rows first and natural logarithms, whatever form
    the kernel returns them in; of an own problem its results. ``inputs``: those of the case as kernels get them, built
    when first asked for; memory that holds no token is NaN there (integers: -1).
    """

    def __init__(
        self, case: Any, results: Mapping[str, Tensor], expected: Mapping[str, Tensor], build: Callable[[], Any]
    ) -> None:
        self.case = case
        self.results = results
        self.expected = expected
        self._build = build

    @cached_property
    def inputs(self) -> Any:
        """See the class."""
        return self._build()


class OwnOracle:
    """A user's function, by its ``name``; ``description`` is the first line of what its docstring says."""

    def __init__(self, function: Callable[[Run], str | None]) -> None:
        self.function = function
        self.name = self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self.description = (function.__doc__ or "").strip().partition("\n")[0]

    def __call__(self, run: Run) -> str | None:
        """A sentence on what is wrong with ``run``; None if nothing is. Or an AssertionError says it."""
        return self.function(run)


def oracle(function: Callable[[Run], str | None]) -> OwnOracle:
    """Have the decorated function judge each case of the file's kernels that all usual oracles are content with.

    It gets a `Run` and returns None, or a sentence on what is wrong; an ``assert`` that fails says so as well. It must
    say the same of the same run, on every machine, and be quick: its time is that of the kernel. Its findings are
    confirmed, shrunk and saved as all others are, by the function's name. Raises ValueError for a name that cannot be.
    """
    if not callable(function) or not hasattr(function, "__name__"):
        raise ValueError(f"@attnfuzz.oracle stands before a function, without parentheses, not before {function!r:.80}")
    name = function.__name__
    if re.match(NAME_PATTERN, name) is None:
        raise ValueError(f"an oracle cannot be called {name!r}: take letters of ASCII, digits and _, at most 64")
    if name in KNOWN:
        raise ValueError(
            f"attnfuzz has an oracle that is called {name!r}: {KNOWN[name].description}; take another name"
        )
    return OwnOracle(function)


def oracles_beside(module_name: str) -> tuple[OwnOracle, ...]:
    """The oracles that the module with this name defines or has imported. Raises ValueError for two of one name."""
    members = vars(sys.modules[module_name]).values() if module_name in sys.modules else ()
    found: dict[str, OwnOracle] = {}
    for one in members:
        if issubclass(type(one), OwnOracle) and found.setdefault(one.name, one) is not one:
            raise ValueError(f"there are two oracles that are called {one.name!r}: of one of them, change the name")
    return tuple(found.values())
