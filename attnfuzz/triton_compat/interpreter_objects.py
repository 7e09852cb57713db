"""Attributes of Triton's objects that kernels, and the code that launches them, find where they are interpreted.

A compiled kernel and an interpreted one are objects of other classes, and a constant is another thing in each. Without
what is added here, kernels that are right on a GPU raise on a CPU (Triton 3.6 to 3.9):

* `triton.autotune` times its configurations, for which there is no GPU. Here it takes the first of those that its own
  pruning leaves, unless `configurations` says which.
* `tl.constexpr` computes with the number that it holds, so that `constexpr + tensor` is a constant that holds a tensor.
  Here it leaves that to the tensor, as the compiler does.
* A `@triton.jit` function has no `constexprs`, `params` or `signature`. Here it has what a compiled one has.
* A launch returns None, where that of a compiled kernel returns what can be launched again with a grid and without
  constants, as engines do to save time. Here it returns such a thing; what a compiler alone knows of it, such as how
  many registers there are, it does not have.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from attnfuzz.triton_compat.configurations import bench_interpreted

Method = Callable[..., Any]

_REFLECTED = {
    "__add__": "__radd__", "__sub__": "__rsub__", "__mul__": "__rmul__", "__truediv__": "__rtruediv__",
    "__floordiv__": "__rfloordiv__", "__mod__": "__rmod__", "__and__": "__rand__", "__or__": "__ror__",
    "__xor__": "__rxor__", "__lshift__": "__rlshift__", "__rshift__": "__rrshift__", "__lt__": "__gt__",
    "__gt__": "__lt__", "__le__": "__ge__", "__ge__": "__le__", "__eq__": "__eq__", "__ne__": "__ne__",
}  # fmt: skip
"""By a constant's operator, the tensor's that Python asks instead."""
_ADDED = "attnfuzz_added"
_BEGUN = "attnfuzz_launches_begun"


def install_objects() -> bool:
    """Add all of that; returns False, changing nothing, for a Triton that is built differently."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    function: Any = getattr(interpreter, "InterpretedFunction", None)
    if getattr(function, _ADDED, False):
        return True
    language = importlib.import_module("triton.language")
    tuner: Any = getattr(importlib.import_module("triton.runtime.autotuner"), "Autotuner", None)
    if not _is_known(function, tuner, language):
        return False
    for name, reflected in _REFLECTED.items():
        if hasattr(language.tensor, reflected) and name in vars(language.constexpr):
            setattr(language.constexpr, name, _left_to(language.tensor, vars(language.constexpr)[name]))
    tuner._bench = bench_interpreted(vars(tuner)["_bench"])
    function.__getattr__ = _of_compiled
    function.run = _launching(vars(function)["run"])
    setattr(function, _BEGUN, 0)
    setattr(function, _ADDED, True)
    return True


def launches_begun() -> int | None:
    """How many launches have been interpreted in this process; None where nobody has counted them."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    return getattr(getattr(interpreter, "InterpretedFunction", None), _BEGUN, None)


def _is_known(function: Any, tuner: Any, language: ModuleType) -> bool:
    if not all(map(inspect.isclass, (function, tuner, language.tensor, language.constexpr))):
        return False
    bench, run = (getattr(owner, name, None) for owner, name in ((tuner, "_bench"), (function, "run")))
    if not inspect.isfunction(bench) or not inspect.isfunction(run) or hasattr(function, "__getattr__"):
        return False
    launched = ["self", "args", "grid", "warmup", "kwargs"]
    return "config" in inspect.signature(bench).parameters and [*inspect.signature(run).parameters] == launched


def _left_to(tensor: type, method: Method) -> Method:
    @functools.wraps(method)
    def operator(constant: Any, other: Any) -> Any:
        return NotImplemented if isinstance(other, tensor) else method(constant, other)

    return operator


def _of_compiled(function: Any, name: str) -> Any:
    """An attribute that an interpreted function lacks and a compiled one has. Raises AttributeError."""
    if name.startswith("__") or "fn" not in vars(function):
        raise AttributeError(f"{type(function).__name__!r} object has no attribute {name!r}", name=name, obj=function)
    compiled = vars(function).get("attnfuzz_compiled")
    if compiled is None:
        options = vars(function).get("kwargs", {})
        compiled = importlib.import_module("triton.runtime.jit").JITFunction(function.fn, **options)
        vars(function)["attnfuzz_compiled"] = compiled
    return getattr(compiled, name)


def _launching(method: Method) -> Method:
    @functools.wraps(method)
    def run(function: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        setattr(type(function), _BEGUN, getattr(type(function), _BEGUN) + 1)
        method(function, *arguments, grid=grid, warmup=warmup, **named)
        return _Launched(function, {name: value for name, value in named.items() if not hasattr(value, "data_ptr")})

    return run


class _Launched:
    """The result of a launch of a compiled kernel: it can be launched again."""

    def __init__(self, function: Any, constants: Mapping[str, Any]) -> None:
        self._function = function
        self._constants = constants

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*arguments: Any, stream: Any = None) -> None:
            del stream
            given = self._function.arg_names[: len(arguments)]
            constants = {name: value for name, value in self._constants.items() if name not in given}
            self._function.run(*arguments, grid=grid, warmup=False, **constants)

        return launch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"it compiles nothing, so that a kernel has no {name!r}")
