"""What runner and judging service say to each other: JSON, torch-free."""

import math

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.execution.leaks import MemoryUse
from attnfuzz.oracles.verdict import OracleName, Relations, Verdict
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.tolerance import Tolerance
from attnfuzz.said import NAME_BYTES, printable

__all__ = [
    "DeclarationsReply",
    "DeclarationsRequest",
    "DeclaredReply",
    "DeclaredRequest",
    "DeviceReply",
    "GrowthReply",
    "GrowthRequest",
    "JudgeManyReply",
    "JudgeManyRequest",
    "JudgeReply",
    "JudgeRequest",
    "PrepareReply",
    "PrepareRequest",
    "from_wire",
    "to_wire",
]

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
