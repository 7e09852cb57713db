"""A call captured once into a CUDA graph and replayed on other contents: what an eager call gives on them.

`Supports(graph_replay=True)` says so. A graph repeats launches with the arguments that they had, so whatever the host
worked out from the lengths is frozen: the grid, the number of splits, a copy of the table, a counter set back by the
host. Servers capture with one batch and replay with all others, shorter, longer and padded with empty rows.

The replays come one after another, with no other call in between that could put things right, then the eager calls,
then one more replay: what they made a kernel allocate anew is gone from under the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.arena import Arena
from attnfuzz.oracles.comparison import Comparison, Reference, compare
from attnfuzz.oracles.cuda_graph import CapturedCall, captured_call
from attnfuzz.oracles.elements import extent, first_index
from attnfuzz.oracles.observation import KernelRaised, Observation, call
from attnfuzz.oracles.relations.fresh_copy import fresh_copy
from attnfuzz.oracles.relations.graph_contents import MOST_BYTES, Content, contents_of, with_room
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.oracles.relations.transformed import unequal_bits
from attnfuzz.oracles.trial import Trial
from attnfuzz.oracles.verdict import Failure, OracleName
from attnfuzz.oracles.words import element, number, ratio
from attnfuzz.problems.allocation import allocate
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.registry import problem_of
from attnfuzz.problems.shapes import tensor_specs

__all__ = ["GRAPH_REPLAY"]

_NAME: OracleName = "graph_replay"
_REASONS = (
    "look for what is frozen when the graph is captured: a grid or a number of splits computed on the host, a copy of "
    "the block table or the lengths, a workspace that only the host clears or that has been allocated anew since"
)

_ROOM_PER_TENSOR = 1 << 18
"""Bytes: more than alignment and both red zones take, so that one chunk holds all tensors of a case."""

Tensors = dict[str, Tensor]
Memory = UInt8[Tensor, " nbytes"]


def _applies(declaration: Declaration, case: Case) -> bool:
    return declaration.supports.graph_replay and tensor_nbytes(case) <= MOST_BYTES


def _check(trial: Trial) -> Failure | None:
    rig = _Rig.of(trial)
    contents = [(content, _image(trial, content)) for content in rig.contents]
    first, image = contents[0]
    rig.load(image)
    with captured_call(trial.kernel, rig.captured, rig.inputs) as graph:
        replayed = [rig.replayed(graph, *content) for content in contents]
        eager = [rig.eager(trial.kernel, *content) for content in contents]
        for content, right, found in zip(rig.contents, eager, replayed, strict=True):
            if (failure := _objection(trial, content, right, found)) is not None:
                return failure
        again = Content(first.case, f"{first.words}, after calls on other contents")
        if (failure := _objection(trial, again, eager[0], rig.replayed(graph, again, image))) is not None:
            return failure
    stale = (_stale(rig, *content, found) for content, found in zip(contents[1:], eager[1:], strict=True))
    return next(filter(None, stale), None)


@dataclass(frozen=True, slots=True)
class _Rig:
    """The tensors that a call is captured with, and what goes into them."""

    trial: Trial
    captured: Case
    memory: Memory
    inputs: Any
    contents: Sequence[Content]

    @classmethod
    def of(cls, trial: Trial) -> _Rig:
        declaration = trial.kernel.declaration
        captured = with_room(declaration, trial.case)
        tensors, memory = _allocated(captured, trial.device)
        inputs = problem_of(captured).inputs(captured, tensors)
        return cls(trial, captured, memory, inputs, contents_of(declaration, captured))

    def load(self, image: Memory) -> None:
        """Overwrite everything: dead elements and outputs with NaN."""
        self.memory.copy_(image)

    def replayed(self, graph: CapturedCall, content: Content, image: Memory) -> Tensors:
        self.load(image)
        for result in graph.results.values():
            result.fill_(float("nan"))
        graph.replay(f"replayed {content.words}")
        return problem_of(content.case).owned(
            content.case, {name: result.clone() for name, result in graph.results.items()}
        )

    def eager(self, kernel: Kernel, content: Content, image: Memory) -> Tensors:
        self.load(image)
        allocations = TrackedAllocations(self.trial.device, poison="nan", prefill="nan")
        try:
            results = call(kernel, self.captured, self.inputs, allocations, wait=True)
        except KernelRaised as raised:
            raise KernelRaised(raised.error, raised.poison, f"called {content.words}") from raised.error
        return problem_of(content.case).owned(content.case, {name: result.clone() for name, result in results.items()})


def _image(trial: Trial, content: Content) -> Memory:
    """What the memory of a case holds, made on the host: one copy brings it to the device."""
    problem = problem_of(content.case)
    (contents,) = problem.contents([content.case], "cpu", trial.kernel.declaration.supports)
    tensors, memory = _allocated(content.case, "cpu")
    one_run = {name: tensor[None] for name, tensor in tensors.items()}
    problem.write(content.case, one_run, contents.values, contents.placement)
    return memory


def _allocated(case: Case, device: str) -> tuple[Tensors, Memory]:
    """The tensors of `case`, and the stretch that all of them lie in: at the same places for cases of equal shapes."""
    capacity = tensor_nbytes(case) + _ROOM_PER_TENSOR * len(tensor_specs(case))
    arena = Arena(device, poison="nan", prefill="nan", capacity=capacity)
    tensors = allocate(case, arena)
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(next(iter(tensors.values())).untyped_storage())
    return tensors, whole[: max(region.end for region in arena.regions)]


def _objection(trial: Trial, content: Content, eager: Tensors, replayed: Tensors) -> Failure | None:
    words = f"when the graph is replayed {content.words}"
    if not trial.kernel.declaration.supports.deterministic:
        return _beyond_bounds(trial, content.case, eager, replayed, words)
    right, found = ({name: result.cpu() for name, result in results.items()} for results in (eager, replayed))
    return unequal_bits(_NAME, content.case, right, found, words, details=(_REASONS,), as_it_was="in an eager call")


def _beyond_bounds(trial: Trial, case: Case, eager: Tensors, replayed: Tensors, words: str) -> Failure | None:
    """An objection to what is outside its bound in the replay, and inside in the eager call."""
    rights, founds = (_compared(trial, case, results) for results in (eager, replayed))
    for right, found in zip(rights, founds, strict=True):
        mask = (found.ratio > 1) & (right.ratio <= 1)
        if mask.any():
            return _outside(found, mask, f"is {_at(right, mask)} in an eager call, but {_at(found, mask)} {words}")
    return None


def _stale(rig: _Rig, content: Content, image: Memory, eager: Tensors) -> Failure | None:
    """An objection to what replays and eager calls agree on, if it is right before any other call.

    Such a kernel has kept for the eager calls, too, what it worked out when it was first called with these shapes.
    """
    trial = rig.trial
    found = next((one for one in _compared(trial, content.case, eager) if bool((one.ratio > 1).any())), None)
    fresh = None if found is None else fresh_copy(trial.kernel)
    if found is None or fresh is None:
        return None
    anew = _compared(trial, content.case, rig.eager(fresh, content, image))
    if any(bool((one.ratio > 1).any()) for one in anew):
        return None  # it is wrong by itself
    mask = found.ratio > 1
    right = next(one for one in anew if one.name == found.name)
    said = f"is {_at(right, mask)} before any other call, but {_at(found, mask)} when the graph is replayed"
    return _outside(found, mask, f"{said} {content.words}, and in an eager call after that")


def _compared(trial: Trial, case: Case, results: Tensors) -> list[Comparison]:
    reference = Reference(trial.kernel.declaration, case, device=trial.device, tolerance=trial.reference.tolerance)
    return compare(reference, _seen(trial, results))


def _outside(found: Comparison, mask: Bool[Tensor, "..."], said: str) -> Failure:
    index = first_index(mask)
    worst = float(found.ratio[index])
    return Failure(
        oracle=_NAME,
        kind=found.name,
        message=f"{element(found.name, found.axes, index)} {said}: {ratio(worst)} times the error bound",
        details=(f"it changes {extent(found.name, found.axes, mask)}", _REASONS),
        error_ratio=worst,
        tensor=found.name,
    )


def _at(comparison: Comparison, mask: Bool[Tensor, "..."]) -> str:
    return number(float(comparison.got[first_index(mask)]))


def _seen(trial: Trial, results: Tensors) -> Observation:
    nothing = Arena(trial.device, poison="nan", prefill="nan")
    return Observation("nan", "nan", None, given=nothing, allocated=nothing, results=results)


GRAPH_REPLAY = Relation(_NAME, _applies, _check, devices=("cuda",), costly_on=("cuda",))
