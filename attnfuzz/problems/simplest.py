"""The simplest case that a kernel supports: where every reduction ends that nothing stops. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnfuzz.problems.cases import (
    CASE_TYPES,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    Problem,
    SplitDecodeCase,
)
from attnfuzz.problems.choices import (
    block_sizes_of,
    default_scale,
    dtypes_of,
    gqa_ratios_of,
    head_sizes_of,
    layouts_of,
    v_head_sizes_of,
)
from attnfuzz.problems.supports import Dtype, Layout, OptionValue, Supports

__all__ = ["simplest_case"]


def simplest_case(problem: Problem, supports: Supports, options: Mapping[str, tuple[OptionValue, ...]]) -> Case:
    """One sequence of one token, one KV head, everything else at its first choice.

    Raises ValueError if no supported head size fits any supported layout and dtype.
    """
    dtype, layout = _simplest_format(problem, supports)
    head_size = head_sizes_of(supports, dtype, layout)[0]
    first = {name: choices[0] for name, choices in options.items()}
    shape: dict[str, Any] = {"head_size": head_size, "dtype": dtype, "options": first}
    if problem == "merge_states":
        return MergeStatesCase(num_q_heads=1, num_tokens=1, lse_layout=supports.lse_layout, **shape)
    rows: dict[str, Any] = {
        **shape,
        "num_q_heads": gqa_ratios_of(supports)[0],
        "num_kv_heads": 1,
        "seq_lens": (1,),
        "scale": default_scale(head_size),
        "v_head_size": v_head_sizes_of(supports, head_size, layout)[0],
    }
    if problem == "dense_decode":
        return DenseDecodeCase(**rows)
    cache: dict[str, Any] = {"block_size": block_sizes_of(supports)[0], "layout": layout}
    if problem == "paged_decode":
        return PagedDecodeCase(**rows, **cache)
    if problem == "paged_attention":
        return PagedAttentionCase(**rows, **cache, query_lens=(1,))
    return SplitDecodeCase(**rows, **cache, num_splits=1)


def _simplest_format(problem: Problem, supports: Supports) -> tuple[Dtype, Layout | None]:
    layouts = layouts_of(supports) if issubclass(CASE_TYPES[problem], PagedDecodeCase) else (None,)
    for dtype in dtypes_of(supports):
        for layout in layouts:
            if head_sizes_of(supports, dtype, layout):
                return dtype, layout
    raise ValueError(
        f"Supports(head_sizes={supports.head_sizes!r}, layouts={supports.layouts!r}): the packed layout needs head "
        "sizes that are multiples of 8 (4 for float32), the interleaved one such as are among "
        f"v_head_sizes={supports.v_head_sizes!r}; add such a size or another layout"
    )
