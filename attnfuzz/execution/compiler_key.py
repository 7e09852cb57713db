"""Saves executors the time that Triton takes to hash its own files, its compiler's library above all."""

import importlib
import importlib.util
import os

__all__ = ["compute_compiler_key"]

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
