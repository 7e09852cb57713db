"""What runner and judging service say to each other: JSON, torch-free."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.judging.leaks import MemoryUse
from attnfuzz.oracles.verdict import OracleName, Relations, Verdict
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.tolerance import Tolerance
from attnfuzz.said import NAME_BYTES, printable

__all__ = [
    "CauseLinesRequest",
    "DeclarationsReply",
    "DeclarationsRequest",
    "DeclaredReply",
    "DeclaredRequest",
    "DeviceReply",
    "Edge",
    "ExplainReply",
    "ExplainRequest",
    "GrowthReply",
    "GrowthRequest",
    "GuardReply",
    "GuardRequest",
    "JudgeManyReply",
    "JudgeManyRequest",
    "JudgeReply",
    "JudgeRequest",
    "Neighbourhood",
    "PrepareReply",
    "PrepareRequest",
    "from_wire",
    "to_wire",
]

Edge = Literal["end", "start"]


class GuardRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Run the kernel `target` on `case` with `edge` of the tensors `names` at unmapped memory, others in ordinary one.

    `room`: bytes between edge and unmapped memory. Unless `aligned` is False there are as many more as it takes for
    tensors to be aligned as usual.
    """

    target: str
    case: msgspec.Raw
    edge: Edge
    names: tuple[str, ...]
    room: int = 0
    aligned: bool = True


class Neighbourhood(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A guarded tensor after a run.

    `nbytes`: from its first to its last element. `written`: the nearest element beyond the edge that the kernel wrote
    to, 1 for the neighbour of the last or first one; 0 if none of the next 64 KiB changed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: Annotated[int, msgspec.Meta(ge=1)]
    nbytes: int
    written: int


class GuardReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`fault`: what CUDA says if the run cost the process its context, which ends then; `tensors` is empty if so."""

    fault: str | None = None
    tensors: tuple[Neighbourhood, ...] = ()


class ExplainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Explain what the kernel `target` does wrong on `case`, the JSON of a case of its problem, as `oracle` says.

    No run of the kernel begins after so many `seconds`.
    """

    target: str
    case: msgspec.Raw
    oracle: OracleName
    seconds: float


class ExplainReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`last`: the process may not be usable after what the kernel did in it, and ends."""

    explanation: Explanation
    last: bool = False


class CauseLinesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Find the lines of the kernel `target` at which one of the roundings `replays` is made, by a run of `case`.

    On a GPU this must be the first run of the process. What comes is an `ExplainReply`.
    """

    target: str
    case: msgspec.Raw
    replays: tuple[str, ...]


_INFINITE = -1.0
"""Stands for an infinite ratio, which JSON cannot say."""


class DeclarationsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load all kernels that `targets` name, `within` a project's root if it is a file that names them."""

    targets: list[str]
    within: str | None = None


class DeclarationsReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`error`: why a target could not be loaded, in one sentence; `kernels` is empty then."""

    kernels: list[Declaration]
    error: str | None = None


class DeclaredRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From now on judge the kernel `target` by these, whatever its file declares."""

    target: str
    supports: Supports
    numerics: Numerics


class DeclaredReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """It is done."""


class PrepareRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Have the kernel `target` do what it declares to do before its first case."""

    target: str


class PrepareReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`raised` says why it could not."""

    raised: str | None = None


class JudgeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Judge `case`, the JSON of a case of the kernel's problem, on the kernel `target`."""

    target: str
    case: msgspec.Raw
    oracles: tuple[OracleName, ...]
    tolerance: Tolerance
    thorough: bool = True
    relations: Relations = None


class JudgeReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Without a verdict, one sentence on the reason.

    `environment`: no kernel of this kind can be judged here. `exhausted`: the GPU memory that this process may use does
    not hold the case beside what earlier ones left there; the process ends. `gpu_share`: how much of that memory is
    still held once the case has been judged, from 0 to 1.
    """

    verdict: Verdict | None = None
    environment: str | None = None
    exhausted: str | None = None
    gpu_share: float = 0.0


class JudgeManyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Judge each of `cases`, the JSON of cases of the kernel's problem, on the kernel `target`."""

    target: str
    cases: list[msgspec.Raw]
    oracles: tuple[OracleName, ...]
    tolerance: Tolerance
    relations: Relations = None


class JudgeManyReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A verdict for each case, or none and one sentence on the reason.

    `environment` and `gpu_share`: as in `JudgeReply`. `lost`: one of the cases took the GPU's context or memory from
    this process, and it cannot be told which; the process ends.
    """

    verdicts: list[Verdict] = []
    environment: str | None = None
    lost: str | None = None
    gpu_share: float = 0.0


class GrowthRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Call the kernel `target` `calls` times on `case`. The calls of the same case add up."""

    target: str
    case: msgspec.Raw
    calls: int


class GrowthReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory that the process then has; `raised` says why there is none to tell of."""

    use: MemoryUse | None = None
    raised: str | None = None


class DeviceReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`device`: "cpu" or "cuda". `name`: of the processor or GPU. `versions`: of Python, torch, Triton, NumPy."""

    device: str
    name: str
    versions: dict[str, str]

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "name", printable(self.name, NAME_BYTES))
        versions = {printable(name, NAME_BYTES): printable(text, NAME_BYTES) for name, text in self.versions.items()}
        msgspec.structs.force_setattr(self, "versions", versions)


def to_wire(verdict: Verdict) -> Verdict:
    """`verdict` with infinite ratios replaced by a number."""
    return _with_ratios(verdict, math.inf, _INFINITE)


def from_wire(verdict: Verdict) -> Verdict:
    """Undo `to_wire`."""
    return _with_ratios(verdict, _INFINITE, math.inf)


def _with_ratios(verdict: Verdict, old: float, new: float) -> Verdict:
    failure = verdict.failure
    if failure is not None and failure.error_ratio == old:
        failure = msgspec.structs.replace(failure, error_ratio=new)
    ratio = new if verdict.error_ratio == old else verdict.error_ratio
    return msgspec.structs.replace(verdict, failure=failure, error_ratio=ratio)
