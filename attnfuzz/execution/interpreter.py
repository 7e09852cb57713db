"""The one place that touches Triton's private parts: its interpreter patches `triton.language` far too often.

The interpreter replaces the functions of `triton.language` by NumPy versions when a kernel is launched, and again at
every call of a nested `@triton.jit` function, `tl.sum` and `tl.max` included, although they are replaced already.
Searching the modules for what is left to replace takes about half the time of a small kernel. While a launch is under
way, each combination of modules needs it only once.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["install_fast_patching"]


def install_fast_patching() -> bool:
    """Patch each set of language modules once per launch; returns False, changing nothing, for an unknown Triton."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if isinstance(getattr(interpreter, "_patch_lang", None), _PatchOncePerLaunch):
        return True
    if not _is_known(interpreter):
        return False
    vars(interpreter)["_patch_lang"] = _PatchOncePerLaunch(interpreter)
    return True


def _is_known(interpreter: ModuleType) -> bool:
    patch, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    if not inspect.isfunction(patch) or not inspect.isclass(scope) or not hasattr(scope, "restore"):
        return False
    return list(inspect.signature(patch).parameters) == ["fn"] and not inspect.signature(scope).parameters


class _PatchOncePerLaunch:
    """Stands in for `_patch_lang(fn)`, which returns a scope whose `restore()` the launch calls at its end."""

    def __init__(self, interpreter: ModuleType) -> None:
        self._original: Callable[..., Any] = vars(interpreter)["_patch_lang"]
        self._scope_type: Callable[[], Any] = vars(interpreter)["_LangPatchScope"]
        self._language = importlib.import_module("triton.language")
        self._patched: set[tuple[int, ...]] | None = None
        self._modules_of: dict[int, tuple[int, ...]] = {}

    def __call__(self, fn: Callable[..., Any]) -> Any:
        modules = self._language_modules(fn)
        if self._patched is None:
            self._patched = {modules}
            return _LaunchScope(self, self._original(fn))
        if modules in self._patched:
            return self._scope_type()
        self._patched.add(modules)
        return self._original(fn)

    def end_launch(self) -> None:
        self._patched = None

    def _language_modules(self, fn: Callable[..., Any]) -> tuple[int, ...]:
        names = fn.__globals__  # a module's: it lives as long as the process
        if id(names) not in self._modules_of:
            known = {id(self._language), id(self._language.core)}
            self._modules_of[id(names)] = tuple(sorted({id(value) for value in names.values()} & known))
        return self._modules_of[id(names)]


class _LaunchScope:
    """The scope of a launch: nested calls find the language patched until it is restored."""

    def __init__(self, patching: _PatchOncePerLaunch, scope: Any) -> None:
        self._patching = patching
        self._scope = scope

    def restore(self) -> None:
        self._patching.end_launch()
        self._scope.restore()
