"""A share of the machine's CPU cores: what a GPU among several can count on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["confined_to", "share_of_cores"]

_SYSTEM = Path("/sys/devices/system/cpu")


def share_of_cores(part: int, whole: int, system: Path = _SYSTEM) -> frozenset[int]:
    """``part`` of ``whole`` equal shares of the CPUs that this process may use, whole cores as far as possible.

    Two hardware threads of one core do little more than one of them, so a share must not have the cores of others to
    itself. ``system``: where Linux tells which threads share a core.
    """
    usable = os.sched_getaffinity(0)
    by_core = sorted(usable, key=lambda cpu: (min(_siblings(cpu, system) & usable), cpu))
    return frozenset(by_core[: max(1, len(by_core) * part // whole)])


@contextmanager
def confined_to(cpus: frozenset[int]) -> Iterator[None]:
    """Run this thread, and all processes that it starts meanwhile, on ``cpus`` only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _siblings(cpu: int, system: Path) -> set[int]:
    """The CPUs that are threads of one core with ``cpu``, itself included; nothing but itself if that is unknown."""
    try:
        text = (system / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    except OSError:  # containers may hide it
        return {cpu}
    ranges = [part.split("-") for part in text.strip().split(",")]
    return {cpu} | {one for ends in ranges for one in range(int(ends[0]), int(ends[-1]) + 1)}
