"""The executor's side of naming an access outside on a GPU: one run with chosen tensors guarded."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnfuzz.declaration import Kernel
from attnfuzz.execution.guard_messages import GuardReply, GuardRequest, Neighbourhood
from attnfuzz.judging.observation import KernelRaised
from attnfuzz.judging.trial import Trial
from attnfuzz.memory.arena import Region
from attnfuzz.memory.fault_map import FaultMap, installed
from attnfuzz.memory.guarded import GuardedArena
from attnfuzz.memory.patterns import POISON_BYTES
from attnfuzz.oracles.exception import context_lost
from attnfuzz.oracles.relations.guard_page import Guarding, run_guarded
from attnfuzz.problems.cases import Case

__all__ = ["guarded_reply"]

_MAP_BYTES = 1 << 16
"""Of a map that nobody reads."""


def guarded_reply(kernel: Kernel, case: Case, request: GuardRequest, *, device: str) -> GuardReply:
    """What came of the run. Raises what `run_guarded` raises for other reasons than a lost context."""
    fault_map = installed() or FaultMap(memoryview(bytearray(_MAP_BYTES)))
    trial = Trial(kernel, case, device=device, tolerance="bound")
    guarding = Guarding(request.edge, request.names, room=request.room, aligned=request.aligned)
    with fault_map.recording():
        try:
            arenas = run_guarded(trial, guarding, fault_map)
        except KernelRaised as raised:
            fault = context_lost(raised.error)
            if fault is None:
                raise
            return GuardReply(fault)
    return GuardReply(tensors=tuple(_neighbourhoods(arenas, request)))


def _neighbourhoods(arenas: list[GuardedArena], request: GuardRequest) -> Iterator[Neighbourhood]:
    for arena in arenas:
        for region in arena.regions:
            tensor = region.tensor
            yield Neighbourhood(
                name=region.name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                itemsize=tensor.dtype.itemsize,
                nbytes=region.end - region.start,
                written=_written(arena, region, request),
            )


def _written(arena: GuardedArena, region: Region, request: GuardRequest) -> int:
    beside = arena.room_beside(region)
    changed = torch.nonzero(beside != POISON_BYTES[arena.poison]).flatten()
    if not changed.numel():
        return 0
    nearest = int(changed[0]) if request.edge == "end" else beside.numel() - 1 - int(changed[-1])
    return nearest // region.tensor.dtype.itemsize + 1
