"""Finds out which packages are installed here, and whether Triton's interpreter can work with them. Imports none.

Run as ``python -m attnfuzz.environment`` by another interpreter it tells what that one has, as JSON: ``missing``, of
what executors need, and all ``versions``.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path

OLDEST = {"torch": "2.11", "triton": "3.6", "numpy": "1.26", "hypothesis": "6.140"}
"""The oldest supported version of each package."""
TRITON_REMEDY = "pip install 'attnfuzz[interpreter]'; a torch for CUDA or ROCm brings its own"

NEEDED = ("torch", "numpy", "msgspec", "jaxtyping")
"""Packages that executors import, beside Triton, which some systems do not have."""

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


def folder_of_compiled() -> Path:
    """Where Triton keeps what it has compiled, for processes that come later as well."""
    named = os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME", "~"), ".triton", "cache")
    return Path(named).expanduser()


def normalised(name: str) -> str:
    """The name of a distribution as packaging tools compare it: ``Flash_Attn`` is ``flash-attn``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def all_installed() -> dict[str, str]:
    """The version of Python, as ``python``, and of each distribution that imports find, by its normalised name."""
    found: dict[str, str] = {}
    for one in distributions():
        name = one.metadata["Name"]
        if name:  # what a failed removal leaves behind has none
            found.setdefault(normalised(name), one.version or "unknown")
    if "triton" not in found and (triton := installed("triton")) is not None:
        found["triton"] = triton
    return found | {"python": platform.python_version()}


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


def _main() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    print(json.dumps({"missing": missing, "versions": all_installed()}))


if __name__ == "__main__":
    _main()
