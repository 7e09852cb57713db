"""Measurements of kernels as data: between the driver and the process that runs them, and in the JSON of all.

Torch-free.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from attnfuzz.bench.kernels.shapes import Shape
from attnfuzz.problems.supports import OptionValue

L2State = Literal["cold", "warm"]
Mode = Literal["eager", "graph"]
Status = Literal["ok", "wrong", "failed", "unmeasured", "unsupported"]
"""``failed``: the contender raised. ``unmeasured``: attnfuzz did, before or after the contender's call."""


class MachineReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The device and what runs on it. ``l2_bytes``: 0 where there is none to speak of. ``capability``: a GPU's."""

    device: str
    name: str
    l2_bytes: int = 0
    processors: int = 0
    capability: tuple[int, int] | None = None
    versions: dict[str, str] = {}


class Timed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Microseconds of one call: quantiles over ``samples``, each the mean of ``calls`` calls in a row."""

    l2: L2State
    mode: Mode
    median_us: float
    p10_us: float
    p90_us: float
    samples: int
    calls: int


class CopyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Copy within the device, so that ``nbytes`` are read and written in all."""

    nbytes: int
    seconds: float


class CopyReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of copies among buffers that the L2 cache cannot hold together."""

    time: Timed


class MeasureRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Check, then time, one contender: the ``target`` of a kernel.

    ``seconds``: of each of the up to four measurements (``l2`` and ``modes``).
    """

    contender: str
    shape: Shape
    options: dict[str, OptionValue] = {}
    l2: tuple[L2State, ...] = ("cold", "warm")
    modes: tuple[Mode, ...] = ("eager", "graph")
    seconds: float = 0.05


class MeasureReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``error_ratio``: the largest error over its bound, above 1 if ``status`` is "wrong"; there are no times then.

    ``note``: why there are no times, or none under CUDA graphs.
    """

    status: Status
    times: tuple[Timed, ...] = ()
    error_ratio: float | None = None
    note: str = ""


State = tuple[Mode, L2State]
STATES: tuple[State, ...] = (("graph", "cold"), ("graph", "warm"), ("eager", "cold"), ("eager", "warm"))
"""Launch and cache, what matters most to a server first."""

RowStatus = Status | Literal["crashed"]


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One contender on one shape, with one choice of its options.

    ``is_reference``: it is there to be compared with. ``nbytes``: what any kernel must move; ``copy_us``: a copy that
    moves as many. ``chosen``: of the contender's choices of options, the fastest.
    """

    suite: str
    shape: Shape
    contender: str
    is_reference: bool = False
    status: RowStatus
    nbytes: int
    options: dict[str, OptionValue] = {}
    times: tuple[Timed, ...] = ()
    copy_us: float | None = None
    error_ratio: float | None = None
    note: str = ""
    chosen: bool = False

    def time(self, mode: Mode, l2: L2State) -> Timed | None:
        """The time of one of the measurements; None if it was not made."""
        return next((one for one in self.times if one.mode == mode and one.l2 == l2), None)

    def share_of_copy(self, mode: Mode, l2: L2State) -> float | None:
        """The time of a copy that moves as many bytes, from memory, over the median. Above 1 where the cache helps."""
        timed = self.time(mode, l2)
        if timed is None or self.copy_us is None or timed.median_us <= 0:
            return None
        return self.copy_us / timed.median_us


class Report(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """All of them. ``peak_gb_s``: bytes that a large copy reads and writes, per nanosecond. ``unreached``: left out
    since the budget was spent. ``references``: kernels of engines by their names, with the versions of these."""

    format: Literal["attnfuzz.bench-kernels/2"] = "attnfuzz.bench-kernels/2"
    started: str
    machine: MachineReply
    peak_gb_s: float
    suites: tuple[str, ...]
    references: dict[str, str] = {}
    results: list[Result]
    unreached: int = 0
    elapsed_s: float = 0.0

    def chosen(self, suite: str) -> list[Result]:
        """The results of a suite, the fastest choice of options for each contender and shape, in order."""
        return [result for result in self.results if result.suite == suite and result.chosen]


def encode_report(report: Report) -> bytes:
    """As JSON for people and programs."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
