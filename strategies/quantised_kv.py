"""8-bit caches: their format, how many scales they have, and what these are."""

from __future__ import annotations

from attnfuzz.problems.attention import packed_width
from attnfuzz.problems.choices import stride_kinds_of
from attnfuzz.problems.quantised_kv import (
    KV_GRANULARITIES,
    KV_SCALE_RECIPES,
    KV_SCALE_TENSORS,
    KvDtype,
    KvGranularity,
    KvScaleRecipe,
    QuantisedKv,
)
from attnfuzz.problems.recipes import StrideKind
from attnfuzz.problems.supports import Layout, Strides
from attnfuzz.strategies.decisions import Decisions

QUANTISED_KV_BYTES = 3 + len(KV_SCALE_TENSORS)
_RECIPES: tuple[KvScaleRecipe, ...] = (*KV_SCALE_RECIPES, "scattered")
_RECIPES_OF_HEADS: tuple[KvScaleRecipe, ...] = ("one", *_RECIPES[1:] * 2)
_GRANULARITIES: tuple[KvGranularity, ...] = (*KV_GRANULARITIES, "head")
"""Granularity, of the two, that alone tells which scale a head was multiplied with."""
_PLAIN_CASES = 2


def decide_quantised_kv(
    decisions: Decisions,
    dtypes: tuple[KvDtype, ...],
    granularities: tuple[KvGranularity, ...],
    *,
    may_be_plain: bool = True,
) -> QuantisedKv | None:
    """None in two of three cases, if it may be. ``dtypes``: at least one."""
    plain = [None] * _PLAIN_CASES * len(dtypes) if may_be_plain else []
    dtype = decisions.pick((*plain, *dtypes))
    per = decisions.pick(tuple(one for one in _GRANULARITIES if one in granularities))
    scales = decisions.pick(_RECIPES_OF_HEADS if per == "head" else _RECIPES)
    return None if dtype is None else QuantisedKv(dtype=dtype, per=per, scales=scales)


def decide_kv_strides(decisions: Decisions, kv: QuantisedKv | None, allowed: Strides) -> dict[str, StrideKind]:
    """Scales that are not contiguous: half of them have wide strides, so that those of K and V are often unlike."""
    found: dict[str, StrideKind] = {}
    for name in KV_SCALE_TENSORS:
        others = [kind for kind in stride_kinds_of(allowed, name) if kind != "contiguous"]
        kind = decisions.pick((None, None, *others, *[kind for kind in others if kind == "every_other"] * 2))
        if kind is not None and kv is not None:
            found[name] = kind
    return found


def fits_packed(kv: QuantisedKv | None, layout: Layout | None, head_size: int) -> bool:
    """Whether heads are made of whole pieces of 16 bytes, where the layout needs that."""
    return kv is None or layout != "packed" or head_size % packed_width(kv.dtype) == 0
