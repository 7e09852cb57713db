"""The memory of a case, prepared once and changed at will before each run of the kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from attnfuzz.declaration import Kernel
from attnfuzz.inputs.registry import problem_of
from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.arena import Arena, Region
from attnfuzz.memory.patterns import POISON_BYTES, Fill, bits, prefill_
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.trials.comparison import natural_lse
from attnfuzz.trials.observation import call

UNIT = 2
"""Bytes of the smallest piece of memory that is changed by itself: one element of float16, two of an 8-bit cache."""

_ZONES_PER_TENSOR = 4 * 256

Results = dict[str, Tensor]


class OutOfRuns(Exception):  # noqa: N818 - control flow, like StopIteration
    """The time for explaining is over."""


class Reruns:
    """Runs `kernel` on `case` as often as asked, each time from the same memory.

    Dead memory holds small numbers, and 0 beside integer tensors, so that what a kernel reads by mistake neither kills
    it nor turns everything into NaN. `inputs` are views of the memory of the next run: whoever changes them calls
    `reset` first.
    """

    def __init__(self, kernel: Kernel, case: Case, *, device: str, is_over: Callable[[], bool]) -> None:
        """`is_over`: asked before each run; `run` raises `OutOfRuns` once it says so."""
        self.kernel = kernel
        self.case = case
        self.device = device
        self.runs = 0
        self.workspaces: list[Tensor] = []
        """What the kernel allocated in the last run, as far as attnfuzz sees it."""
        self.problem = problem_of(case)
        self.values = self.problem.values(case, device, kernel.declaration.supports)
        self._is_over = is_over
        self._template: list[Tensor] = []
        self.inputs, self.regions, self._chunks = self._build("finite")
        _, _, poisoned = self._build("nan")
        self._dead = [chunk != other for chunk, other in zip(self._chunks, poisoned, strict=True)]
        for words, dead in self.dead_integers().values():  # a stray length would make a kernel run for ever, a page
            words[dead] = 0  # id kill it
        self.keep()

    def of(self, case: Case) -> Reruns:
        """Make reruns of the same kernel on another case, in the same time."""
        return Reruns(self.kernel, case, device=self.device, is_over=self._is_over)

    def reset(self) -> Any:
        """Put the memory back to what it was at first; the inputs, for changing them."""
        for chunk, template in zip(self._chunks, self._template, strict=True):
            chunk.copy_(template)
        return self.inputs

    def keep(self) -> None:
        """Let the memory as it is now be what `reset` goes back to."""
        self._template = [chunk.clone() for chunk in self._chunks]

    def run(self, *, prefill: Fill = "finite") -> Results:
        """One run on the memory as it is now; results by name, as the kernel returns them, on the host.

        Raises `OutOfRuns`, and `KernelRaised` for what the kernel raised.
        """
        self.check_time()
        self.runs += 1
        allocations = TrackedAllocations(self.device, poison="finite", prefill=prefill)
        results = call(self.kernel, self.case, copy.copy(self.inputs), allocations, wait=True)
        self.workspaces = [region.tensor for region in allocations.arena.regions]
        return {name: result.cpu().clone() for name, result in results.items()}

    def check_time(self) -> None:
        """Raise `OutOfRuns` once the time is over."""
        if self._is_over():
            raise OutOfRuns

    def leave_out_lse(self) -> None:
        """Let later runs be those of a kernel that returns its output alone."""
        self.kernel = self.kernel.without_lse()

    def changed_inputs(self) -> list[str]:
        """Inputs that the last run, or whoever came before it, has changed since `reset`."""
        inputs = [region for region in self.regions if region.role == "input"]
        templates = [region.within(self._template[region.chunk]) for region in inputs]
        pairs = zip(inputs, templates, strict=True)
        return [region.name for region, before in pairs if bool((bits(region.tensor) != bits(before)).any())]

    def prefill(self, fill: Fill) -> None:
        """Let the outputs that the kernel is given hold this before the next run."""
        for region in self.regions:
            if region.role == "output":
                prefill_(region.tensor, fill)

    def logical(self, results: Results) -> tuple[Tensor, Tensor | None]:
        """Output and natural LSE of a run in the axes of the reference, in float64; None without an LSE."""
        out, *rest = results.values()
        if not rest:
            lse = torch.zeros(out.shape[:-1], dtype=torch.float64, device="cpu")
            return self.problem.logical_result(self.case, out, lse)[0], None
        return self.problem.logical_result(self.case, out, natural_lse(self.kernel.declaration, rest[0]))

    def dead_units(self) -> Int64[Tensor, " units"]:
        """Addresses of everything that a kernel must not read, beside integer tensors, in units of `UNIT` bytes."""
        found = []
        for i, dead in enumerate(self._dead):
            floats = dead.clone()
            for region in self.regions:
                if region.chunk == i and region.tensor.dtype is torch.int32:
                    floats[self._with_zones(region)] = False
            found.append(floats.view(-1, UNIT).all(-1).nonzero()[:, 0] + self._first_unit(i))
        return torch.cat(found).cpu()

    def poison_(self, units: Int64[Tensor, " units"]) -> None:
        """Turn dead memory into NaN at these addresses."""
        for i, chunk in enumerate(self._chunks):
            first = self._first_unit(i)
            mine = units[(units >= first) & (units < first + chunk.numel() // UNIT)] - first
            chunk.view(-1, UNIT)[mine.to(chunk.device)] = POISON_BYTES["nan"]

    def place_of(self, unit: int) -> tuple[Region, int]:
        """The tensor that an address lies in or nearest to, and its distance in bytes from the first element."""
        chunk, byte = self._within_chunk(unit)
        nearby = [region for region in self.regions if region.chunk == chunk]
        region = min(nearby, key=lambda region: max(region.start - byte, byte - region.end + 1, 0))
        return region, byte - region.start

    def zone_of(self, unit: int) -> int:
        """A number for the stretch between two tensors that an address lies in."""
        chunk, byte = self._within_chunk(unit)
        return sum((region.chunk, region.start) <= (chunk, byte) for region in self.regions)

    def _within_chunk(self, unit: int) -> tuple[int, int]:
        chunk = max(i for i in range(len(self._chunks)) if self._first_unit(i) <= unit)
        return chunk, (unit - self._first_unit(chunk)) * UNIT

    def dead_integers(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By name, the words around and between the elements of integer tensors that a kernel must not read.

        Each with its indices into the tensor's surroundings, an int32 view of which comes first.
        """
        found = {}
        for region in self.regions:
            if region.tensor.dtype is torch.int32:
                place = self._with_zones(region)
                words = self._chunks[region.chunk][place].view(torch.int32)
                dead = self._dead[region.chunk][place].view(-1, 4).all(-1).nonzero()[:, 0]
                found[region.name] = (words, dead)
        return found

    def _build(self, poison: Fill) -> tuple[Any, list[Region], list[UInt8[Tensor, " nbytes"]]]:
        chunks: list[Tensor] = []

        def source(nbytes: int) -> Tensor:
            chunks.append(torch.full((nbytes,), POISON_BYTES[poison], dtype=torch.uint8, device=self.device))
            return chunks[-1]

        capacity = tensor_nbytes(self.case) + _ZONES_PER_TENSOR * len(tensor_specs(self.case))
        arena = Arena(self.device, poison=poison, prefill="finite", capacity=capacity, source=source)
        inputs = self.problem.build(self.case, arena, self.kernel.declaration.supports, self.values)
        return inputs, arena.regions, chunks

    def _with_zones(self, region: Region) -> slice:
        start = (region.start - region.zone) // 4 * 4
        return slice(start, start + (region.end + region.zone - start) // 4 * 4)

    def _first_unit(self, chunk: int) -> int:
        return sum(earlier.numel() for earlier in self._chunks[:chunk]) // UNIT
