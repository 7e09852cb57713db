"""Which tensor a stray write belongs to, and where it went."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from attnfuzz.memory.arena import Arena, Region
from attnfuzz.memory.patterns import bits
from attnfuzz.problems.shapes import Role

__all__ = ["Violation", "Where", "violations"]

Where = Literal["before", "after", "inside", "between"]


@dataclass(frozen=True, slots=True)
class Violation:
    """Memory that changed and should not have.

    `where`: in the red zone `before` or `after` the tensor, `inside` it (an input), or `between` its strided elements.
    `elements`: how many elements' worth of bytes changed. `distance`: elements from the tensor's first or last element
    to the nearest changed one, 1 for its neighbour (0 unless before or after). `index`: the first changed element
    (inside only). `shape` and `dtype` are the tensor's.
    """

    name: str
    role: Role
    where: Where
    elements: int
    distance: int
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


def violations(arena: Arena) -> list[Violation]:
    """Every stray write that `arena.damage()` noticed: outputs' surroundings first, then modified inputs."""
    found: list[Violation] = []
    for i, (chunk, expected) in enumerate(arena.compared()):
        changed = (chunk != expected).cpu()
        if changed.any():
            regions = [region for region in arena.regions if region.chunk == i]
            found += [*_within(regions, changed), *_around(regions, changed)]
    return sorted(found, key=lambda violation: (violation.where == "inside", violation.role == "input"))


def _within(regions: list[Region], changed: Bool[Tensor, " nbytes"]) -> list[Violation]:
    found = []
    for region in regions:
        view = region.tensor
        size = view.dtype.itemsize
        elements = bits(region.within(changed.view(torch.uint8)))
        hits = elements.nonzero()
        if len(hits):
            found.append(_violation(region, "inside", len(hits), index=tuple(hits[0].tolist())))
            elements.zero_()
        between = int(changed[region.start : region.end].sum())
        if between:
            found.append(_violation(region, "between", -(-between // size)))
    return found


def _around(regions: list[Region], changed: Bool[Tensor, " nbytes"]) -> list[Violation]:
    found = []
    first, last = regions[0], regions[-1]
    found += _zone(first, "before", changed, 0, first.start)
    for left, right in pairwise(regions):
        border = _border(left, right)
        found += _zone(left, "after", changed, left.end, border)
        found += _zone(right, "before", changed, border, right.start)
    found += _zone(last, "after", changed, last.end, changed.numel())
    return found


def _border(left: Region, right: Region) -> int:
    """Where `left`'s surroundings end: only outputs are written to, so a neighbour that is one has the blame."""
    if left.role == right.role:
        return left.end + left.zone
    return right.start if left.role == "output" else left.end


def _zone(region: Region, where: Where, changed: Bool[Tensor, " nbytes"], start: int, end: int) -> list[Violation]:
    hits = changed[start:end].nonzero()
    if not len(hits):
        return []
    size = region.tensor.dtype.itemsize
    nearest = int(hits[0]) + start - region.end if where == "after" else region.start - (int(hits[-1]) + start) - 1
    return [_violation(region, where, -(-len(hits) // size), distance=nearest // size + 1)]


def _violation(
    region: Region, where: Where, elements: int, *, distance: int = 0, index: tuple[int, ...] = ()
) -> Violation:
    shape, dtype = tuple(region.tensor.shape), str(region.tensor.dtype).removeprefix("torch.")
    return Violation(region.name, region.role, where, elements, distance, index, shape, dtype)
