"""What is installed here, and whether Triton's interpreter can work with it. Imports none of it."""

from __future__ import annotations

import functools
import re
from importlib.metadata import PackageNotFoundError, version

__all__ = ["OLDEST", "TRITON_REMEDY", "installed", "interpreter_problem", "version_numbers"]

OLDEST = {"torch": "2.11", "triton": "3.6", "numpy": "1.26", "hypothesis": "6.140"}
"""The oldest supported version of each package."""
TRITON_REMEDY = "pip install 'attnfuzz[interpreter]'; a torch for CUDA or ROCm brings its own"

_ALSO_CALLED = {"triton": ("triton-rocm", "pytorch-triton-rocm", "pytorch-triton", "pytorch-triton-xpu")}
"""Packages of the same module, as builds of torch bring it."""


@functools.cache
def installed(package: str) -> str | None:
    """The version of an installed package, found without importing it."""
    for name in (package, *_ALSO_CALLED.get(package, ())):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def version_numbers(text: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as ``(2, 13, 0)``."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def interpreter_problem() -> str | None:
    """Why Triton's interpreter, which runs kernels without a GPU, cannot work here; None if it can.

    Up to Triton 3.6 it turns one-element arrays into Python numbers, which NumPy no longer allows from 2.4 on.
    """
    triton, numpy = installed("triton"), installed("numpy")
    if not triton:
        return f"Triton is not installed, and kernels of Triton run in its interpreter here; {TRITON_REMEDY}"
    if not numpy or version_numbers(triton) >= (3, 7) or version_numbers(numpy) < (2, 4):
        return None
    return (
        f"Triton {triton} cannot interpret kernels on the CPU with NumPy {numpy}; "
        'pip install "numpy<2.4", or upgrade to Triton 3.7 or newer'
    )
