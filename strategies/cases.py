"""Whole cases, limited by what a kernel supports by construction: nothing drawn is thrown away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from attnfuzz.problems.boundaries import split_count, tile_sizes
from attnfuzz.problems.cases import (
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
from attnfuzz.strategies.drawing import check_one_of, pick
from attnfuzz.strategies.heads import draw_gqa_heads
from attnfuzz.strategies.launch import draw_options
from attnfuzz.strategies.lengths import LengthLimits, draw_seq_lens
from attnfuzz.strategies.lse import draw_lse_pairs
from attnfuzz.strategies.pages import draw_pages
from attnfuzz.strategies.sizes import CPU_SIZES, Sizes
from attnfuzz.strategies.strides import draw_strides
from attnfuzz.strategies.values import draw_scale, draw_values

__all__ = ["cases"]

_TOKEN_COUNTS = (1, 2, 3, 4, 5, 8, 16, 17, 64, 257, 1024)
_EXTRA_ROWS = (0, 0, 1, 3, 17, 64)
_MERGE_SEEDS = range(64)


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
    return _DRAWN[problem](_Plan(problem, supports, options, sizes, _formats(problem, supports)))


def _formats(problem: Problem, supports: Supports) -> dict[Dtype, dict[Layout | None, tuple[int, ...]]]:
    layouts: tuple[Layout | None, ...] = layouts_of(supports) if "paged" in problem or "split" in problem else (None,)
    formats = {
        dtype: {layout: sizes for layout in layouts if (sizes := head_sizes_of(supports, dtype, layout))}
        for dtype in dtypes_of(supports)
    }
    return {dtype: layouts for dtype, layouts in formats.items() if layouts}


@st.composite
def _dense_decode(draw: st.DrawFn, plan: _Plan) -> DenseDecodeCase:
    fields = _attention(draw, plan)
    most = plan.supports.max_seq_len
    longest = max(fields["seq_lens"])
    rows = [count for count in _EXTRA_ROWS if most is None or longest + count <= most]
    return DenseDecodeCase(extra_rows=pick(draw, rows), **fields)


@st.composite
def _paged_decode(draw: st.DrawFn, plan: _Plan) -> PagedDecodeCase:
    return PagedDecodeCase(**_attention(draw, plan))


@st.composite
def _split_decode(draw: st.DrawFn, plan: _Plan) -> SplitDecodeCase:
    most = min(plan.sizes.max_splits, plan.supports.max_num_splits or plan.sizes.max_splits)
    num_splits = pick(draw, [count for count in split_counts_of(plan.supports) if count <= most])
    return SplitDecodeCase(num_splits=num_splits, **_attention(draw, plan, num_splits))


@st.composite
def _merge_states(draw: st.DrawFn, plan: _Plan) -> MergeStatesCase:
    supports, sizes = plan.supports, plan.sizes
    work = pick(draw, sizes.work)
    options = draw_options(draw, plan.options)
    dtype = pick(draw, tuple(plan.head_sizes))
    num_q_heads = pick(draw, [count for count in range(1, 33) if count <= min(work, sizes.max_heads)])
    num_tokens = pick(draw, [count for count in _TOKEN_COUNTS if count * num_q_heads <= work])
    return MergeStatesCase(
        num_q_heads=num_q_heads,
        num_tokens=num_tokens,
        head_size=_pick_head_size(draw, plan, dtype, None, num_q_heads),
        dtype=dtype,
        lse_pairs=draw_lse_pairs(draw, lse_kinds_of(supports), min_pairs=1, max_pairs=min(8, num_tokens * num_q_heads)),
        lse_layout=supports.lse_layout,
        seed=pick(draw, _MERGE_SEEDS),
        strides=draw_strides(draw, plan.problem, supports, None),
        options=options,
    )


_DRAWN: dict[Problem, Callable[[_Plan], st.SearchStrategy[Case]]] = {
    "dense_decode": _dense_decode,
    "paged_decode": _paged_decode,
    "split_decode": _split_decode,
    "merge_states": _merge_states,
}


def _attention(draw: st.DrawFn, plan: _Plan, num_splits: int | None = None) -> dict[str, Any]:
    """Fields of a case, by name; those of the cache where the problem has one."""
    supports, sizes = plan.supports, plan.sizes
    work = pick(draw, sizes.work)
    options = draw_options(draw, plan.options)
    num_splits = num_splits or split_count(options)
    dtype = pick(draw, tuple(plan.head_sizes))
    layout = pick(draw, tuple(plan.head_sizes[dtype]))
    num_q_heads, num_kv_heads = draw_gqa_heads(
        draw, gqa_ratios_of(supports), min(sizes.max_heads, max(1, work // num_splits))
    )
    head_size = _pick_head_size(draw, plan, dtype, layout, num_q_heads)
    steps = tile_sizes(options)
    fields: dict[str, Any] = {}
    if layout is not None:
        fields["layout"] = layout
        fields["block_size"] = _pick_block_size(draw, plan, num_kv_heads * head_size)
        steps = (fields["block_size"], *steps)
    seq_lens = draw_seq_lens(draw, _length_limits(plan, steps, num_splits, max(1, work // num_q_heads)))
    if layout is not None:
        fields["pages"] = draw_pages(draw, paddings_of(supports), max_shared_blocks=3 if len(seq_lens) > 1 else 0)
    return fields | {
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "dtype": dtype,
        "seq_lens": seq_lens,
        "scale": draw_scale(draw, head_size),
        "values": draw_values(draw, seq_lens, num_kv_heads=num_kv_heads, steps=steps, num_splits=num_splits),
        "strides": draw_strides(draw, plan.problem, supports, layout),
        "options": options,
    }


def _pick_head_size(draw: st.DrawFn, plan: _Plan, dtype: Dtype, layout: Layout | None, num_q_heads: int) -> int:
    sizes = plan.head_sizes[dtype][layout]
    return pick(draw, [size for size in sizes if size * num_q_heads <= plan.sizes.max_head_elements] or sizes[:1])


def _pick_block_size(draw: st.DrawFn, plan: _Plan, token_elements: int) -> int:
    sizes = block_sizes_of(plan.supports)
    return pick(draw, [size for size in sizes if size * token_elements <= plan.sizes.max_page_elements] or sizes[:1])


def _length_limits(plan: _Plan, steps: tuple[int, ...], num_splits: int, work: int) -> LengthLimits:
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
        work=max(1, min(work, sizes.max_tokens // tile)),
        tile=tile,
    )
