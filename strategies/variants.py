"""Draws more than plain attention: windows around every boundary, caps that scores reach, biases, sinks, 8 bits."""

from __future__ import annotations

from functools import lru_cache

from attnfuzz.problems.attention import packed_width
from attnfuzz.problems.boundaries import DEFAULT_TILES
from attnfuzz.problems.quantised_kv import (
    KV_GRANULARITIES,
    KV_SCALE_RECIPES,
    KV_SCALE_TENSORS,
    KvDtype,
    KvGranularity,
    KvScaleRecipe,
    QuantisedKv,
)
from attnfuzz.problems.supports import Layout
from attnfuzz.problems.variants import (
    ALIBI_RECIPES,
    PLAIN_VARIANT,
    SINK_RECIPES,
    VARIANT_TENSORS,
    AlibiRecipe,
    SinkRecipe,
    Variant,
    VariantName,
)
from attnfuzz.strategies.decisions import Decisions

VARIANT_BYTES = 4 + len(VARIANT_TENSORS)
_CAPS = (30.0, 50.0, 5.0, 1.0, 0.5)
"""Those of Gemma 2 for final and for attention logits, and some that ordinary scores reach."""
_SOFT_CAPS: tuple[float | None, ...] = (*[None] * 4 * len(_CAPS), *_CAPS)
_ALIBI: tuple[AlibiRecipe | None, ...] = (*[None] * 4 * len(ALIBI_RECIPES), *ALIBI_RECIPES)
_SINKS: tuple[SinkRecipe | None, ...] = (*[None] * 4 * (len(SINK_RECIPES) + 1), *SINK_RECIPES, "absent")
"""Those of -inf twice: what they can break, they break on empty sequences only."""
_SINKS_OF_SPLITS: tuple[SinkRecipe | None, ...] = (*[None] * 2 * (len(SINK_RECIPES) + 1), *SINK_RECIPES, "absent")
"""One in three instead of five: programs that share a row must count its sink once, whichever of them finishes it."""
_ALIBI_OF_WIDE: tuple[AlibiRecipe | None, ...] = (*[None] * len(ALIBI_RECIPES), *ALIBI_RECIPES)
_SINKS_OF_WIDE: tuple[SinkRecipe | None, ...] = (*[None] * (len(SINK_RECIPES) + 1), *SINK_RECIPES, "absent")
"""One in two: groups that do not fill their last block are few, and a number beyond them may be read by mistake."""
_ANY_WINDOWS = (1, 2, 3, 5, 100, 4096)
_ANY_LENGTH = 1 << 24


def decide_variant(
    decisions: Decisions,
    names: tuple[VariantName, ...],
    steps: tuple[int, ...],
    *,
    longest: int = _ANY_LENGTH,
    num_splits: int = 1,
    wide_group: bool = False,
) -> Variant:
    """No variant in about one case of three; in the others one or several of ``names``. ``steps``: page and tile sizes.

    Sinks do not come with ALiBi: no model has both, and beside a sink it would matter at which position a bias is zero,
    which engines put where it suits them (vLLM at the first new token, the paper at the query).

    ``longest``: about as many tokens as a sequence may have, beyond which all windows are the same. ``wide_group``:
    whether a KV head has more query heads than a block of rows may have.
    """
    window = decisions.pick(_windows(steps, longest))
    soft_cap = decisions.pick(_SOFT_CAPS)
    alibi = decisions.pick(_ALIBI_OF_WIDE if wide_group else _ALIBI)
    sinks = decisions.pick(_SINKS_OF_WIDE if wide_group else _SINKS if num_splits == 1 else _SINKS_OF_SPLITS)
    soft_cap = soft_cap if "soft_cap" in names else None
    sinks = sinks if "sinks" in names else None
    found = Variant(
        window=window if "window" in names else None,
        soft_cap=soft_cap,
        alibi=alibi if "alibi" in names and soft_cap is None and sinks is None else None,
        sinks=sinks,
    )
    return PLAIN_VARIANT if found == PLAIN_VARIANT else found


@lru_cache(maxsize=1024)
def _windows(steps: tuple[int, ...], longest: int) -> tuple[int | None, ...]:
    """None in two of three cases."""
    near = {step * k + offset for step in steps or DEFAULT_TILES for k in (1, 2) for offset in (-1, 0, 1)}
    within = {window for window in (*_ANY_WINDOWS, *near) if 0 < window <= longest}
    found = sorted({*within, *_ANY_WINDOWS[-1:]})
    return (*[None] * 2 * len(found), *found)


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


def fits_packed(kv: QuantisedKv | None, layout: Layout | None, head_size: int) -> bool:
    """Whether heads are made of whole pieces of 16 bytes, where the layout needs that."""
    return kv is None or layout != "packed" or head_size % packed_width(kv.dtype) == 0
