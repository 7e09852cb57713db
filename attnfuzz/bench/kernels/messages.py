"""What the driver of ``attnfuzz bench kernels`` and the process that runs the kernels say to each other; torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

from attnfuzz.bench.kernels.shapes import Shape
from attnfuzz.problems.supports import OptionValue

__all__ = [
    "CopyReply",
    "CopyRequest",
    "L2State",
    "MachineReply",
    "MeasureReply",
    "MeasureRequest",
    "Mode",
    "Status",
    "Timed",
]

L2State = Literal["cold", "warm"]
Mode = Literal["eager", "graph"]
Status = Literal["ok", "wrong", "failed", "unmeasured", "unsupported"]
"""``failed``: the contender raised. ``unmeasured``: attnfuzz did, before or after the contender's call."""


class MachineReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The device and what runs on it. ``l2_bytes``: 0 where there is none to speak of."""

    device: str
    name: str
    l2_bytes: int = 0
    processors: int = 0
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
    """Of copies among buffers that the L2 cache cannot hold together."""

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
