"""One runner per device and oracle settings for a whole test process, started when it is first needed."""

from __future__ import annotations

import atexit
import os

from attnfuzz.execution.runner import Runner
from attnfuzz.oracles.verdict import DEFAULT_ORACLES, OracleName
from attnfuzz.problems.tolerance import Tolerance

__all__ = ["shared_runner"]

_runners: dict[tuple[object, ...], Runner] = {}


def shared_runner(
    device: str = "auto", oracles: tuple[OracleName, ...] = DEFAULT_ORACLES, tolerance: Tolerance = "bound"
) -> Runner:
    """The runner of this process for these settings. It is closed when the process ends."""
    key = (os.getpid(), device, oracles, tolerance)  # a forked child may not use its parent's pipes
    if key not in _runners:
        if not _runners:
            atexit.register(_close_all)
        _runners[key] = Runner(device=device, oracles=oracles, tolerance=tolerance)
    return _runners[key]


def _close_all() -> None:
    for key, runner in _runners.items():
        if key[0] == os.getpid():
            runner.close()
    _runners.clear()
