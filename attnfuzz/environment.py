"""What is installed here, and whether Triton's interpreter can work with it. Imports none of it."""

from __future__ import annotations

import functools
import re
from importlib.metadata import PackageNotFoundError, version

__all__ = ["OLDEST", "installed", "interpreter_problem", "version_numbers"]

OLDEST = {"torch": "2.11", "triton": "3.6", "numpy": "1.26", "hypothesis": "6.140"}
"""The oldest supported version of each package."""


@functools.cache
def installed(package: str) -> str | None:
    """The version of an installed package, found without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
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
    if not triton or not numpy or version_numbers(triton) >= (3, 7) or version_numbers(numpy) < (2, 4):
        return None
    return (
        f"Triton {triton} cannot interpret kernels on the CPU with NumPy {numpy}; "
        'pip install "numpy<2.4", or upgrade to Triton 3.7 or newer'
    )
