"""The axes of the input space: properties that matter to an attention kernel, each cut into a few levels. Torch-free.

A level is a word in a report ("pow2 to 16"). Where a case has several (strides of K and of V), it lies on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from attnfuzz.problems.boundaries import num_splits_of
from attnfuzz.problems.cases import (
    AttentionCase,
    BundledCase,
    Case,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    Problem,
    has_query_lens,
)
from attnfuzz.problems.choices import default_scale, is_power_of_two
from attnfuzz.problems.open_cases import OpenCase, OpenProblem
from attnfuzz.problems.quantised_kv import KvDtype, KvGranularity, QuantisedKv
from attnfuzz.problems.recipes import KEY_RECIPES, STRIDE_KINDS, VALUE_RECIPES
from attnfuzz.problems.supports import DTYPES, LAYOUTS, OptionValue
from attnfuzz.problems.variants import VariantName

__all__ = [
    "BATCHES",
    "GQA_CLASSES",
    "HEADS_CLASSES",
    "HEAD_SIZE_CLASSES",
    "PAGE_CLASSES",
    "SPLIT_CLASSES",
    "V_HEAD_SIZES",
    "Axis",
    "Levels",
    "cache_axes",
    "cache_level",
    "case_axes",
    "classes",
    "heads_class",
    "option_axes",
    "query_phase",
    "size_class",
    "split_class",
    "v_head_size_class",
    "variant_axes",
]

Levels = tuple[str, ...]

HEAD_SIZE_CLASSES = (16, 64, 128)
V_HEAD_SIZES = ("as K's", "smaller", "larger")
GQA_CLASSES = (8,)
HEADS_CLASSES = ("1", "pow2", "other")
PAGE_CLASSES = (16,)
SPLIT_CLASSES = ("1", "2 to 4", "5 to 8", "over 8")
BATCHES = ("decode", "prefill", "chunk", "mixed")
_MANY_CHOICES = 8


@dataclass(frozen=True, slots=True)
class Axis:
    """``of`` a case says on which of ``levels`` it lies."""

    name: str
    levels: Levels
    of: Callable[[Any], Levels]


def case_axes(problem: Problem) -> tuple[Axis, ...]:
    """Axes of a whole case; ``attnfuzz.problems.row_axes`` has those of each of its sequences."""
    if isinstance(problem, OpenProblem):
        return tuple(Axis(name, field.levels, partial(_open_level, name)) for name, field in problem.fields.items())
    shape = (_DTYPE, _HEAD_SIZE)
    if problem == "merge_states":
        return (*shape, *_MERGE)
    cache = _DENSE if problem == "dense_decode" else _PAGED
    queries = _QUERIES if has_query_lens(problem) else ()
    return (*shape, *_HEADS, *queries, *cache, *_VALUES)


def _open_level(name: str, case: OpenCase) -> Levels:
    return (case.problem.fields[name].level(getattr(case, name)),)


def option_axes(options: Mapping[str, tuple[OptionValue, ...]]) -> tuple[Axis, ...]:
    """One axis for each of a kernel's options with a few choices; split counts have an axis of their own."""
    return tuple(
        Axis(f"option {name}", tuple(map(str, choices)), partial(_option, name))
        for name, choices in options.items()
        if 1 < len(choices) <= _MANY_CHOICES and not _counts_splits(name, choices)
    )


def variant_axes(names: tuple[VariantName, ...]) -> tuple[Axis, ...]:
    """What a case asks for beyond plain attention, for a kernel that can do ``names``; no axis without any."""
    return (Axis("variant", ("none", *names), lambda case: case.variant.names or ("none",)),) if names else ()


def v_head_size_class(head_size: int, v_head_size: int) -> str:
    """The level of V's size beside K's."""
    return V_HEAD_SIZES[(v_head_size != head_size) + (v_head_size > head_size)]


def cache_axes(dtypes: tuple[KvDtype, ...], granularities: tuple[KvGranularity, ...]) -> tuple[Axis, ...]:
    """What the cache of a case holds, for a kernel that can read ``dtypes`` beside its own; no axis without any."""
    kinds = tuple(cache_level(QuantisedKv(dtype=dtype, per=per)) for dtype in dtypes for per in granularities)
    return (Axis("cache", ("plain", *kinds), lambda case: (cache_level(case.kv),)),) if dtypes else ()


def cache_level(kv: QuantisedKv | None) -> str:
    """The level of a cache: ``float8_e5m2 per head``."""
    return "plain" if kv is None else f"{kv.dtype} per {kv.per}"


@lru_cache(maxsize=4096)
def size_class(value: int, limits: tuple[int, ...]) -> str:
    """``value`` by size and by whether it is a power of two."""
    if value == 1:
        return "1"
    kind = "pow2" if is_power_of_two(value) else "other"
    above = [limit for limit in limits if value <= limit]
    return f"{kind} to {above[0]}" if above else f"{kind} over {limits[-1]}"


def classes(limits: tuple[int, ...]) -> Levels:
    """Every ``size_class``: powers of two first."""
    sizes = (*(f"to {limit}" for limit in limits), f"over {limits[-1]}")
    return ("1", *(f"pow2 {size}" for size in sizes), *(f"other {size}" for size in sizes))


@lru_cache(maxsize=512)
def split_class(num_splits: int) -> str:
    return "1" if num_splits == 1 else "2 to 4" if num_splits <= 4 else "5 to 8" if num_splits <= 8 else "over 8"


