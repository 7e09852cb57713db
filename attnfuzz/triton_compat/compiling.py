"""Triton's compiler in this process: seconds spent compiling, the hash of its own files, and its launcher."""

import contextlib
import importlib
import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_MICROSECOND = 1e-6


class CompileTimes:
    """Adds up compilations from `start_listening` on.

    `seconds` counts what was compiled, `compilations` how often; `cache_hits` how often the result lay in Triton's
    on-disk cache instead. `ttir_files` are, of both, files with a kernel in its first form (`explaining.ttir`).
    All stay as they are with a Triton that does not report its compilations, and where none is installed.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.compilations = 0
        self.cache_hits = 0
        self.ttir_files: list[str] = []
        self._next: Any = None

    def start_listening(self) -> bool:
        """Have Triton report here, besides to whom it reports already; whether it can."""
        if importlib.util.find_spec("triton") is None:
            return False
        try:
            compilation = importlib.import_module("triton.knobs").compilation
            earlier = compilation.listener
        except (ImportError, AttributeError):  # older than 3.4
            return False
        if earlier is not self:
            self._next = earlier
            compilation.listener = self
        return True

    def __call__(
        self, *, times: Any = None, cache_hit: bool = False, metadata_group: Any = None, **others: Any
    ) -> None:
        """Called by Triton after each compilation. `metadata_group`: paths of files in its cache, by their names."""
        files = metadata_group if isinstance(metadata_group, dict) else {}
        self.ttir_files += [str(path) for name, path in files.items() if str(name).endswith(".ttir")]
        if cache_hit:
            self.cache_hits += 1
        else:
            self.compilations += 1
            self.seconds += getattr(times, "total", 0) * _MICROSECOND
        if self._next is not None:
            self._next(times=times, cache_hit=cache_hit, metadata_group=metadata_group, **others)

    def total_s(self) -> float:
        """`seconds` so far, as a clock to hand to `attnfuzz.oracles`."""
        return self.seconds


_HOMES = ("triton.runtime.cache", "triton.compiler.compiler")
"""Where `triton_key` lives, in newer and older versions."""


def compute_compiler_key() -> bool:
    """Compute what Triton's compiler remembers for the rest of the process, and processes forked from it inherit.

    Whether that was done: not for the interpreter, nor for a Triton that does not remember it.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" or importlib.util.find_spec("triton") is None:
        return False
    homes = map(importlib.import_module, _HOMES)
    key = next((vars(home)["triton_key"] for home in homes if "triton_key" in vars(home)), None)
    if callable(key) and hasattr(key, "cache_info"):
        key()
        return True
    return False


_NVIDIA = "triton.backends.nvidia.driver"
_FIRST_LAUNCH = "triton.experimental.gluon.nvidia.hopper"
"""Modules that Triton imports when a process launches its first kernel, in a tenth of a second; the latter where
kernels are interpreted, too."""


def build_launcher() -> bool:
    """Have a C compiler build what Triton launches kernels with on NVIDIA's GPUs, unless it lies in Triton's cache.

    Else each process that compiles its first kernel would do it, all of them at once. Whether it is there now: not for
    the interpreter. What keeps it from being built is told where a kernel is first launched, and those that need no
    Triton can be judged without it.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" or importlib.util.find_spec("triton") is None:
        return False
    with contextlib.suppress(Exception):  # whatever a compiler raises: told where a kernel is first launched
        importlib.import_module(_NVIDIA).CudaUtils()
        return True
    return False


def prepare_compiler() -> None:
    """Do once, for all processes that are forked from this one, what Triton's compiler does first in each.

    A second of a C compiler, and reading hundreds of megabytes: side by side, but only once all is imported. Of two
    threads that import Triton, one may get half of it.
    """
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for name in (_FIRST_LAUNCH,) if is_interpreted else (_NVIDIA, _FIRST_LAUNCH):
        with contextlib.suppress(ImportError):  # none, or one for other GPUs, or one that has it elsewhere
            importlib.import_module(name)
    if is_interpreted:
        return
    with ThreadPoolExecutor(1) as beside:
        beside.submit(build_launcher)
        compute_compiler_key()
