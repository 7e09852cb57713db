"""What a campaign is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attnfuzz.campaign.earlier import Earlier
from attnfuzz.campaign.state import State
from attnfuzz.isolation.pythons import Python
from attnfuzz.problems.tolerance import Tolerance

__all__ = ["Request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a campaign is asked to do.

    ``started`` is when the command began, on the monotonic clock; ``budget_s`` counts from when the first worker can
    judge. With ``pedantic`` all that a kernel does not declare away is searched, and what it takes is not inferred.
    ``workers`` and ``seed`` are chosen if None; without ``oracles`` all of them judge. ``shared`` is the address
    of a Redis server. ``resume`` is the state of an interrupted campaign to go on with; ``trust`` is false where that
    alone names ``kernels``, and no user. ``against``: the earlier campaign whose bugs are known. ``python``: where
    executors run, if not in the driver's environment. ``verifying``: it is about one kernel, of whose contract only
    what it refuses is left out, and where tensors lie (`infer`).
    """

    kernels: tuple[str, ...]
    started: float
    budget_s: float
    save_folder: Path
    workers: int | None = None
    device: str = "auto"
    seed: int | None = None
    oracles: tuple[str, ...] = ()
    fail_fast: bool = False
    tolerance: Tolerance = "bound"
    shared: str | None = None
    resume: State | None = None
    trust: bool = True
    pedantic: bool = False
    against: Earlier | None = None
    python: Python | None = None
    verifying: bool = False
