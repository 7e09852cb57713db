"""Which tensors get a wide stride, and along which dimension.

A dimension is stretched where a kernel takes any strides, or where a real tensor has that many entries: pages of a
cache, tokens of q and of results, sequences and tokens of a dense K and V. A kernel that takes a tensor for contiguous,
as it may where engines hand over no other, is not asked about that one (`attnfuzz.oracles.relations.page_relocation`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from attnfuzz.declaration import Declaration
from attnfuzz.memory.far import CACHES, MOST_ROWS, stretched_nbytes
from attnfuzz.memory.reservation import MOST_BYTES
from attnfuzz.problems.cases import Case, MergeStatesCase, PagedDecodeCase
from attnfuzz.problems.choices import permits_gap, strided_tensors_of
from attnfuzz.problems.shapes import ITEMSIZE, TensorSpec, named_in_strides, strides_of, tensor_specs
from attnfuzz.problems.supports import Layout

__all__ = ["stretched_axes", "stretched_cache_axes"]

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

_WITHIN_PAGES: dict[Layout, tuple[int, ...]] = {
    "NHD": (1, 2),
    "HND": (2, 1),
    "packed": (3, 1, 2),
    "interleaved": (2, 3),
}
"""Dimensions of a cache: tokens of a page, KV heads, and the head dimension where another one is inside of it."""


_LARGE_IN_SERVING: dict[str, tuple[int, ...]] = {
    "q": (0,),
    "out": (0,),
    **dict.fromkeys(("k", "v"), (1, 0)),
    "partial_out": (0,),
    "prefix_output": (0,),
    "suffix_output": (0,),
    "output": (0,),
    **dict.fromkeys(CACHES, (0,)),
}
"""Dimensions, in the order of the turns, with so many entries in some engine that offsets pass 2^31."""


def stretched_axes(declaration: Declaration, case: Case, turn: int, *, most_rows: int = MOST_ROWS) -> Mapping[str, int]:
    """Contiguous tensors that could as well have a wide stride, as far as the kernel declares to take any.

    Where a dimension has three indices or more, the stride itself fits into 32 bits: those come first, in an order that
    differs from case to case. Caches stay as they are. ``most_rows``: vectors that may lie apart then.
    """
    found = {}
    for name, spec in _free_to_stretch(declaration, case).items():
        order: Iterable[int] = _ORDERS.get(name, range(len(spec.shape)))
        if declaration.supports.strides == "serving":
            order = _LARGE_IN_SERVING.get(name, ())
        order = () if name in CACHES else order
        axes = _possible(declaration, name, spec, order, most_rows)
        if axes:
            preferred = [axis for axis in axes if spec.shape[axis] > 2] or axes
            found[name] = preferred[(_lot(case) + turn) % len(preferred)]
    return found


def stretched_cache_axes(
    declaration: Declaration, case: Case, turn: int, *, most_rows: int = MOST_ROWS
) -> Mapping[str, int]:
    """Caches with a wide stride between the tokens of a page, or between heads; V the other way round than K.

    As in `stretched_axes`, three indices or more come first. Where engines' strides are all, it is between pages.

    In a turn of its own: pages cannot be moved far away at the same time, and strides around a wide one do not fit into
    32 bits any more.
    """
    if not isinstance(case, PagedDecodeCase):
        return {}
    found = {}
    for name, spec in _free_to_stretch(declaration, case).items():
        tokens, heads, *others = _WITHIN_PAGES[case.layout]
        order = (tokens, heads, *others) if name != "v_cache" else (heads, tokens, *others)
        order = _LARGE_IN_SERVING[name] if declaration.supports.strides == "serving" and name in CACHES else order
        axes = _possible(declaration, name, spec, order, most_rows) if name in CACHES else []
        many = [axis for axis in axes if spec.shape[axis] > 2]
        first = _lot(case) % max(1, len(many))
        axes = [*many[first:], *many[:first], *(axis for axis in axes if axis not in many)]
        if len(axes) > turn:
            found[name] = axes[turn]
    return found


def _lot(case: Case) -> int:
    """A number that a shrinking case keeps, so that it goes on showing what it showed."""
    return case.seed if isinstance(case, MergeStatesCase) else case.values.seed


def _free_to_stretch(declaration: Declaration, case: Case) -> dict[str, TensorSpec]:
    if declaration.supports.strides == "contiguous":
        return {}
    specs = tensor_specs(case)
    names = strided_tensors_of(case.problem, declaration.supports)
    found = {name: spec for name, spec in specs.items() if named_in_strides(case, name) in names}
    return {
        name: spec for name, spec in found.items() if strides_of(case, name) == "contiguous" and 0 not in spec.shape
    }


def _possible(declaration: Declaration, name: str, spec: TensorSpec, order: Iterable[int], most_rows: int) -> list[int]:
    """Those dimensions in ``order`` that may have gaps and have an index to stretch by, and not too many."""
    shape, allowed = spec.shape, declaration.supports.strides
    return [
        axis
        for axis in order
        if (allowed == "serving" or permits_gap(allowed, name, axis, len(shape)))
        and shape[axis] > 1
        and math.prod(shape[: axis + 1]) <= most_rows
        and stretched_nbytes(shape, axis, ITEMSIZE[spec.dtype]) <= MOST_BYTES
    ]
