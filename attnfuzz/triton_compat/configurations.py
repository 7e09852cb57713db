"""The configurations of kernels with `triton.autotune`: which ones a call chooses among, and calls with another one.

Which one a call takes is decided by times, on each machine anew; in the interpreter, by their order.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from attnfuzz.triton_compat.patching import takes

_OURS = "attnfuzz_watched"
_CANNOT_RUN = (
    ("triton.runtime.errors", "OutOfResources"),
    ("triton.runtime.errors", "PTXASError"),
    ("triton.compiler.errors", "CompileTimeAssertionFailure"),
)
"""With these a configuration tells the tuner that it is not for this machine or call, and is never chosen."""
_INTERPRETED_STATIC_ASSERT = "_new_static_assert"
"""The interpreter's function that raises an AssertionError for what a compiler answers with the last of these."""


_TIMED = 3
UNTIMED = (0.0, 0.0, 0.0)
"""Of a configuration: quantiles of its time."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One of those that a call of the function called ``kernel`` may take. ``words``: what it sets."""

    kernel: str
    words: str
    _tuner: Any = field(repr=False)
    _config: Any = field(repr=False)


@dataclass(slots=True)
class _State:
    """``forced``: what its function takes meanwhile. ``seen``: what calls have chosen among. ``calls``: how many.

    ``times``: whether each call is one that times its configurations.
    """

    forced: Configuration | None = None
    seen: list[Configuration] | None = None
    calls: int = 0
    times: bool = False


_STATE = _State()


def tuned_calls() -> int | None:
    """How many autotuned functions have been called in this process; None where nobody can count them."""
    return _STATE.calls if _installed() else None


@contextlib.contextmanager
def taking(configuration: Configuration | None) -> Iterator[list[Configuration]]:
    """Have calls take ``configuration`` where it is left to them; yields all that they choose among, in order."""
    _installed()
    before = _STATE.forced, _STATE.seen
    _STATE.forced, _STATE.seen = configuration, []
    try:
        yield _STATE.seen
    finally:
        _STATE.forced, _STATE.seen = before


@contextlib.contextmanager
def timing() -> Iterator[None]:
    """Have the interpreter run some configurations of a call before it, as the tuner does at a first call on a GPU.

    Where a function adds to what it finds, or writes what it reads, that changes what the call finds.
    """
    before, _STATE.times = _STATE.times, _installed() and _is_timed()
    try:
        yield
    finally:
        _STATE.times = before


def bench_interpreted(bench: Callable[..., Any]) -> Callable[..., Any]:
    """In place of the tuner's ``bench``, which times a configuration with what only a GPU has."""

    @functools.wraps(bench)
    def interpreted(self: Any, *arguments: Any, config: Any, **others: Any) -> Any:
        if not _STATE.times:
            return UNTIMED
        vars(self)["do_bench"] = _run_once  # a property that is kept there
        return bench(self, *arguments, config=config, **others)

    setattr(interpreted, _OURS, True)
    return interpreted


def _run_once(call: Callable[[], Any], quantiles: Any) -> list[float]:
    del quantiles
    call()
    return list(UNTIMED)


def cannot_run(error: BaseException) -> bool:
    """Whether a tuner passes over a configuration that raises such an error, or would where it is compiled."""
    loaded = ((sys.modules.get(module), name) for module, name in _CANNOT_RUN)
    kinds = tuple(vars(module)[name] for module, name in loaded if module is not None and name in vars(module))
    places = traceback.extract_tb((error.__cause__ or error).__traceback__)
    return issubclass(type(error), kinds) or (bool(places) and places[-1].name == _INTERPRETED_STATIC_ASSERT)


def _installed() -> bool:
    """Whether calls of autotuned functions are seen: from the first question on, and not in an unknown Triton."""
    if "triton.runtime.autotuner" not in sys.modules:
        return False
    tuner: Any = getattr(importlib.import_module("triton.runtime.autotuner"), "Autotuner", None)
    if getattr(tuner, _OURS, False):
        return True
    run, prune = getattr(tuner, "run", None), getattr(tuner, "prune_configs", None)
    if not takes(run, "self", "args", "kwargs") or not takes(prune, "self", "kwargs"):
        return False
    tuner.run = _watched(run)
    setattr(tuner, _OURS, True)
    return True


def _is_timed() -> bool:
    """Whether it is known how a tuner keeps what it has found out, and with what it times."""
    tuner: Any = sys.modules["triton.runtime.autotuner"].Autotuner
    names = {*tuner.__init__.__code__.co_names, *vars(tuner)}
    return hasattr(tuner._bench, _OURS) and names >= {"cache", "do_bench"}


def _watched(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        _STATE.calls += 1
        if (_STATE.seen is None and not _STATE.times) or len(self.configs) < 2:
            return run(self, *args, **kwargs)
        self.nargs = dict(zip(self.arg_names, args, strict=False))  # as `run` does, for functions that prune
        left = [*self.prune_configs(kwargs)]
        if _STATE.seen is None:
            own, vars(self)["cache"] = self.cache, {}
            vars(self)["prune_configs"] = lambda kwargs: left[:_TIMED]
            try:
                return run(self, *args, **kwargs)
            finally:
                vars(self)["cache"] = own
                del vars(self)["prune_configs"]
        names = _told(left)
        known = {(id(one._tuner), id(one._config)) for one in _STATE.seen}
        for config in left:
            if (id(self), id(config)) not in known:
                _STATE.seen.append(Configuration(self.base_fn.__name__, _words(config, names), self, config))
        forced = _STATE.forced
        if forced is None or forced._tuner is not self or all(one is not forced._config for one in left):
            return run(self, *args, **kwargs)
        own, self.configs = self.configs, [forced._config]
        try:
            return run(self, *args, **kwargs)
        finally:
            self.configs = own

    return watched


def _told(configs: list[Any]) -> list[str]:
    """The options that they set, but for those launch options of which all have the same."""
    every = [config.all_kwargs() for config in configs]
    return [
        name
        for name in dict.fromkeys(name for one in every for name in one)
        if any(name in config.kwargs for config in configs) or len({str(one.get(name)) for one in every}) > 1
    ]


def _words(config: Any, names: list[str]) -> str:
    given = config.all_kwargs()
    return ", ".join(f"{name}={given[name]}" for name in names if name in given)
