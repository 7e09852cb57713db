"""How tensors lie in memory, each for itself but for a K and V that engines make alike, and pages in the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from attnfuzz.problems.choices import kv_dtypes_of, lying_alike, stride_kinds_of, strided_tensors_of, variants_of
from attnfuzz.problems.module import Problem
from attnfuzz.problems.quantised_kv import KvDtype
from attnfuzz.problems.recipes import Padding, PageOrder, Pages, StrideKind
from attnfuzz.problems.supports import Layout, Strides, Supports
from attnfuzz.problems.variants import VariantName
from attnfuzz.strategies.decisions import Decisions

Recipe = tuple[str, StrideKind]

_MOST_STRIDED = 4
_DIGITS = 3
"""Of the number of a tensor among those that can be strided in as many ways: eight and more can be told apart."""
STRIDES_BYTES = _MOST_STRIDED
_WEIGHTS: dict[Recipe, int] = {("seq_lens", "every_other"): 4, ("cu_seqlens_q", "every_other"): 4}
"""Times as often as others: the only stride of these vectors, and it shows in batches with unlike lengths only."""


def decide_strides(
    decisions: Decisions, problem: Problem, supports: Supports, layout: Layout | None
) -> dict[str, StrideKind]:
    """Tensors that are not contiguous: each decision adds one to every fourth case."""
    tensors_of = variants_of(problem, supports), kv_dtypes_of(problem, supports)
    recipes = _recipes(problem, supports.strides, supports.lse == "none", layout, *tensors_of)
    drawn = [decisions.pick(recipes) for _ in range(_MOST_STRIDED)]
    found = dict(recipe for recipe in drawn if recipe is not None)
    tensors = strided_tensors_of(problem, supports, layout)
    alike = {
        other: kind for name, kind in found.items() for other in lying_alike(supports.strides, name) if other in tensors
    }
    return dict(sorted(alike.items()))


def strides_everywhere(
    problem: Problem, supports: Supports, layout: Layout | None, *, turn: int
) -> dict[str, StrideKind]:
    """As few contiguous tensors as will do; ``turn`` 0, 1, ... says which of the ways.

    Turn t goes by digit t of a tensor's number, so that within three turns each two differ: a kernel that reads the
    scales of V with the strides of K must not be right in all. What can be strided in one way only is not, in some.
    """
    found: dict[str, StrideKind] = {}
    numbers: Counter[int] = Counter()
    for tensor in strided_tensors_of(problem, supports, layout):
        kinds = [kind for kind in stride_kinds_of(supports.strides, tensor) if kind not in ("contiguous", "offset")]
        base = max(2, len(kinds))
        digit = numbers[len(kinds)] // base ** (turn % _DIGITS) % base
        numbers[len(kinds)] += 1
        if len(kinds) > 1:
            found[tensor] = kinds[(digit + turn) % base]
        elif kinds and digit == 0:
            found[tensor] = kinds[0]
        first, *_ = lying_alike(supports.strides, tensor)
        if first != tensor:
            found = {name: kind for name, kind in found.items() if name != tensor}
            found |= {tensor: found[first]} if first in found else {}
    return found


def decide_strides_of(decisions: Decisions, tensors: Iterable[str], allowed: Strides) -> dict[str, StrideKind]:
    """Tensors that few cases have and that are not contiguous: half of them, most with gaps."""
    found: dict[str, StrideKind] = {}
    for name in tensors:
        others = [kind for kind in stride_kinds_of(allowed, name) if kind != "contiguous"]
        gaps = [kind for kind in others if kind == "every_other"]
        kind = decisions.pick((*[None] * max(1, 2 * len(others)), *others, *gaps * 2))
        if kind is not None:
            found[name] = kind
    return found


@lru_cache(maxsize=256)
def _recipes(
    problem: Problem,
    allowed: Strides,
    without_lse: bool,
    layout: Layout | None,
    variants: tuple[VariantName, ...],
    kv_dtypes: tuple[KvDtype, ...],
) -> tuple[Recipe | None, ...]:
    supports = Supports(lse="none" if without_lse else "natural", variants=variants, kv_dtypes=kv_dtypes)
    recipes = [
        (tensor, kind)
        for tensor in strided_tensors_of(problem, supports, layout)
        for kind in stride_kinds_of(allowed, tensor)
        if kind != "contiguous"
        for _ in range(_WEIGHTS.get((tensor, kind), 1))
    ]
    return (*[None] * max(1, 3 * len(recipes)), *recipes)


_ORDERS: tuple[PageOrder, ...] = ("identity", "reversed", "shuffled", "shuffled")
_SPARE_BLOCKS = (0, 1, 2, 3, 8)
_EXTRA_COLUMNS = (0, 1, 2, 7)
_SHARED_BLOCKS = (0, 0, 1, 2, 3)
_SEEDS = range(64)
PAGES_BYTES = 7


def decide_pages(decisions: Decisions, paddings: tuple[Padding, ...], *, max_shared_blocks: int) -> Pages:
    """One map in four is plain, and so is what the shrinker tries first."""
    if decisions.pick((True, False, False, False)):
        return Pages()
    order = decisions.pick(_ORDERS)
    padding = decisions.pick(paddings)
    return Pages(
        order=order,
        spare_blocks=decisions.pick(_SPARE_BLOCKS),
        extra_columns=decisions.pick(_EXTRA_COLUMNS),
        shared_blocks=decisions.pick([count for count in _SHARED_BLOCKS if count <= max_shared_blocks]),
        padding=padding,
        seed=decisions.pick(_SEEDS) if order == "shuffled" or padding == "wrong_page" else 0,
    )
