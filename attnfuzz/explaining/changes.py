"""Single changes to a case, each with its words: which of them make it pass says what the bug needs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from attnfuzz.minimise.edits import changed, keep_sequences, with_head_size, with_heads, with_lengths
from attnfuzz.problems.cases import (
    AttentionCase,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedDecodeCase,
    SplitDecodeCase,
    encode_case,
)
from attnfuzz.problems.choices import (
    block_sizes_of,
    default_scale,
    dtypes_of,
    head_sizes_of,
    is_power_of_two,
    layouts_of,
    lying_alike,
    split_counts_of,
)
from attnfuzz.problems.open_cases import OpenCase, open_changes
from attnfuzz.problems.quantised_kv import KV_SCALE_TENSORS
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.problems.supported import supports_case
from attnfuzz.problems.supports import OptionValue, Supports
from attnfuzz.problems.variants import absent_tensors

__all__ = ["changes_of"]

_MOST_SEQUENCES = 2
_MOST_CHOICES = 2

Change = tuple[str, Any]
Options = Mapping[str, tuple[OptionValue, ...]]


def changes_of(case: Case, *, supports: Supports, options: Options) -> Iterator[tuple[str, Case]]:
    """Supported cases that differ from ``case`` in one respect, the most telling first, with words for what differs."""
    seen = {encode_case(case)}
    if isinstance(case, OpenCase):
        proposals: Iterable[Change] = open_changes(case, options)
    else:
        own = _of_states(case) if isinstance(case, MergeStatesCase) else _of_attention(case, supports)
        proposals = (*own, *_of_any(case, supports, options))
    for words, candidate in proposals:
        if candidate is None or not supports_case(supports, options, candidate) or encode_case(candidate) in seen:
            continue
        seen.add(encode_case(candidate))
        yield words, candidate


def _of_attention(case: AttentionCase, supports: Supports) -> Iterator[Change]:
    if isinstance(case, PagedDecodeCase):
        for size in _nearest(block_sizes_of(supports), case.block_size):
            yield f"block_size {size} instead of {case.block_size}", changed(case, block_size=size)
    yield from _lengths(case)
    if case.num_seqs > 1:
        for seq in range(min(case.num_seqs, _MOST_SEQUENCES)):
            kept = [other for other in range(case.num_seqs) if other != seq]
            yield f"sequence {seq} left out", keep_sequences(case, kept)
    if case.gqa_ratio > 1:
        words = f"1 query head on each KV head instead of {case.gqa_ratio}"
        yield words, with_heads(case, case.num_kv_heads, 1)
    if case.num_kv_heads > 1:
        yield f"1 KV head instead of {case.num_kv_heads}", with_heads(case, 1, case.gqa_ratio)
    if isinstance(case, SplitDecodeCase):
        for count in _nearest(split_counts_of(supports), case.num_splits):
            yield f"num_splits {count} instead of {case.num_splits}", changed(case, num_splits=count)
    if isinstance(case, PagedDecodeCase):
        yield from _pages(case)
        for layout in [layout for layout in layouts_of(supports) if layout != case.layout][:_MOST_CHOICES]:
            yield f"layout {layout} instead of {case.layout}", changed(case, layout=layout)
    if isinstance(case, DenseDecodeCase) and case.extra_rows:
        yield f"no extra rows instead of {case.extra_rows}", changed(case, extra_rows=0)
    if case.v_head_size is not None:
        yield f"v_head_size {case.head_size} instead of {case.v_head_size}", changed(case, v_head_size=None)
    yield from _values(case)
    yield from _variant(case)
    yield from _quantised(case)


def _lengths(case: AttentionCase) -> Iterator[Change]:
    longest = max(case.seq_lens)
    chosen = sorted({0, case.seq_lens.index(longest)})
    for seq in chosen:
        for step in (-1, 1):
            length = case.seq_lens[seq] + step
            if length >= 0:
                lengths = [*case.seq_lens[:seq], length, *case.seq_lens[seq + 1 :]]
                where = f" in sequence {seq}" if case.num_seqs > 1 else ""
                yield f"seq_len {length} instead of {case.seq_lens[seq]}{where}", with_lengths(case, lengths)


def _pages(case: PagedDecodeCase) -> Iterator[Change]:
    plain = Pages()
    names = {"order": "page order", "padding": "unused table entries", "spare_blocks": "spare pages"}
    names |= {"shared_blocks": "shared pages", "extra_columns": "unused table columns"}
    for field, name in names.items():
        old, new = getattr(case.pages, field), getattr(plain, field)
        if old != new:
            pages = msgspec.structs.replace(case.pages, **{field: new})
            yield f"{name} {new} instead of {old}", changed(case, pages=pages)


def _values(case: AttentionCase) -> Iterator[Change]:
    plain = Values()
    for field, name in (("keys", "keys"), ("values", "values"), ("logit_exponent", "logit_exponent")):
        old, new = getattr(case.values, field), getattr(plain, field)
        if old != new:
            values = msgspec.structs.replace(case.values, **{field: new})
            yield f"{name} {new} instead of {old}", changed(case, values=values)
    if case.values.needles:
        yield "no needles", changed(case, values=msgspec.structs.replace(case.values, needles=()))
    scale = default_scale(case.head_size)
    if case.scale != scale:
        yield f"scale {scale:.4g} instead of {case.scale:.4g}", changed(case, scale=scale)


def _variant(case: AttentionCase) -> Iterator[Change]:
    words = {"window": "no window", "soft_cap": "no soft cap", "alibi": "no ALiBi", "sinks": "no sinks"}
    for name in case.variant.names:
        others = msgspec.structs.replace(case.variant, **{name: None})
        absent = absent_tensors(others)
        strides = {tensor: kind for tensor, kind in case.strides.items() if tensor not in absent}
        yield words[name], changed(case, variant=others, strides=strides)
    if case.variant.freed_pages:
        kept = msgspec.structs.replace(case.variant, freed_pages=False)
        yield "pages behind the window kept instead of freed", changed(case, variant=kept)


def _quantised(case: AttentionCase) -> Iterator[Change]:
    if case.kv is None:
        return
    strides = {name: kind for name, kind in case.strides.items() if name not in KV_SCALE_TENSORS}
    yield f"a cache of {case.dtype} instead of {case.kv.dtype}", changed(case, kv=None, strides=strides)
    for field, name in (("scales", "scales"), ("per", "a scale per")):
        plain = msgspec.structs.replace(case.kv, **{field: {"scales": "one", "per": "tensor"}[field]})
        if plain != case.kv:
            words = f"{name} {getattr(plain, field)} instead of {getattr(case.kv, field)}"
            yield words, changed(case, kv=plain)


def _of_states(case: MergeStatesCase) -> Iterator[Change]:
    if case.lse_pairs != (("finite", "finite"),):
        yield "finite LSEs only", changed(case, lse_pairs=(("finite", "finite"),))
    if case.num_tokens > 1:
        yield f"1 token instead of {case.num_tokens}", changed(case, num_tokens=1)
    if case.num_q_heads > 1:
        yield f"1 query head instead of {case.num_q_heads}", changed(case, num_q_heads=1)


def _of_any(case: Case, supports: Supports, options: Options) -> Iterator[Change]:
    for names in dict.fromkeys(lying_alike(supports.strides, name) for name in sorted(case.strides)):
        strided = [name for name in names if case.strides.get(name, "contiguous") != "contiguous"]
        if strided:
            others = {other: stride for other, stride in case.strides.items() if other not in strided}
            words = f"{' and '.join(strided)} contiguous instead of {case.strides[strided[0]]}"
            yield words, changed(case, strides=others)
    layout = case.layout if isinstance(case, PagedDecodeCase) else None
    cached_as = case.dtype if isinstance(case, MergeStatesCase) else case.kv_dtype
    for size in _nearest(head_sizes_of(supports, cached_as, layout), case.head_size):
        yield f"head_size {size} instead of {case.head_size}", with_head_size(case, size)
    for dtype in dtypes_of(supports):
        if dtype != case.dtype:
            yield f"{dtype} instead of {case.dtype}", changed(case, dtype=dtype)
    for name, choices in sorted(options.items()):
        old = case.options.get(name)
        for choice in [choice for choice in choices if choice != old][:_MOST_CHOICES]:
            yield f"{name}={choice} instead of {old}", changed(case, options={**case.options, name: choice})


def _nearest(sizes: tuple[int, ...], size: int) -> list[int]:
    """The nearest smaller and larger one; of those, and before them, the nearest power of two if this is none."""
    smaller, larger = [other for other in sizes if other < size], [other for other in sizes if other > size]
    found = [max(smaller)] if smaller else []
    found += [min(larger)] if larger else []
    powers = [other for other in sizes if is_power_of_two(other) and other != size]
    if powers and not is_power_of_two(size):
        found.insert(0, min(powers, key=lambda other: abs(other - size)))
    return list(dict.fromkeys(found))
