"""One runner per device and oracle settings for a whole test process, started when it is first needed."""

from __future__ import annotations

import atexit
import os

from attnfuzz.isolation.devices import DeviceLease
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.verdict import DEFAULT_ORACLES, OracleName
from attnfuzz.problems.tolerance import Tolerance

__all__ = ["pin_to", "shared_runner"]

_runners: dict[tuple[object, ...], Runner] = {}
_lease: DeviceLease | None = None


def pin_to(lease: DeviceLease) -> None:
    """Have the runners that are asked for from now on use this GPU only."""
    global _lease
    _lease = lease


def shared_runner(
    device: str = "auto", oracles: tuple[OracleName, ...] = DEFAULT_ORACLES, tolerance: Tolerance = "bound"
) -> Runner:
    """The runner of this process for these settings. It is closed when the process ends."""
    key = (os.getpid(), device, oracles, tolerance, _lease)  # a forked child may not use its parent's pipes
    if key not in _runners:
        if not _runners:
            atexit.register(_close_all)
        _runners[key] = Runner(
            device=device, oracles=oracles, tolerance=tolerance, environment=_lease.environment if _lease else None
        )
    return _runners[key]


def _close_all() -> None:
    for key, runner in _runners.items():
        if key[0] == os.getpid():
            runner.close()
    _runners.clear()
