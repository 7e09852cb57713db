"""Whole cases, limited by what a kernel supports by construction: nothing drawn is thrown away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from attnfuzz.problems.boundaries import split_count, tile_sizes
from attnfuzz.problems.cases import (
    CASE_TYPES,
    PROBLEMS,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedDecodeCase,
    Problem,
    SplitDecodeCase,
)
from attnfuzz.problems.choices import (
    block_sizes_of,
    dtypes_of,
    gqa_ratios_of,
    head_sizes_of,
    layouts_of,
    lse_kinds_of,
    min_seq_len,
    paddings_of,
    split_counts_of,
)
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Dtype, Layout, OptionValue, Supports, check_options
from attnfuzz.strategies.arguments import check_one_of
from attnfuzz.strategies.decisions import Decisions, decided
from attnfuzz.strategies.heads import decide_gqa_heads
from attnfuzz.strategies.launch import decide_options
from attnfuzz.strategies.lengths import LengthLimits, decide_seq_lens
from attnfuzz.strategies.lse import LSE_PAIRS_BYTES, decide_lse_pairs
from attnfuzz.strategies.pages import PAGES_BYTES, decide_pages
from attnfuzz.strategies.sizes import CPU_SIZES, Sizes
from attnfuzz.strategies.strides import STRIDES_BYTES, decide_strides
from attnfuzz.strategies.values import VALUES_BYTES, decide_scale, decide_values

__all__ = ["cases"]

_TOKEN_COUNTS = (1, 2, 3, 4, 5, 8, 16, 17, 64, 257, 1024)
_EXTRA_ROWS = (0, 0, 1, 3, 17, 64)
_MERGE_HEADS = (1, 2, 3, 4, 5, 8, 12, 16, 17, 32)
_MERGE_SEEDS = range(64)
_WORK_PER_HEAD = (6, 6, 3, 3, 1)  # many heads leave little work for many or long sequences
_SHAPE_BYTES = 9
_PARTS_BYTES = 2 + PAGES_BYTES + VALUES_BYTES + STRIDES_BYTES  # of an attention case; merging takes less


@dataclass(frozen=True, slots=True)
class _Plan:
    """What can be known before the first draw."""

    problem: Problem
    supports: Supports
    options: Mapping[str, tuple[OptionValue, ...]]
    sizes: Sizes
    head_sizes: Mapping[Dtype, Mapping[Layout | None, tuple[int, ...]]]
    """Of each combination of dtype and layout that has any."""


def cases(
    problem: Problem,
    *,
    supports: Supports | None = None,
    options: Mapping[str, tuple[OptionValue, ...]] | None = None,
    sizes: Sizes = CPU_SIZES,
) -> st.SearchStrategy[Case]:
    """Cases of ``problem`` within ``supports`` and ``sizes``, with one choice for each of the kernel's ``options``.

    Shrinks to ``simplest_case``. Raises ValueError for arguments that no case fits.
    """
    check_one_of("problem", problem, PROBLEMS)
    supports, options = supports or Supports(), dict(options or {})
    check_options(options)
    simplest_case(problem, supports, options)  # raises where no head size fits
    plan = _Plan(problem, supports, options, sizes, _formats(problem, supports))
    build = _BUILDERS[problem]
    size = _SHAPE_BYTES + len(options) + _PARTS_BYTES + sizes.max_seqs
    return decided(lambda decisions: build(decisions, plan), size=size)


def _formats(problem: Problem, supports: Supports) -> dict[Dtype, dict[Layout | None, tuple[int, ...]]]:
    has_cache = issubclass(CASE_TYPES[problem], PagedDecodeCase)
    layouts: tuple[Layout | None, ...] = layouts_of(supports) if has_cache else (None,)
    formats = {
        dtype: {layout: sizes for layout in layouts if (sizes := head_sizes_of(supports, dtype, layout))}
        for dtype in dtypes_of(supports)
    }
    return {dtype: layouts for dtype, layouts in formats.items() if layouts}


def _dense_decode(decisions: Decisions, plan: _Plan) -> DenseDecodeCase:
    fields = _attention(decisions, plan)
    most = plan.supports.max_seq_len
    longest = max(fields["seq_lens"])
    rows = [count for count in _EXTRA_ROWS if most is None or longest + count <= most]
    return DenseDecodeCase(extra_rows=decisions.pick(rows), **fields)


def _paged_decode(decisions: Decisions, plan: _Plan) -> PagedDecodeCase:
    return PagedDecodeCase(**_attention(decisions, plan))


def _split_decode(decisions: Decisions, plan: _Plan) -> SplitDecodeCase:
    most = min(plan.sizes.max_splits, plan.supports.max_num_splits or plan.sizes.max_splits)
    counts = [count for count in split_counts_of(plan.supports) if count <= most]
    num_splits = decisions.pick(sorted([*counts, *(count for count in counts if count <= 4)]))  # many cost much
    return SplitDecodeCase(num_splits=num_splits, **_attention(decisions, plan, num_splits))


def _merge_states(decisions: Decisions, plan: _Plan) -> MergeStatesCase:
    supports, sizes = plan.supports, plan.sizes
    shape = decisions.part(_SHAPE_BYTES)
    work = shape.pick(sizes.work)
    dtype = shape.pick(tuple(plan.head_sizes))
    num_q_heads = shape.pick([count for count in _MERGE_HEADS if count <= min(work, sizes.max_heads)])
    num_tokens = shape.pick([count for count in _TOKEN_COUNTS if count * num_q_heads <= work])
    most_pairs = min(8, num_tokens * num_q_heads)
    return MergeStatesCase(
        num_q_heads=num_q_heads,
        num_tokens=num_tokens,
        head_size=_pick_head_size(shape, plan, dtype, None, num_q_heads),
        dtype=dtype,
        seed=shape.pick(_MERGE_SEEDS),
        lse_layout=supports.lse_layout,
        options=decide_options(decisions.part(len(plan.options)), plan.options),
        strides=decide_strides(decisions.part(STRIDES_BYTES), plan.problem, supports, None),
        lse_pairs=decide_lse_pairs(
            decisions.part(LSE_PAIRS_BYTES), lse_kinds_of(supports), min_pairs=1, max_pairs=most_pairs
        ),
    )


_BUILDERS: dict[Problem, Callable[[Decisions, _Plan], Case]] = {
    "dense_decode": _dense_decode,
    "paged_decode": _paged_decode,
    "split_decode": _split_decode,
    "merge_states": _merge_states,
}


def _attention(decisions: Decisions, plan: _Plan, num_splits: int | None = None) -> dict[str, Any]:
    """Fields of a case, by name; those of the cache where the problem has one."""
    supports = plan.supports
    shape = decisions.part(_SHAPE_BYTES)
    options = decide_options(decisions.part(len(plan.options)), plan.options)
    num_splits = num_splits or split_count(options)
    work = shape.pick(plan.sizes.work)
    dtype = shape.pick(tuple(plan.head_sizes))
    layout = shape.pick(tuple(plan.head_sizes[dtype]))
    most_heads = work // (shape.pick(_WORK_PER_HEAD) * (1 + num_splits // 4))
    num_q_heads, num_kv_heads = decide_gqa_heads(
        shape, gqa_ratios_of(supports), min(plan.sizes.max_heads, max(1, most_heads))
    )
    head_size = _pick_head_size(shape, plan, dtype, layout, num_q_heads)
    scale = decide_scale(shape, head_size)
    cache: dict[str, Any] = {}
    if layout is not None:
        cache = {"layout": layout, "block_size": _pick_block_size(shape, plan, num_kv_heads * head_size)}
    steps = (*([cache["block_size"]] if cache else []), *tile_sizes(options))
    most_tokens = max(1, plan.sizes.max_cache_elements // (num_kv_heads * head_size))
    limits = _length_limits(plan, steps, num_splits, max(1, work // num_q_heads), most_tokens)
    seq_lens = decide_seq_lens(decisions.part(1 + limits.max_seqs), limits)
    if cache:
        shared = 3 if len(seq_lens) > 1 else 0
        cache["pages"] = decide_pages(decisions.part(PAGES_BYTES), paddings_of(supports), max_shared_blocks=shared)
    return cache | {
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "dtype": dtype,
        "scale": scale,
        "seq_lens": seq_lens,
        "values": decide_values(
            decisions.part(VALUES_BYTES), seq_lens, num_kv_heads=num_kv_heads, steps=steps, num_splits=num_splits
        ),
        "strides": decide_strides(decisions.part(STRIDES_BYTES), plan.problem, supports, layout),
        "options": options,
    }


def _pick_head_size(shape: Decisions, plan: _Plan, dtype: Dtype, layout: Layout | None, num_q_heads: int) -> int:
    sizes = plan.head_sizes[dtype][layout]
    return shape.pick([size for size in sizes if size * num_q_heads <= plan.sizes.max_head_elements] or sizes[:1])


def _pick_block_size(shape: Decisions, plan: _Plan, token_elements: int) -> int:
    sizes = block_sizes_of(plan.supports)
    return shape.pick([size for size in sizes if size * token_elements <= plan.sizes.max_page_elements] or sizes[:1])


def _length_limits(plan: _Plan, steps: tuple[int, ...], num_splits: int, work: int, most_tokens: int) -> LengthLimits:
    """A kernel may advance by its page or tile size, so short ones make the same length more work."""
    tile = max(4, min(16, *steps)) if steps else 16
    sizes = plan.sizes
    return LengthLimits(
        steps=steps,
        num_splits=num_splits,
        min_seqs=1,
        max_seqs=sizes.max_seqs,
        min_len=min_seq_len(plan.supports),
        max_len=min(sizes.max_seq_len, plan.supports.max_seq_len or sizes.max_seq_len),
        max_padded=most_tokens,
        work=max(1, min(work, sizes.max_tokens // tile, most_tokens // tile)),
        tile=tile,
    )
