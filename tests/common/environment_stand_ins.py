"""Environments to compare, made of the present one: what is said to be installed there differs, and nothing else."""

from __future__ import annotations

import sys
import venv
from pathlib import Path


def make_environment(folder: Path, *, has_packages: bool = True, **versions: str) -> Path:
    """A virtual environment that imports find this one's packages in, and, by name, others' ``versions``."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    if has_packages:
        present = [entry for entry in sys.path if entry.endswith("-packages")]
        (packages / "present.pth").write_text("\n".join(present))
    for name, version in versions.items():
        information = packages / f"{name}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder
