"""A run of a trial's kernel on tensors, and with workspaces, of which one edge lies beside unmapped memory."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.arena import Arena
from attnfuzz.memory.fault_map import FaultMap
from attnfuzz.memory.guarded import Guard, GuardedArena
from attnfuzz.memory.guarded_of import guarded_memory
from attnfuzz.memory.patterns import Fill
from attnfuzz.oracles.exception import context_lost
from attnfuzz.oracles.observation import KernelRaised, call
from attnfuzz.oracles.relations.through_host import build_through_host
from attnfuzz.oracles.trial import Trial
from attnfuzz.problems.allocation import Allocator
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.recipes import StrideKind
from attnfuzz.problems.registry import problem_of
from attnfuzz.problems.shapes import Role

__all__ = ["Guarding", "run_guarded"]

_FILL: Fill = "nan"

_SMALL_NBYTES = 4 << 20
"""Of a case that is written faster on the host than on a GPU."""


@dataclass(frozen=True, slots=True)
class Guarding:
    """Which edge of which tensors (None: all) lies at unmapped memory.

    ``room`` and ``aligned`` are those of `GuardedArena`.
    """

    guard: Guard
    names: Container[str] | None = None
    room: int = 0
    aligned: bool = True

    def covers(self, name: str) -> bool:
        return self.names is None or name in self.names


class _Chosen:
    """An `Allocator` that has tensors guarded by name; the others come from ordinary memory."""

    def __init__(self, guarded: Arena, ordinary: Arena, guarding: Guarding) -> None:
        self.device = guarded.device
        self._arenas = {True: guarded, False: ordinary}
        self._guarding = guarding

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, strides: StrideKind, role: Role
    ) -> Tensor:
        """As the arena's."""
        return self._arenas[self._guarding.covers(name)].tensor(name, shape, dtype, strides=strides, role=role)

    def only_changes(self, name: str, where: Tensor) -> None:
        """As the arena's."""
        self._arenas[self._guarding.covers(name)].only_changes(name, where)


def run_guarded(trial: Trial, guarding: Guarding, fault_map: FaultMap) -> list[GuardedArena]:
    """Run the kernel; the arenas of guarded tensors and of guarded workspaces, as the run left them.

    A kernel that refuses its inputs ran on ordinary memory before: it is an alignment that it does not take, and that
    is its right. Raises `KernelRaised` for what costs the process its CUDA context, and for what is no exception, and
    `torch.OutOfMemoryError` where a GPU has no memory for such tensors.
    """
    memory = guarded_memory(trial.device)
    given, allocated = (
        GuardedArena(
            memory,
            fault_map,
            guard=guarding.guard,
            poison=_FILL,
            prefill=_FILL,
            room=guarding.room,
            aligned=guarding.aligned,
        )
        for _ in range(2)
    )
    inputs = _built(trial, _Chosen(given, _ordinary(trial), guarding))
    workspaces = allocated if guarding.covers("workspace") else _ordinary(trial)
    allocations = TrackedAllocations(trial.device, poison=_FILL, prefill=_FILL, arena=workspaces)
    try:
        call(trial.kernel, trial.case, inputs, allocations, wait=True)
    except KernelRaised as raised:
        if not raised.is_a(Exception) or context_lost(raised.error) is not None:
            raise
    return [given, allocated]


def _built(trial: Trial, allocator: Allocator) -> Any:
    case, supports = trial.case, trial.kernel.declaration.supports
    if trial.device != "cpu" and tensor_nbytes(case) <= _SMALL_NBYTES:
        return build_through_host(case, allocator, supports)
    return problem_of(case).build(case, allocator, supports, trial.reference.values_on(trial.device))


def _ordinary(trial: Trial) -> Arena:
    return Arena(trial.device, poison=_FILL, prefill=_FILL)
