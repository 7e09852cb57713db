"""Which tensor a kernel reached beyond on a GPU, which way and how far: what CUDA does not tell, from further runs.

A run that faults costs a process and seconds, and one that does not next to nothing: each tensor is guarded alone,
until one is left beyond; with room beside it, what the kernel writes shows in the room; and how much room a read needs
is found by bisection, as far as the number of processes allows that it may take. A limit on the time would tell less
where more processes share a GPU. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.judging.messages import Edge, GuardReply, GuardRequest, Neighbourhood
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import GUARD_PAGE
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.problems.wording import plural, shape_of
from attnfuzz.verdict import Verdict

_MOST_FAULTS = 16
"""Most faults among the runs of one finding."""
_WORKSPACE = "workspace"
_VECTOR = 16
"""Bytes of alignment that tensors keep; within them a read is looked for with unaligned tensors."""
_MOST_ROOM = 1 << 16

Probe = Callable[[Edge, Sequence[str], int, bool], GuardReply | None]
"""A run with this edge of these tensors guarded, with so much room, aligned or not; None if it told nothing."""


def with_name(runner: Runner, declaration: Declaration, case: Case, verdict: Verdict) -> Verdict:
    """`verdict`, if it is of an access outside on a GPU with tensor and distance in its message, if they can be told.

    On a CPU the address of the access has told them.
    Raises what ``Runner.judge`` raises.
    """
    failure = verdict.failure
    if failure is None or failure.oracle != GUARD_PAGE.name or runner.device == "cpu":
        return verdict
    names = [failure.tensor] if failure.tensor else [*tensor_specs(case), _WORKSPACE]
    access = named_access(GuardedRuns(runner, declaration, case), names)
    if access is None:
        return verdict
    details = (failure.message, *failure.details)
    named = msgspec.structs.replace(failure, message=access.words, details=details, tensor=access.tensor)
    return msgspec.structs.replace(verdict, failure=named)


class GuardedRuns:
    """Runs of a kernel on a case, each in whatever process the last one left; none once too many have faulted."""

    def __init__(self, runner: Runner, declaration: Declaration, case: Case) -> None:
        self._runner = runner
        self._declaration = declaration
        self._case = msgspec.Raw(encode_case(case))
        self._faults_left = _MOST_FAULTS

    def __call__(self, edge: Edge, names: Sequence[str], room: int, aligned: bool) -> GuardReply | None:
        """See `Probe`."""
        if not self._faults_left:
            return None
        request = GuardRequest(self._declaration.target, self._case, edge, tuple(names), room, aligned)
        reply = self._runner.guarded(self._declaration, request)
        self._faults_left -= reply is None or reply.fault is not None
        return reply


@dataclass(frozen=True, slots=True)
class NamedAccess:
    """An access outside of ``tensor``, in ``words``."""

    tensor: str
    words: str


def named_access(probe: Probe, names: Sequence[str]) -> NamedAccess | None:
    """The first access that is found beyond one of the tensors ``names``; None if it cannot be told."""
    for edge in ("end", "start"):
        name = next((name for name in names if _faults(probe(edge, (name,), 0, True))), None)
        if name is not None:
            return NamedAccess(name, _sentence(edge, name, _distance(probe, edge, name)))
    return None


@dataclass(frozen=True, slots=True)
class _Distance:
    """``tensor`` is None where not even the largest room was enough. ``written``: the access is a write.

    ``nearest`` is an element that is touched, ``farthest`` one beyond which none is.
    """

    tensor: Neighbourhood | None = None
    written: bool = False
    nearest: int | None = None
    farthest: int | None = None


def _distance(probe: Probe, edge: Edge, name: str) -> _Distance:
    wide = probe(edge, (name,), _MOST_ROOM, True)
    if wide is None or _faults(wide) or not wide.tensors:
        return _Distance()
    touched = next((tensor for tensor in wide.tensors if tensor.written), None)
    if touched is not None:
        return _Distance(touched, written=True, nearest=touched.written)
    tensor = wide.tensors[0]
    enough = _room_needed(probe, edge, tensor)
    return _Distance(tensor, farthest=None if enough is None else -(-enough // tensor.itemsize))


def _room_needed(probe: Probe, edge: Edge, tensor: Neighbourhood) -> int | None:
    """How many bytes beyond the edge are touched; None if runs stop telling."""
    names, padding = (tensor.name,), -tensor.nbytes % _VECTOR if edge == "end" else 0
    low, high = 0, _MOST_ROOM // _VECTOR  # in vectors: the room of the one is too small, that of the other is enough
    tried = 1
    while high - low > 1:
        reply = probe(edge, names, padding + tried * _VECTOR, True)
        if reply is None:
            return None
        low, high = (tried, high) if _faults(reply) else (low, tried)
        tried = min(low * 16, (low + high) // 2) if low and high == _MOST_ROOM // _VECTOR else (low + high) // 2
    return _within_vector(probe, edge, tensor, padding + low * _VECTOR, padding + high * _VECTOR)


def _within_vector(probe: Probe, edge: Edge, tensor: Neighbourhood, low: int, high: int) -> int:
    """As `_room_needed`, between two rooms; ``high`` if the kernel does not take unaligned tensors."""
    low, high = low // tensor.itemsize, high // tensor.itemsize
    while high - low > 1:
        tried = (low + high) // 2
        reply = probe(edge, (tensor.name,), tried * tensor.itemsize, False)
        if reply is None or (reply.fault is not None and not _faults(reply)):
            break
        low, high = (tried, high) if _faults(reply) else (low, tried)
    return high * tensor.itemsize


def _faults(reply: GuardReply | None) -> bool:
    return reply is not None and reply.fault is not None and "illegal memory access" in reply.fault


def _sentence(edge: Edge, name: str, found: _Distance) -> str:
    side = "past" if edge == "end" else "before"
    verb = "wrote" if found.written else "read" if found.tensor else "read or wrote"
    tensor = found.tensor
    words = f"the kernel {verb} {side} {name}"
    if tensor is None:
        return f"{words}, perhaps more than {_MOST_ROOM} bytes {side} its {edge}"
    words += f" ({shape_of(tensor.dtype, tensor.shape)})"
    elements = found.nearest or found.farthest
    if elements is None:
        return f"{words}: up to {_MOST_ROOM} bytes {side} its {edge}"
    up_to = "up to " if found.nearest is None and elements > 1 else ""
    nbytes = plural(elements * tensor.itemsize, "byte")
    return f"{words}: {up_to}{plural(elements, 'element')} ({nbytes}) {side} its {edge}"
