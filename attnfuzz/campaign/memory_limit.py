"""How much memory an executor of a campaign may take before it is replaced."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_bytes", "memory_limit"]

_HEADROOM = {"cpu": 1 << 30, "cuda": 4 << 30}
"""For what cases need, by device: a hundred times the largest that is drawn on the CPU; on a GPU, references of large
cases are computed there. Of what a kernel leaks, it is as much as fills up within a few hundred cases."""
_LEAST_HEADROOM = 256 << 20
_SHARE = 0.8
"""Of the machine's free memory; the rest is for the workers and for others."""


def memory_limit(resident_bytes: int, *, device: str, workers: int, available: int | None = None) -> int:
    """The limit in bytes for each of ``workers`` executors that begin with ``resident_bytes``, kernels imported.

    ``available`` is the memory that is free on this machine, found out if None.
    """
    headroom = _HEADROOM[device]
    available = available_bytes() if available is None else available
    if available is not None:
        headroom = min(headroom, int(_SHARE * available / max(1, workers)) - resident_bytes)
    return resident_bytes + max(_LEAST_HEADROOM, headroom)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that could be had without swapping: of the machine, or of the container if that is less; None unknown."""
    known = [value for value in (_of_machine(root), _of_container(root)) if value is not None]
    return min(known, default=None)


def _of_machine(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _of_container(root: Path) -> int | None:
    """As control groups of version 2 or 1 bound it, seen from inside."""
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        bound, used = (_read(root / "sys/fs/cgroup" / name).strip() for name in (limit, usage))
        if bound.isdecimal() and used.isdecimal():
            return max(0, int(bound) - int(used))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
