"""Runs of a case that judge nothing: many in a row for memory that grows, beside unmapped memory, and recorded."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from attnfuzz.declaration import Kernel
from attnfuzz.explaining import torch_operations
from attnfuzz.explaining.accesses import AROUND, Access, Question, lines_of
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.explaining.operations import Operation, Operations, SourcePlace, places_of
from attnfuzz.explaining.reruns import Reruns
from attnfuzz.explaining.ttir import accesses_of_ttir, operations_of_ttir
from attnfuzz.inputs.registry import problem_of
from attnfuzz.isolation.memory_faults import FaultMap, installed
from attnfuzz.isolation.process import descendant_bytes, resident_bytes
from attnfuzz.judging.leaks import MemoryUse
from attnfuzz.judging.messages import GuardReply, GuardRequest, Neighbourhood
from attnfuzz.memory.arena import Arena, Region
from attnfuzz.memory.far import CACHES
from attnfuzz.memory.guarded import GuardedArena
from attnfuzz.memory.patterns import POISON_BYTES, prefill_bits
from attnfuzz.oracles.exception import context_lost
from attnfuzz.oracles.relations.guard_page import Guarding, run_guarded
from attnfuzz.oracles.relations.page_relocation import PAGE_RELOCATION
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.trials.observation import KernelRaised, Observation, call_options
from attnfuzz.trials.trial import Trial
from attnfuzz.triton_compat import interpreter_accesses, interpreter_operations
from attnfuzz.triton_compat.launches import recorded_launches
from attnfuzz.untrusted_text import text_of, type_name
from attnfuzz.verdict import SourceLine


class GrowthTrial:
    """`case` on `kernel`, as callers without attnfuzz would run it: each call has inputs of its own, none is watched.

    Buffers that the kernel allocates come from torch as they are, so that what it keeps of them is no more than that.
    """

    def __init__(self, kernel: Kernel, case: Case, *, device: str) -> None:
        self._kernel = kernel
        self._case = case
        self._device = device
        self._problem = problem_of(case)
        self._values = self._problem.values(case, device, kernel.declaration.supports)

    def use_after(self, calls: int) -> MemoryUse:
        """Call the kernel `calls` more times. Raises what it raises."""
        for _ in range(calls):
            self.call()
        if self._device == "cuda":
            torch.cuda.synchronize()
        gc.collect()
        _trim_heap()
        pid = os.getpid()
        on_gpu = torch.cuda.memory_allocated() if self._device == "cuda" else 0
        return MemoryUse((resident_bytes(pid) or 0) + descendant_bytes(pid), on_gpu)

    def call(self) -> None:
        """Call the kernel once, without a look at what comes of it. Raises what it raises."""
        arena = Arena(self._device, poison="nan", prefill="nan", capacity=tensor_nbytes(self._case))
        inputs = self._problem.build(self._case, arena, self._kernel.declaration.supports, self._values)
        self._kernel(inputs, **call_options(self._kernel, self._case))


def _trim_heap() -> None:
    """Give the system what the heap holds and nobody uses; in a process of long standing a leak would go into that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)


_MAP_BYTES = 1 << 16
"""Size of the fault map that stands in where none is installed."""


def guarded_reply(kernel: Kernel, case: Case, request: GuardRequest, *, device: str) -> GuardReply:
    """The reply of the run. Raises what `run_guarded` raises for other reasons than a lost context."""
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


def cause_lines(
    kernel: Kernel, case: Case, replays: Sequence[str], *, device: str, compiled: Iterable[str] = ()
) -> Explanation:
    """The lines at which ``kernel`` makes one of the roundings ``replays``, as `sources`; none if they are not known.

    ``compiled``: files with the TTIR of what Triton has compiled or found compiled, looked at after the run.
    """

    def places() -> tuple[SourcePlace, ...]:
        found = _recorded(kernel, case, device)
        for launch, file in enumerate(dict.fromkeys(compiled), 1):
            with contextlib.suppress(OSError):  # somebody has cleared the cache
                found += operations_of_ttir(Path(file).read_text(encoding="utf-8"), launch)
        return places_of(replays, Operations(found))

    return _told(places)


def access_lines(kernel: Kernel, case: Case, question: Question, tensors: Sequence[str], *, device: str) -> Explanation:
    """The lines at which ``kernel`` touches ``tensors`` as ``question`` says, as `sources`; none if they are not known.

    Of a kernel in Triton's interpreter they are seen as they happen; of one that Triton compiles, its TTIR says them. A
    process may end of what the kernel does.
    """

    def places() -> tuple[SourcePlace, ...]:
        if "triton" not in sys.modules:
            return ()
        trial = Trial(kernel, case, device=device, tolerance="bound")
        is_narrow = question == "narrow"
        if device == "cpu":  # an offset that was seen to be too large tells by itself
            return lines_of(question, () if is_narrow else tensors, _seen_accesses(trial, question))
        if question == "stray":  # what was compiled does not tell which of its stores went astray
            return ()
        return lines_of(question, tensors or (CACHES if is_narrow else ()), _compiled_accesses(trial))

    return _told(places)


def _seen_accesses(trial: Trial, question: Question) -> list[Access]:
    """The accesses of a run in Triton's interpreter; of narrow offsets, those of runs in which offsets are large."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return []
    unwritten = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    with interpreter_accesses.recorded({name: prefill_bits(of, "nan") for name, of in unwritten.items()}) as seen:
        if question == "narrow":
            PAGE_RELOCATION.check(trial)
        name_at = _names(trial.first)
    return [Access(one.kind, name_at(one.address), one.place, one.narrow, one.unwritten) for one in seen]


def _compiled_accesses(trial: Trial) -> list[Access]:
    """The accesses in the TTIR of what a run launches on a GPU."""
    with recorded_launches() as launches:
        name_at = _names(trial.first)
    found: list[Access] = []
    for launch in launches:
        found += accesses_of_ttir(launch.ttir, {name: name_at(at) for name, at in launch.addresses.items()})
    return found


def _names(seen: Observation) -> Callable[[int], str]:
    """The tensor of a run that lies at an address, or `AROUND`; empty if it is no memory of the run."""
    regions = [region for arena in (seen.given, seen.allocated) for region in arena.regions]
    places = [(first := one.tensor.data_ptr(), first + one.end - one.start, one.name) for one in regions]
    zones = [(start - one.zone, end + one.zone, AROUND) for one, (start, end, _) in zip(regions, places, strict=True)]
    return lambda address: next((name for start, end, name in (*places, *zones) if start <= address < end), "")


def _told(places: Callable[[], tuple[SourcePlace, ...]]) -> Explanation:
    """The lines at ``places``. A finding is not lost to a fault in what looks for them: that is what is told then."""
    try:
        return Explanation(sources=tuple(SourceLine.at(*place) for place in places()))
    except KernelRaised:
        return Explanation()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return Explanation(lines=(f"(attnfuzz could not look for the line: {type_name(error)}: {text_of(error)})",))


def _recorded(kernel: Kernel, case: Case, device: str) -> list[Operation]:
    """Record the operations of torch and Triton's interpreter in a run."""
    reruns = Reruns(kernel, case, device=device, is_over=lambda: False)
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules
    with contextlib.ExitStack() as recording:
        parts = [recording.enter_context(torch_operations.recorded())]
        if is_interpreted:
            parts.append(recording.enter_context(interpreter_operations.recorded()))
        reruns.run()
    return [one for part in parts for one in part]
