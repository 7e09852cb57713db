"""Query heads, KV heads and head sizes."""

from __future__ import annotations

from attnfuzz.problems.choices import KV_HEADS
from attnfuzz.strategies.decisions import Decisions

_WIDE = 16
"""Query heads per KV head that fill the rows of a matrix instruction: kernels take larger groups in several parts."""


def decide_gqa_heads(
    decisions: Decisions,
    ratios: tuple[int, ...],
    max_heads: int,
    *,
    wide: int = 0,
    least_kv_heads: int = 1,
    large: tuple[int, ...] = (),
    weight: int = 1,
) -> tuple[int, int]:
    """``ratios`` ascending; where all of them exceed ``max_heads``, the first is drawn.

    ``wide``: a ratio above 16, or else of 16, and so many KV heads, where ``max_heads`` has room for them; 0: any.
    ``least_kv_heads``: likewise where there is room. ``large``: ratios that are drawn beside the wide ones, with one KV
    head, whatever ``max_heads`` is; each of the others is ``weight`` times as likely.
    """
    wide_ratios = [ratio for ratio in ratios if wide and ratio >= _WIDE and wide * ratio <= max_heads]
    of_several = [ratio for ratio in ratios if least_kv_heads * ratio <= max_heads]
    narrow_ratios = of_several or [ratio for ratio in ratios if ratio <= max_heads] or ratios[:1]
    in_parts = [ratio for ratio in wide_ratios if ratio > _WIDE]
    ratio = decisions.pick_rarely(in_parts or wide_ratios or narrow_ratios, large if wide else (), weight=weight)
    if ratio in large:
        return ratio, 1
    least = wide if wide_ratios else least_kv_heads if of_several else 1
    counts = [count for count in KV_HEADS if least <= count and count * ratio <= max_heads]
    num_kv_heads = decisions.pick(counts or KV_HEADS[:1])
    return ratio * num_kv_heads, num_kv_heads


def decide_head_counts(decisions: Decisions, counts: tuple[tuple[int, int], ...], max_heads: int) -> tuple[int, int]:
    """One of ``counts`` of query and KV heads, by the number of the latter first; the fewest where none fit."""
    fitting = [heads for heads in counts if heads[0] <= max_heads] or [min(counts)]
    num_kv_heads = decisions.pick(sorted({heads[1] for heads in fitting}))
    return decisions.pick([heads for heads in fitting if heads[1] == num_kv_heads])
