"""Builds attnfuzz, for pip: archives by hatchling, editable installations by setuptools.

Hatchling's archives are the same bit for bit on any machine. Its editable installations make `kernels` and `tests`
importable, or have pytest warn of the module that redirects; those of setuptools do neither.
"""

from pathlib import Path
from typing import Any

from hatchling.build import build_sdist, build_wheel, get_requires_for_build_sdist, get_requires_for_build_wheel
from setuptools import build_meta

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]


def build_editable(*arguments: Any) -> str:
    """As PEP 660 has it. Raises SystemExit for a tree without links, whose attnfuzz would have no kernels."""
    for name in ("kernels", "strategies"):
        if not Path("attnfuzz", name).is_dir():
            raise SystemExit(
                f"attnfuzz/{name} must be a link to ../{name}, and links are what this file system lacks; install "
                "without --editable, or clone where there are symbolic links"
            )
    name: str = build_meta.build_editable(*arguments)
    return name
