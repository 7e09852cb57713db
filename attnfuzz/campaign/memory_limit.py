"""How much memory an executor of a campaign may take before it is replaced."""

from __future__ import annotations

from attnfuzz.isolation.process import available_bytes

__all__ = ["memory_limit"]

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
