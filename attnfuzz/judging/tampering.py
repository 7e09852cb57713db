"""Whether code under test has replaced what judges or times it: functions of attnfuzz, comparisons of torch, clocks.

A kernel runs in the process that judges it, so nothing here holds against one that is out to win: it may replace this
module as well. What it holds against is what kernels have been seen to do: `torch.allclose` that is always true, a
comparison of attnfuzz that finds no error, a clock that runs slowly.
"""

from __future__ import annotations

import functools
import gc
import importlib
import math
import operator
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType

import torch

from attnfuzz.oracles import exception, registry
from attnfuzz.untrusted_text import text_of, type_name
from attnfuzz.verdict import REPLACED, Failure

_OWN = "attnfuzz."
_NOT_JUDGING = ("attnfuzz.kernels", "attnfuzz.adapters")
"""Code under test itself."""

_COMPARING = (
    "all", "allclose", "amax", "any", "as_strided", "clone", "equal", "full", "full_like", "is_tensor", "isclose",
    "isfinite", "isinf", "isnan", "matmul", "ones_like", "stack", "where", "zeros_like",
)  # fmt: skip
_OF_TENSORS = (
    "__abs__", "__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__mul__", "__ne__", "__sub__", "abs",
    "all", "allclose", "amax", "any", "clone", "copy_", "cpu", "detach", "double", "equal", "expand_as", "fill_",
    "float", "isclose", "isfinite", "isinf", "isnan", "isneginf", "item", "max", "numpy", "sum", "to", "tolist", "view",
)  # fmt: skip
_ELSEWHERE = {
    "builtins": ("abs", "all", "any", "bool", "float", "isinstance", "len", "max", "min", "sum"),
    "time": ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"),
    "torch.cuda": ("Event", "synchronize"),
    "torch.testing": ("assert_allclose", "assert_close"),
    "numpy": ("allclose", "array_equal", "isclose"),
    "numpy.testing": ("assert_allclose", "assert_array_equal"),
    "triton.testing": ("assert_close", "do_bench", "do_bench_cudagraph"),
}
"""Looked after where they have been imported by the time that the first kernel is."""
_CLOCK = time.monotonic
_EVERY_S = 0.1
_EVENT = ("elapsed_time", "query", "record", "synchronize")

Read = Callable[[], list[object]]
Group = tuple[str, tuple[str, ...], Read, list[object]]
"""A place, names in it, how to read what they are now, and what they were."""


_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}


class Watch:
    """Remembers what there is when it is made, in a process that has imported no code under test yet.

    ``own``: what `of_attnfuzz` has found in the process from which this one was forked, in a tenth of a second.
    """

    def __init__(self, own: Iterable[Group] | None = None) -> None:
        self._groups = [*(of_attnfuzz() if own is None else own), *_of_libraries()]
        self._limits = _soft_limits()
        self._again_at = 0.0
        self._found: Failure | None = None

    def replaced(self) -> str | None:
        """The name of something that is no longer what it was; None if all is. A fraction of a millisecond."""
        for place, names, read, before in self._groups:
            now = read()
            if not all(map(operator.is_, now, before)):
                changed = next(i for i, (one, other) in enumerate(zip(now, before, strict=True)) if one is not other)
                return f"{place}.{names[changed]}"
        return None

    def behind(self, error: BaseException) -> Failure | None:
        """The change by code under test that an ``error`` of attnfuzz's own comes from; None if none is known.

        It has replaced something, has taken away what the process needs, or has itself raised when its call was over.
        """
        return self.objection(at_once=True) or self._lowered_limit(error) or exception.raised_outside(error)

    def _lowered_limit(self, error: BaseException) -> Failure | None:
        for name, now in _soft_limits().items():
            if now < self._limits[name]:
                return Failure(
                    oracle=registry.RED_ZONE.name,
                    kind=f"{name} lowered",
                    message=f"the kernel, or its module, has lowered {name} to {now}, and the process that it shares "
                    f"with those who judge it cannot go on ({type_name(error)}: {text_of(error)})",
                )
        return None

    def objection(self, *, at_once: bool = False) -> Failure | None:
        """A failure if something was replaced, for good; unless asked ``at_once``, looked for some times a second."""
        if self._found is not None or (not at_once and _CLOCK() < self._again_at):
            return self._found
        name = self.replaced()
        self._again_at = _CLOCK() + _EVERY_S
        if name is None:
            return None
        what = "a clock" if name.startswith("time.") else "what kernels are judged and timed with"
        self._found = Failure(
            oracle=registry.RED_ZONE.name,
            kind=f"{name}{REPLACED}",
            message=f"the kernel, or its module, has replaced {name}: {what} is not its own to change",
            details=("nothing that this process says of the kernel after that counts",),
            tensor=name,
        )
        return self._found


def _soft_limits() -> dict[str, float]:
    soft = {name: resource.getrlimit(number)[0] for name, number in _LIMITS.items()}
    return {name: math.inf if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()}


def of_attnfuzz() -> Iterator[Group]:
    """All functions of what judges, in the modules that have been imported."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith(_OWN) and not name.startswith(_NOT_JUDGING) and isinstance(module, ModuleType):
            yield from _namespace(name, vars(module))
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    yield from _namespace(f"{name}.{value.__qualname__}", vars(value))


def _of_libraries() -> Iterator[Group]:
    yield from _attributes("torch", torch, _COMPARING)
    yield from _attributes("torch.Tensor", torch.Tensor, _OF_TENSORS)
    yield from _attributes("torch.cuda.Event", torch.cuda.Event, _EVENT)
    yield _group("gc", ("callbacks",), _num_gc_callbacks)
    for name, wanted in _ELSEWHERE.items():
        if name in sys.modules:
            yield from _attributes(name, importlib.import_module(name), wanted)


def _namespace(place: str, namespace: Mapping[str, object]) -> Iterator[Group]:
    """The functions and classes in it. What is bound to something else may change: caches, counters, settings."""
    bound = (staticmethod, classmethod, property)
    names = tuple(key for key, value in namespace.items() if callable(value) or isinstance(value, bound))
    if names:
        yield _group(place, names, functools.partial(_read_items, namespace, names))


def _attributes(place: str, owner: object, wanted: tuple[str, ...]) -> Iterator[Group]:
    names = tuple(name for name in wanted if hasattr(owner, name))
    yield _group(place, names, functools.partial(_read_attributes, owner, names))


def _group(place: str, names: tuple[str, ...], read: Read) -> Group:
    return place, names, read, read()


def _read_items(namespace: Mapping[str, object], names: tuple[str, ...]) -> list[object]:
    return list(map(namespace.get, names))


def _read_attributes(owner: object, names: tuple[str, ...]) -> list[object]:
    return [getattr(owner, name, None) for name in names]


def _num_gc_callbacks() -> list[object]:
    """Called at any moment, in the middle of a comparison too. Small numbers are the same object each time."""
    return [len(gc.callbacks)]
