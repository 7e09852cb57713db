"""Triton's interpreter as attnfuzz runs it, where kernels are interpreted: without needless work, and repaired.

The interpreter replaces the functions of `triton.language` by NumPy versions when a kernel is launched, and again at
every call of a nested `@triton.jit` function, `tl.sum` and `tl.max` included, although they are replaced already.
Searching the modules for what is left to replace takes about half the time of a small kernel. While a launch is under
way, each combination of modules needs it only once. A function that a kernel's module names by itself, ``exp = tl.exp``
as flash-linear-attention has it, is no attribute of these modules: it gets what makes it a NumPy version, for good.

A fifth of the time that is left goes into two things without effect: each sum and product of integers is computed once
more in 64 bits, for an assertion that only kernels in debug mode make, and NumPy's name of a dtype is looked up in a
table that is built for the purpose.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from attnfuzz.triton_compat.interpreter_libdevice import install_libdevice
from attnfuzz.triton_compat.interpreter_objects import install_objects
from attnfuzz.triton_compat.interpreter_repairs import install_repairs
from attnfuzz.triton_compat.interpreter_rewriting import install_rewriting
from attnfuzz.triton_compat.interpreter_types import install_types
from attnfuzz.triton_compat.patching import takes


def install_fast_patching() -> bool:
    """Patch each set of language modules once per launch; returns False, changing nothing, for an unknown Triton."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if isinstance(getattr(interpreter, "_patch_lang", None), _PatchOncePerLaunch):
        return True
    if not _is_known(interpreter):
        return False
    vars(interpreter)["_patch_lang"] = _PatchOncePerLaunch(interpreter)
    return True


def install_shortcuts() -> bool:
    """Leave out work without effect; returns False, changing nothing, for an unknown Triton."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if isinstance(getattr(interpreter, "_get_np_dtype", None), _NumpyDtypes):
        return True
    options: Any = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    if not _has_shortcuts(interpreter, options):
        return False
    vars(interpreter)["interpreter_builder"].options = dataclasses.replace(options, sanitize_overflow=False)
    vars(interpreter)["_get_np_dtype"] = _NumpyDtypes(interpreter)
    return True


def _has_shortcuts(interpreter: ModuleType, options: Any) -> bool:
    lookup = getattr(interpreter, "_get_np_dtype", None)
    if not takes(lookup, "tt_dtype"):
        return False
    is_record = dataclasses.is_dataclass(options) and not isinstance(options, type)
    return is_record and getattr(options, "debug", None) is False and hasattr(options, "sanitize_overflow")


def _is_known(interpreter: ModuleType) -> bool:
    patch, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    if not inspect.isclass(scope) or not hasattr(scope, "restore") or not hasattr(interpreter, "interpreter_semantic"):
        return False
    return takes(patch, "fn") and not inspect.signature(scope).parameters


class _PatchOncePerLaunch:
    """Stands in for `_patch_lang(fn)`, which returns a scope whose `restore()` the launch calls at its end."""

    def __init__(self, interpreter: ModuleType) -> None:
        self._original: Callable[..., Any] = vars(interpreter)["_patch_lang"]
        self._scope_type: Callable[[], Any] = vars(interpreter)["_LangPatchScope"]
        self._language = importlib.import_module("triton.language")
        self._semantic: Any = vars(interpreter)["interpreter_semantic"]
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
            for name, value in names.items():
                if inspect.isfunction(value) and self._language.core.is_builtin(value):
                    names[name] = functools.partial(value, _semantic=self._semantic)
        return self._modules_of[id(names)]


class _LaunchScope:
    """The scope of a launch: nested calls find the language patched until it is restored."""

    def __init__(self, patching: _PatchOncePerLaunch, scope: Any) -> None:
        self._patching = patching
        self._scope = scope

    def restore(self) -> None:
        self._patching.end_launch()
        self._scope.restore()


class _NumpyDtypes:
    """Stands in for `_get_np_dtype(tt_dtype)`: the same answer to the same question, once it is known."""

    def __init__(self, interpreter: ModuleType) -> None:
        language = importlib.import_module("triton.language")
        self._original: Callable[[Any], Any] = vars(interpreter)["_get_np_dtype"]
        self._scalar_type: Any = language.dtype
        self._block_type: Any = language.block_type
        self._known: dict[str, Any] = {}

    def __call__(self, tt_dtype: Any) -> Any:
        scalar = tt_dtype.element_ty if isinstance(tt_dtype, self._block_type) else tt_dtype
        if type(scalar) is not self._scalar_type:  # a pointer, whose name says more than is asked
            return self._original(tt_dtype)
        found = self._known.get(scalar.name)
        if found is None:
            found = self._known[scalar.name] = self._original(scalar)
        return found


def set_up_interpreter() -> None:
    """Repair it and leave out needless work; nothing where ``TRITON_INTERPRET`` says that kernels are compiled."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        install_fast_patching()
        install_shortcuts()
        install_types()
        install_repairs()
        install_rewriting()
        install_objects()
        install_libdevice()
