"""Whether a kernel keeps more memory with every call: told from its process's memory between many calls. Torch-free.

Memory that is taken once is no leak: caches, compiled kernels, the free lists of allocators. So the first calls do not
count, growth must be steady, and it must go on for longer than a small cache takes to fill.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnfuzz.oracles.registry import CRASH
from attnfuzz.verdict import Failure

LEAK = "leak"
"""The kind of failure; its oracle is `CRASH`, which is what comes of it."""

_WARM_UP_CALLS = 2
_LOOKS = 20
_FEWEST_LOOKS = 6
"""Where a kernel keeps so much that the process has no room for more."""
_CALLS_BETWEEN_LOOKS = (1, 8, 64)
"""Small leaks take more calls to stand out."""
_NOISE_BYTES = 256 << 10
"""Between two looks: the heap grows by 128 KiB at a time (mallopt(3), M_TOP_PAD)."""
_MOST_UNEVEN = 2.0
_ENOUGH_BYTES = 64 << 20
_ENOUGH_CALLS = 128
"""A cache may hold a hundred entries, or a few large ones."""
_PLENTY_BYTES = 256 << 20
_LIMIT_S = 8.0
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Resident bytes of a process and of what it has started, and bytes of its tensors on the GPU."""

    host_bytes: int
    device_bytes: int = 0


def find_leak(use_after: Callable[[int], MemoryUse | None]) -> Failure | None:
    """The failure of a kernel that keeps memory; None if it does not.

    ``use_after(n)`` calls it ``n`` more times in the same process and says what memory that has then, None if the
    process has ended (or the kernel failed) on the way.
    """
    if use_after(_WARM_UP_CALLS) is None:
        return None
    until = time.monotonic() + _LIMIT_S
    for calls in _CALLS_BETWEEN_LOOKS:
        uses = list[MemoryUse]()
        while len(uses) <= _LOOKS and not _has_plenty(uses) and time.monotonic() < until:
            use = use_after(calls)
            if use is None:
                return _failure(uses, calls)
            uses.append(use)
        found = _failure(uses, calls)
        if found is not None or time.monotonic() >= until or (calls > 1 and not _grew(uses)):
            return found
    return None


def _has_plenty(uses: Sequence[MemoryUse]) -> bool:
    """Whether there is no need to take more of the machine's memory."""
    if len(uses) <= _FEWEST_LOOKS:
        return False
    first, last = uses[0], uses[-1]
    return max(last.host_bytes - first.host_bytes, last.device_bytes - first.device_bytes) >= _PLENTY_BYTES


def _grew(uses: Sequence[MemoryUse]) -> bool:
    """Whether the later half of the looks shows anything that more calls may make clearer."""
    middle, last = uses[len(uses) // 2], uses[-1]
    return max(last.host_bytes - middle.host_bytes, last.device_bytes - middle.device_bytes) >= _NOISE_BYTES // 4


def _failure(uses: Sequence[MemoryUse], calls: int) -> Failure | None:
    for what, sizes in (
        ("GPU memory", [use.device_bytes for use in uses]),
        ("memory", [use.host_bytes for use in uses]),
    ):
        growth = _steady_growth(sizes, calls)
        if growth is not None:
            return _describe(what, sizes, growth, calls)
    return None


def _steady_growth(sizes: Sequence[int], calls: int) -> float | None:
    """Bytes between two looks, if each of the later half of them adds about the same."""
    added = [after - before for before, after in itertools.pairwise(sizes)]
    if len(added) < _FEWEST_LOOKS:
        return None
    later = added[len(added) // 2 :]
    growth = statistics.median(later)
    is_steady = min(later) * _MOST_UNEVEN >= growth and max(later) <= growth * _MOST_UNEVEN
    is_long = growth * len(added) >= _ENOUGH_BYTES or calls * len(added) >= _ENOUGH_CALLS
    return growth if is_steady and is_long and growth >= _NOISE_BYTES else None


def _describe(what: str, sizes: Sequence[int], growth: float, calls: int) -> Failure:
    count = calls * (len(sizes) - 1)
    message = f"every call keeps another {_size(growth / calls)} of {what} (seen over {count} calls)"
    detail = f"{what}: {_size(sizes[0])} after the first calls, {_size(sizes[-1])} after {count} more"
    return Failure(oracle=CRASH.name, kind=LEAK, message=message, details=(detail,))


def _size(nbytes: float) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if nbytes >= unit), (1, "bytes"))
    return f"{nbytes / unit:.1f} {name}"
