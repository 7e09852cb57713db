"""Which of two cases is simpler: a total order over the cases of one problem. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from attnfuzz.problems.cases import (
    PROBLEMS,
    AttentionCase,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    SplitDecodeCase,
)
from attnfuzz.problems.choices import block_size_rank, default_scale, head_size_rank
from attnfuzz.problems.open_cases import OpenCase, open_rank
from attnfuzz.problems.quantised_kv import KV_DTYPES, KV_GRANULARITIES, KV_SCALE_RECIPES, QuantisedKv
from attnfuzz.problems.recipes import KEY_RECIPES, LSE_KINDS, STRIDE_KINDS, VALUE_RECIPES, Padding, PageOrder
from attnfuzz.problems.supports import DTYPES, LAYOUTS, OptionValue
from attnfuzz.problems.variants import ALIBI_RECIPES, SINK_RECIPES, Variant

__all__ = ["length_rank", "size_key"]

Options = Mapping[str, tuple[OptionValue, ...]]

_PAGE_ORDERS = get_args(PageOrder)
_PADDINGS = get_args(Padding)


def size_key(case: Case, *, options: Options | None = None) -> tuple[Any, ...]:
    """Compare these to compare cases: the smaller is the simpler.

    What a reader must keep in mind comes first: sequences, heads, tokens, then how they are stored, then what they
    hold. Given the kernel's ``options``, their first choices are simplest; else the smallest value is.
    """
    if isinstance(case, OpenCase):
        ranks = tuple(_option_rank(name, value, options) for name, value in sorted(case.options.items()))
        return (len(PROBLEMS), *open_rank(case), ranks)
    shape = _states(case) if isinstance(case, MergeStatesCase) else _attention(case)
    strides = sorted((name, STRIDE_KINDS.index(kind)) for name, kind in case.strides.items() if kind != "contiguous")
    return (
        PROBLEMS.index(case.problem),
        *shape,
        DTYPES.index(case.dtype),
        len(strides),
        sum(kind for _, kind in strides),
        tuple(_option_rank(name, value, options) for name, value in sorted(case.options.items())),
        *(_details(case) if not isinstance(case, MergeStatesCase) else ()),
        tuple(strides),
    )


def _attention(case: AttentionCase) -> Iterable[Any]:
    yield from (case.num_seqs, case.num_q_heads, case.num_kv_heads)
    yield from (sum(map(length_rank, case.seq_lens)), case.v_head_size is not None)
    yield from (head_size_rank(case.head_size), head_size_rank(case.value_size))
    if isinstance(case, PagedAttentionCase):
        yield from (sum(map(length_rank, case.query_lens)), case.padding_tokens, case.seq_slack, case.query_slack)
    if isinstance(case, DenseDecodeCase):
        yield case.extra_rows
    if isinstance(case, PagedDecodeCase):
        yield from _cache(case)


def _cache(case: PagedDecodeCase) -> Iterable[Any]:
    pages = case.pages
    yield case.num_splits if isinstance(case, SplitDecodeCase) else 1
    yield from (sum(case.blocks_of(i) for i in range(case.num_seqs)), block_size_rank(case.block_size))
    yield from (LAYOUTS.index(case.layout), _PAGE_ORDERS.index(pages.order), _PADDINGS.index(pages.padding))
    yield from (pages.shared_blocks, pages.spare_blocks, pages.extra_columns, pages.seed)


def _details(case: AttentionCase) -> Iterable[Any]:
    """What tells cases of one shape apart."""
    values = case.values
    yield _variant(case.variant)
    yield () if case.kv is None else _quantised(case.kv)
    yield from (len(values.needles), KEY_RECIPES.index(values.keys), VALUE_RECIPES.index(values.values))
    yield from (abs(values.logit_exponent), values.logit_exponent < 0)
    yield (case.scale != default_scale(case.head_size), case.scale != 1.0, case.scale)
    yield values.seed
    yield tuple((needle.kv_head, needle.seq, needle.position) for needle in values.needles)
    yield tuple(map(length_rank, case.seq_lens))
    if isinstance(case, PagedAttentionCase):
        yield tuple(map(length_rank, case.query_lens))


def _variant(variant: Variant) -> tuple[Any, ...]:
    """The fewer the simpler; of windows, the smaller."""
    cap = variant.soft_cap
    alibi = -1 if variant.alibi is None else ALIBI_RECIPES.index(variant.alibi)
    sinks = -1 if variant.sinks is None else SINK_RECIPES.index(variant.sinks)
    numbers = (variant.window or 0, cap is not None, cap != 1.0, cap or 0.0, alibi, sinks)
    return (len(variant.names), variant.freed_pages, *numbers)


def _quantised(kv: QuantisedKv) -> tuple[int, ...]:
    return KV_DTYPES.index(kv.dtype), KV_GRANULARITIES.index(kv.per), KV_SCALE_RECIPES.index(kv.scales)


def _states(case: MergeStatesCase) -> Iterable[Any]:
    kinds = tuple((LSE_KINDS.index(prefix), LSE_KINDS.index(suffix)) for prefix, suffix in case.lse_pairs)
    yield from (case.num_tokens, case.num_q_heads, len(kinds), sum(map(sum, kinds)), kinds)
    yield from (head_size_rank(case.head_size), case.lse_layout != "HT", case.outputs != "normal", case.seed)


def length_rank(length: int) -> int:
    """Ascending, with an empty sequence, which is a special case, between one token and two."""
    return 2 * length if length else 3


def _option_rank(name: str, value: OptionValue, options: Options | None) -> tuple[Any, ...]:
    """The number of an option's type keeps values of different types comparable."""
    choices = (options or {}).get(name, ())
    ranks = [i for i, choice in enumerate(choices) if type(choice) is type(value) and choice == value]
    if ranks:
        return (0, ranks[0])
    return (1, isinstance(value, str), value)
