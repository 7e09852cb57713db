"""Which tensors get a wide stride, and along which dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attnfuzz.declaration import Declaration
from attnfuzz.memory.far import CACHES, MOST_ROWS
from attnfuzz.problems.cases import Case
from attnfuzz.problems.choices import strided_tensors_of
from attnfuzz.problems.shapes import strides_of, tensor_specs

__all__ = ["stretched_axes"]

_ORDERS: dict[str, tuple[int, ...]] = {
    "q": (0, 1, 2),
    "out": (1, 2, 0),
    "k": (1, 2, 0),  # tokens: what a loop over tiles multiplies by a stride
    "v": (2, 1, 0),
    "partial_out": (2, 0, 1, 3),
    "partial_lse": (1, 2, 0),
    "prefix_output": (0, 1, 2),
    "suffix_output": (1, 2, 0),
    "output": (2, 0, 1),
}
"""Dimensions of a tensor in the order of the turns; together they cover each index of a kernel in two turns."""


def stretched_axes(declaration: Declaration, case: Case, turn: int) -> Mapping[str, int]:
    """Contiguous tensors that could as well have a wide stride, as far as the kernel declares to take any.

    Where a dimension has three indices or more, the stride itself fits into 32 bits: those come first.
    """
    strides = declaration.supports.strides
    if strides == "contiguous":
        return {}
    specs = tensor_specs(case)
    found = {}
    for name in strided_tensors_of(case.problem, declaration.supports):
        if name in CACHES or strides_of(case, name) != "contiguous":
            continue
        shape = specs[name].shape
        order = [axis for axis in _ORDERS.get(name, range(len(shape))) if strides == "any" or axis < len(shape) - 1]
        axes = [axis for axis in order if shape[axis] > 1 and math.prod(shape[: axis + 1]) <= MOST_ROWS]
        if axes and 0 not in shape:
            preferred = [axis for axis in axes if shape[axis] > 2] or axes
            found[name] = preferred[turn % len(preferred)]
    return found
