"""Writing a report where the user wants it: a whole file or none, and whatever else a path can name as it is."""

from __future__ import annotations

from pathlib import Path

from attnfuzz.corpus.writing import write_atomically

__all__ = ["write_file"]


def write_file(path: Path, data: bytes) -> None:
    """Replace the file at ``path``, or what a link there points to; a pipe or device is written to. Raises OSError."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        path.write_bytes(data)
    else:
        write_atomically(target, data)
