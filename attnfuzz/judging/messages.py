"""Messages between runner and judging service: JSON, torch-free."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from attnfuzz.declaration import Absent, Declaration
from attnfuzz.explaining.accesses import Question
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.judging.leaks import MemoryUse
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.declared_numerics import Numerics, Tolerance
from attnfuzz.problems.supports import Supports
from attnfuzz.trials.script_part import ScriptPart
from attnfuzz.untrusted_text import NAME_BYTES, printable
from attnfuzz.verdict import Relations, Verdict

Edge = Literal["end", "start"]

_INFINITE = -1.0
"""Stands for an infinite ratio, which JSON cannot say."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request or reply."""


class DeviceRequest(_Message, frozen=True):
    """Start the device, and say what it is."""


class DeviceReply(_Message, frozen=True):
    """`device`: "cpu" or "cuda". `name`: of the processor or GPU. `versions`: of Python, torch, Triton, NumPy."""

    device: str
    name: str
    versions: dict[str, str]

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "name", printable(self.name, NAME_BYTES))
        versions = {printable(name, NAME_BYTES): printable(text, NAME_BYTES) for name, text in self.versions.items()}
        msgspec.structs.force_setattr(self, "versions", versions)


class Contract(_Message, frozen=True):
    """By which a process judges a kernel."""

    supports: Supports
    numerics: Numerics


class DeclarationsRequest(_Message, frozen=True):
    """Load all kernels that `targets` name, `within` a project's root if it is a file that names them.

    `contract`: from now on the kernel, of which `targets` is the only one, is judged by it, whatever its file declares.
    `known`: what they declare has been told before, so that their sources need not be read.
    `absent`: kernels of engines that cannot be had are told as well, and no error.
    """

    targets: list[str]
    within: str | None = None
    contract: Contract | None = None
    known: bool = False
    absent: bool = False


class DeclarationsReply(_Message, frozen=True):
    """`error`: why a target could not be loaded, in one sentence; `kernels` is empty then."""

    kernels: list[Declaration]
    error: str | None = None
    absent: list[Absent] = []


class PrepareRequest(_Message, frozen=True):
    """Have the kernel `target` do what it declares to do before its first case."""

    target: str


class PrepareReply(_Message, frozen=True):
    """`raised` says why it could not."""

    raised: str | None = None


class BuildRequest(_Message, frozen=True):
    """Begin to build what these kernels, of one engine, need for these cases; the process judges nothing afterwards.

    `cases`: the target of a kernel, and the JSON of a case of its problem.
    """

    cases: list[tuple[str, msgspec.Raw]]


class BuildReply(_Message, frozen=True):
    """`missing`: for each case the names of the modules that it needs and that are not there yet.

    `modules` is what the engine's are called; they are kept in `folder`, which the variable `setting` chooses.
    """

    missing: list[list[str]]
    modules: str
    folder: str
    setting: str

    def __post_init__(self) -> None:
        for name in ("modules", "folder", "setting"):
            msgspec.structs.force_setattr(self, name, printable(getattr(self, name), NAME_BYTES))


class BuiltRequest(_Message, frozen=True):
    """How far that has come."""


class BuiltReply(_Message, frozen=True):
    """`built`: how many of the missing modules are there now. `is_over`: no more of them will be."""

    built: int
    is_over: bool


class JudgeRequest(_Message, frozen=True):
    """Judge each of `cases`, the JSON of cases of its problem, on the kernel `target`.

    `together`: as a batch, which takes a fraction of the time on a GPU. Otherwise there is one case. `watched`: a
    kernel that has replaced what judges or times it fails, whatever else comes of it; without, only if attnfuzz fails
    of that.
    """

    target: str
    cases: list[msgspec.Raw]
    oracles: tuple[OracleName, ...]
    tolerance: Tolerance
    run_twice: bool = True
    inquire: bool = False
    relations: Relations = None
    together: bool = False
    watched: bool = False


class JudgeReply(_Message, frozen=True):
    """A verdict for each case, or none and one sentence on the reason.

    `environment`: no kernel can be judged here. `problem`: none of this problem, which a user's file defines, and which
    fails itself. `lost`: the GPU memory that this process may use does not
    hold the case beside what earlier ones left there, or a case of a batch took the GPU's context from this process,
    and it cannot be told which; the process ends. `gpu_share`: how much of that memory is still held once the cases
    have been judged, from 0 to 1.
    """

    verdicts: list[Verdict] = []
    environment: str | None = None
    problem: str | None = None
    lost: str | None = None
    gpu_share: float = 0.0


class OnCase(_Message, frozen=True):
    """About the kernel `target` on `case`, the JSON of a case of its problem."""

    target: str
    case: msgspec.Raw


class GrowthRequest(OnCase, frozen=True):
    """Call the kernel `calls` times on the case. The calls of the same case add up."""

    calls: int


class GrowthReply(_Message, frozen=True):
    """The memory that the process then has; `raised` says why there is none to tell of."""

    use: MemoryUse | None = None
    raised: str | None = None


class ExplainRequest(OnCase, frozen=True):
    """Explain what the kernel does wrong, as `oracle` says. No run of it begins after so many `seconds`."""

    oracle: OracleName
    seconds: float


class LinesRequest(OnCase, frozen=True):
    """Find lines of the kernel by runs of the case; what comes is an `ExplainReply`.

    Those that touch `tensors`, as a `question` says; without one, those at which one of the roundings `replays` is
    made, for which this must be the first run of the process on a GPU.
    """

    replays: tuple[str, ...] = ()
    question: Question | None = None
    tensors: tuple[str, ...] = ()


class ExplainReply(_Message, frozen=True):
    """`last`: the process may not be usable after what the kernel did in it, and ends."""

    explanation: Explanation
    last: bool = False


class GuardRequest(OnCase, frozen=True):
    """Run the kernel with `edge` of the tensors `names` at unmapped memory, others in ordinary one.

    `room`: bytes between edge and unmapped memory. Unless `aligned` is False there are as many more as it takes for
    tensors to be aligned as usual.
    """

    edge: Edge
    names: tuple[str, ...]
    room: int = 0
    aligned: bool = True


class ScriptPartRequest(OnCase, frozen=True):
    """Say what a script holds of the case; an engine's last function is called only if the kernel ``launches``."""

    launches: bool


class ScriptPartReply(_Message, frozen=True):
    """`part` is None where an adapter cannot be followed."""

    part: ScriptPart | None


class Neighbourhood(_Message, frozen=True):
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


class GuardReply(_Message, frozen=True):
    """`fault`: what CUDA says if the run cost the process its context, which ends then; `tensors` is empty if so."""

    fault: str | None = None
    tensors: tuple[Neighbourhood, ...] = ()


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
