"""Under which key the findings on a kernel are shared: one for the very same code and declaration. Torch-free."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

import attnfuzz
from attnfuzz.adapters import module_of
from attnfuzz.declaration import BUNDLED_MODULE, Declaration
from attnfuzz.project import search_path

__all__ = ["shared_key"]


def shared_key(declaration: Declaration) -> bytes:
    """The kernel's target with a digest of what it declares, of the file that it is declared in, and of attnfuzz.

    A kernel that has been repaired has another key, so that what was known of the old one does not hide a bug of the
    new one. Code that the file imports does not count.
    """
    digest = hashlib.sha256(msgspec.json.encode(declaration, order="deterministic"))
    digest.update(attnfuzz.__version__.encode())
    source = _source_of(declaration.target)
    if source is not None:
        digest.update(source.read_bytes())
    return f"{declaration.target}@{digest.hexdigest()[:16]}".encode()


def _source_of(target: str) -> Path | None:
    """The file that a target names, found without importing anything; None where it cannot be."""
    place = target.rpartition(":")[0] or (target if target.endswith(".py") else BUNDLED_MODULE)
    if place.endswith(".py"):
        return Path(place) if Path(place).is_file() else None
    path = Path(*module_of(place).split("."))
    candidates = (Path(folder) / name for folder in search_path() for name in (f"{path}.py", path / "__init__.py"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)