def _counts_splits(name: str, choices: tuple[OptionValue, ...]) -> bool:
    return "split" in name.lower() and all(isinstance(choice, int) for choice in choices)


def _option(name: str, case: Case) -> Levels:
    return (str(case.options[name]),) if name in case.options else ()


def _strides_of(names: frozenset[str], case: BundledCase) -> Levels:
    """The kinds of strides among the tensors ``names``; "contiguous" if all of them are."""
    kinds = {kind for name, kind in case.strides.items() if name in names and kind != "contiguous"}
    return tuple(kinds) or ("contiguous",)


def _strides(name: str, *tensors: str) -> Axis:
    return Axis(name, STRIDE_KINDS, partial(_strides_of, frozenset(tensors)))


def heads_class(heads: int) -> str:
    return "1" if heads == 1 else "pow2" if is_power_of_two(heads) else "other"


def _sequences(case: AttentionCase) -> Levels:
    if len(case.seq_lens) == 1:
        return ("1",)
    return ("several, equal" if len(set(case.seq_lens)) == 1 else "several, ragged",)


def _pages(case: PagedDecodeCase) -> Levels:
    shared = case.pages.shared_blocks and len(case.seq_lens) > 1
    return (case.pages.order, "shared") if shared else (case.pages.order,)


def _padding(case: PagedDecodeCase) -> Levels:
    """What unused block-table entries hold, if there are any."""
    blocks = {-(-seq_len // case.block_size) for seq_len in case.seq_lens}
    unused = case.pages.extra_columns or len(blocks) > 1 or 0 in blocks
    return (case.pages.padding,) if unused else ("none",)


def query_phase(query_len: int, seq_len: int) -> str:
    """What a sequence's query tokens are: all of it, the last one, a piece of a prompt, or none this step."""
    if not query_len:
        return "no query"
    if query_len == seq_len:
        return "prefill"
    return "decode" if query_len == 1 else "chunk"


def _batch(case: PagedAttentionCase) -> Levels:
    phases = {query_phase(*lens) for lens in zip(case.query_lens, case.seq_lens, strict=True)} - {"no query"}
    return (phases.pop() if len(phases) == 1 else "mixed",)


def _bounds(case: PagedAttentionCase) -> Levels:
    return ("loose" if case.query_slack or case.seq_slack else "tight",)


def _logit_scale(case: AttentionCase) -> Levels:
    exponent = case.values.logit_exponent
    return ("small" if exponent < 0 else "plain" if exponent == 0 else "large" if exponent < 5 else "huge",)


def _scale(case: AttentionCase) -> Levels:
    return ("default" if case.scale == default_scale(case.head_size) else "other",)


def _tokens(case: MergeStatesCase) -> Levels:
    tokens = case.num_tokens
    return ("1" if tokens == 1 else "2 to 16" if tokens <= 16 else "over 16",)


_DTYPE = Axis("dtype", DTYPES, lambda case: (case.dtype,))
_HEAD_SIZE = Axis(
    "head size", classes(HEAD_SIZE_CLASSES), lambda case: (size_class(case.head_size, HEAD_SIZE_CLASSES),)
)
_HEADS = (
    Axis("GQA ratio", classes(GQA_CLASSES), lambda case: (size_class(case.gqa_ratio, GQA_CLASSES),)),
    Axis("KV heads", HEADS_CLASSES, lambda case: (heads_class(case.num_kv_heads),)),
    Axis("sequences", ("1", "several, equal", "several, ragged"), _sequences),
    Axis("splits", SPLIT_CLASSES, lambda case: (split_class(num_splits_of(case)),)),
)
_QUERIES = (
    Axis("batch", BATCHES, _batch),
    Axis("bounds", ("tight", "loose"), _bounds),
    Axis("padding tokens", ("none", "some"), lambda case: ("some" if case.padding_tokens else "none",)),
)
_PAGED = (
    Axis("layout", LAYOUTS, lambda case: (case.layout,)),
    Axis("page size", classes(PAGE_CLASSES), lambda case: (size_class(case.block_size, PAGE_CLASSES),)),
    Axis("page order", ("identity", "reversed", "shuffled", "shared"), _pages),
    Axis("table padding", ("none", "zero", "wrong_page", "garbage"), _padding),
    _strides("cache strides", "k_cache", "v_cache", "kv_cache"),
    _strides(
        "other strides", "q", "block_table", "seq_lens", "cu_seqlens_q", "out", "lse", "partial_out", "partial_lse"
    ),
)
_DENSE = (
    Axis("dead rows", ("none", "some"), lambda case: ("some" if case.extra_rows else "none",)),
    _strides("cache strides", "k", "v"),
    _strides("other strides", "q", "seq_lens", "out", "lse"),
)
_VALUES = (
    Axis("keys", KEY_RECIPES, lambda case: (case.values.keys,)),
    Axis("values", VALUE_RECIPES, lambda case: (case.values.values,)),
    Axis("logits", ("small", "plain", "large", "huge"), _logit_scale),
    Axis("scale", ("default", "other"), _scale),
)
_MERGE = (
    Axis("heads", HEADS_CLASSES, lambda case: (heads_class(case.num_q_heads),)),
    Axis("tokens", ("1", "2 to 16", "over 16"), _tokens),
    _strides("input strides", "prefix_output", "suffix_output", "prefix_lse", "suffix_lse"),
    _strides("result strides", "output", "output_lse"),
)
