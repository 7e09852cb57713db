"""Which fields of a case are away from their simplest value, in stable words that tell bugs apart. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attnfuzz.problems.boundaries import has_empty_split, num_splits_of
from attnfuzz.problems.cases import (
    AttentionCase,
    BundledCase,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
)
from attnfuzz.problems.choices import CACHE_TENSORS, default_scale, is_power_of_two
from attnfuzz.problems.freed import freed_tokens
from attnfuzz.problems.open_cases import OpenCase, open_features
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.problems.shapes import ITEMSIZE, strides_of, tensor_specs
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.strides import strided_layout
from attnfuzz.problems.supports import OptionValue, Supports

__all__ = [
    "CACHE_STRIDES",
    "DEAD_ROWS",
    "FREED_PAGES",
    "KV_STRIDES_DIFFER",
    "features",
    "general_features",
]

CACHE_STRIDES = "cache strides"
KV_STRIDES_DIFFER = "K and V strides differ"
FREED_PAGES = "freed pages"
DEAD_ROWS = "dead rows"


def features(
    case: Case, *, supports: Supports | None = None, options: Mapping[str, tuple[OptionValue, ...]] | None = None
) -> frozenset[str]:
    """Names of what makes ``case`` more than the simplest case, e.g. ``{"gqa_ratio>1", "partial last page"}``.

    Given a kernel's ``supports`` and ``options``, features that even its simplest case has are left out.
    Seeds are no feature: they carry no meaning of their own.
    """
    found = frozenset(_features(case))
    if supports is None and options is None:
        return found
    return found - frozenset(_features(simplest_case(case.problem, supports or Supports(), options or {})))


def general_features(
    case: Case, *, supports: Supports | None = None, options: Mapping[str, tuple[OptionValue, ...]] | None = None
) -> frozenset[str]:
    """What the cases that one mistake in address arithmetic spoils have in common, whichever of them is met first.

    ``"dtype"`` stands beside every ``"dtype=..."``, and so on for whatever has a value other than the simplest;
    ``"strides:k_cache"`` also beside every layout that moves K in memory, and so on for each tensor;
    ``CACHE_STRIDES`` is any of this for K or V. ``KV_STRIDES_DIFFER`` compares the numbers. ``DEAD_ROWS`` are those of
    a dense K and V behind a sequence, which is shorter than others or than all rows. Of states to merge it is said
    which side is empty, and what kinds of LSE there are. As in ``features``, what even the kernel's simplest case has
    is left out.
    """
    particular = features(case, supports=supports, options=options)
    found = {one.partition("=")[0] for one in particular if "=" in one}
    if isinstance(case, OpenCase):
        return frozenset(found)
    simplest = simplest_case(case.problem, supports or Supports(), options or {})
    if isinstance(case, MergeStatesCase):
        found |= set(_sides(case))
    if getattr(case, "layout", None) != getattr(simplest, "layout", None):
        found |= {"strides:k_cache", "strides:v_cache"}
    if any(f"strides:{name}" in found for names in CACHE_TENSORS for name in names):
        found.add(CACHE_STRIDES)
    if _kv_strides_differ(case) and not _kv_strides_differ(simplest):
        found.add(KV_STRIDES_DIFFER)
    if isinstance(case, DenseDecodeCase) and any(0 < length < case.max_seq_len for length in case.seq_lens):
        found.add(DEAD_ROWS)
    return frozenset(found)


def _sides(case: MergeStatesCase) -> Iterator[str]:
    """What the pairs of LSEs have in common with others that a mistake cannot tell from them."""
    for pair in case.lse_pairs:
        empty = tuple(kind in ("-inf", "+inf") for kind in pair)
        if any(empty):
            yield "both states empty" if all(empty) else "one state empty"
        yield from (f"{side} empty" for side, is_empty in zip(("prefix", "suffix"), empty, strict=True) if is_empty)
        yield from (f"some lse {kind}" for kind in pair if kind != "finite")
        if {"high", "low"} & set(pair):
            yield "some lse far apart"


def _kv_strides_differ(case: Case) -> bool:
    specs = tensor_specs(case)
    for names in CACHE_TENSORS:
        if set(names) <= specs.keys():
            return len({_effective_strides(case, name) for name in names}) > 1
    return False


def _effective_strides(case: Case, name: str) -> tuple[int, ...]:
    """The strides of tensor ``name``, with 0 where its only index is 0."""
    shape, dtype = tensor_specs(case)[name][:2]
    strides = strided_layout(shape, strides_of(case, name), ITEMSIZE[dtype]).strides
    return tuple(stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))


def _features(case: Case) -> Iterator[str]:
    if isinstance(case, OpenCase):
        yield from open_features(case)
        return
    yield from _common(case)
    if isinstance(case, MergeStatesCase):
        yield from _merge(case)
        return
    yield from _heads(case)
    yield from _lengths(case)
    yield from _values(case.values)
    yield from _variant(case)
    if case.kv is not None:
        yield from _quantised(case.kv)
    if case.scale != default_scale(case.head_size):
        yield "scale"
    if case.v_head_size is not None and not case.values_in_keys:  # where it is always another one
        yield "v_head_size"
        if case.v_head_size > case.head_size:
            yield "v_head_size>head_size"
    if isinstance(case, PagedAttentionCase):
        yield from _queries(case)
    if isinstance(case, DenseDecodeCase):
        if case.extra_rows:
            yield "extra rows"
    else:
        yield from _cache(case)
        yield from _pages(case.pages, shareable=case.num_seqs > 1)


def _common(case: BundledCase) -> Iterator[str]:
    if case.dtype != "float16":
        yield f"dtype={case.dtype}"
    if not is_power_of_two(case.head_size):
        yield "head_size not pow2"
    for limit in (16, 64, 128):
        if case.head_size > limit:
            yield f"head_size>{limit}"
    for name, kind in case.strides.items():
        if kind != "contiguous":
            yield f"strides:{name}={kind}"
    for name, value in case.options.items():
        yield f"option {name}={value}"


def _heads(case: AttentionCase) -> Iterator[str]:
    if case.num_kv_heads > 1:
        yield "num_kv_heads>1"
    if case.gqa_ratio > 1:
        yield "gqa_ratio>1"
    if not is_power_of_two(case.gqa_ratio):
        yield "gqa_ratio not pow2"


def _lengths(case: AttentionCase) -> Iterator[str]:
    if case.num_seqs > 1:
        yield "num_seqs>1"
    if len(set(case.seq_lens)) > 1:
        yield "ragged"
    if 0 in case.seq_lens:
        yield "empty sequence"
    if max(case.seq_lens) > 1:
        yield "seq_len>1"
    num_splits = num_splits_of(case)
    if num_splits > 1:
        yield "num_splits>1"
        if any(has_empty_split(seq_len, num_splits) for seq_len in case.seq_lens):
            yield "empty split"


def _queries(case: PagedAttentionCase) -> Iterator[str]:
    if max(case.query_lens) > 1:
        yield "query_len>1"
    if 0 in case.query_lens:
        yield "no query"
    if len(set(case.query_lens)) > 1:
        yield "ragged queries"
    if any(0 < query_len < seq_len for query_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True)):
        yield "context"
    if case.query_slack or case.seq_slack:
        yield "slack"
    if case.padding_tokens:
        yield "padding tokens"


def _values(values: Values) -> Iterator[str]:
    if values.keys != "equal":
        yield f"keys={values.keys}"
    if values.values != "positions":
        yield f"values={values.values}"
    if values.logit_exponent:
        yield f"logit_exponent{'>' if values.logit_exponent > 0 else '<'}0"
    if values.needles:
        yield "needles"


def _variant(case: AttentionCase) -> Iterator[str]:
    yield from case.variant.names
    window = case.variant.window
    if window is not None and max(case.seq_lens) > window:
        yield "seq_len>window"
    if any(freed_tokens(case)):
        yield FREED_PAGES


def _quantised(kv: QuantisedKv) -> Iterator[str]:
    yield "fp8 cache"
    if kv.dtype != "float8_e4m3fn":
        yield f"kv={kv.dtype}"
    if kv.per != "tensor":
        yield f"scale per {kv.per}"
    if kv.scales != "one":
        yield "scales"
    if kv.scales == "scattered":
        yield "scales not pow2"


def _cache(case: PagedDecodeCase) -> Iterator[str]:
    if case.layout != "NHD":
        yield f"layout={case.layout}"
    if case.block_size > 1:
        yield "block_size>1"
    if not is_power_of_two(case.block_size):
        yield "block_size not pow2"
    if max(case.seq_lens) > case.block_size:
        yield "seq_len>block_size"
    if any(seq_len % case.block_size for seq_len in case.seq_lens):
        yield "partial last page"


def _pages(pages: Pages, *, shareable: bool) -> Iterator[str]:
    if pages.order != "identity":
        yield f"pages={pages.order}"
    if pages.spare_blocks:
        yield "spare blocks"
    if pages.extra_columns:
        yield "extra columns"
    if pages.shared_blocks and shareable:
        yield "shared pages"
    if pages.padding != "zero":
        yield f"padding={pages.padding}"


def _merge(case: MergeStatesCase) -> Iterator[str]:
    if case.num_tokens > 1:
        yield "num_tokens>1"
    if case.num_q_heads > 1:
        yield "num_q_heads>1"
    if case.lse_layout != "HT":
        yield f"lse_layout={case.lse_layout}"
    if case.outputs != "normal":
        yield f"values={case.outputs}"
    for prefix, suffix in case.lse_pairs:
        if (prefix, suffix) != ("finite", "finite"):
            yield f"lse {prefix}/{suffix}"
