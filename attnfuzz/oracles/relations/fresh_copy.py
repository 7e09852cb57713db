"""A kernel whose modules have not run anything yet: what they remember is not what the original remembers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from attnfuzz.declaration import Kernel, KernelLoadError, load_kernels, parts_of
from attnfuzz.memory.kept import buffers_of_modules
from attnfuzz.overlay import original_of

_INSTALLED = ("site-packages", "dist-packages")


def fresh_copy(kernel: Kernel) -> Kernel | None:
    """`kernel` from modules imported once more, with those beside and below its own; None if it cannot be had.

    What installed packages remember is shared.
    """
    module = sys.modules.get(kernel.function.__module__)
    source = getattr(module, "__file__", None)
    if not kernel.declaration.target or source is None or any(part in source for part in _INSTALLED):
        return None
    with _forgotten(Path(source).resolve().parent):
        try:
            with buffers_of_modules():
                found = load_kernels(_target_in(source, kernel.declaration.target))
        except KernelLoadError:  # modules that cannot be imported twice
            return None
    return found[0] if len(found) == 1 and _name_of(found[0]) == _name_of(kernel) else None


def _name_of(kernel: Kernel) -> object:
    return getattr(kernel.function, "__qualname__", "")


def _target_in(source: str, target: str) -> str:
    """``target``; one that is relative, which code under test may have left, with its ``source`` as the file."""
    place, _, name = target.rpartition(":")
    is_relative = place.endswith(".py") and not Path(place).is_absolute() and parts_of(target) is None
    return f"{original_of(source)}:{name}" if is_relative else target


@contextmanager
def _forgotten(folder: Path) -> Iterator[None]:
    """Within, modules of `folder` are imported as if for the first time; afterwards they are what they were."""
    hidden = {name: module for name, module in sys.modules.items() if _lies_in(module, folder)}
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in [name for name, module in sys.modules.items() if _lies_in(module, folder)]:
            del sys.modules[name]
        sys.modules.update(hidden)
        for name, module in hidden.items():
            package, _, child = name.rpartition(".")
            if package in sys.modules:
                setattr(sys.modules[package], child, module)


def _lies_in(module: ModuleType, folder: Path) -> bool:
    """Whether `module` belongs to what is written in `folder`.

    A virtual environment in it does not: torch cannot be imported twice. Neither does attnfuzz, apart from its kernels,
    in whose repository somebody may try a kernel of theirs, nor what is compiled. A path that is not absolute is no
    place: torch.ops calls itself "_ops.py".
    """
    source, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    if not isinstance(source, str) or not source.endswith(".py"):
        return False
    if f"{name}.".startswith("attnfuzz.") and not f"{name}.".startswith("attnfuzz.kernels."):
        return False
    return _is_in(source, folder)


@cache
def _is_in(source: str, folder: Path) -> bool:
    """Whether a file is one of `folder`'s own. Thousands are asked for at each copy."""
    path = Path(source)
    if not path.is_absolute() or not (path := path.resolve()).is_relative_to(folder):
        return False
    return not any(part in path.relative_to(folder).parts for part in _INSTALLED)
