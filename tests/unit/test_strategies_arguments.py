"""Wrong arguments of public strategies are refused when the strategy is built."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnfuzz import strategies
from attnfuzz.problems.supports import Supports

INVALID: list[tuple[Callable[[], object], str]] = [
    (lambda: strategies.seq_lens(min_len=-1), "min_len=-1 must be an integer from 0"),
    (lambda: strategies.seq_lens(max_len=2.5), "max_len=2.5 must be an integer"),  # type: ignore[arg-type]  # on purpose
    (lambda: strategies.seq_lens(min_seqs=3, max_seqs=2), "min_seqs=3 must not exceed max_seqs=2; lower the one"),
    (lambda: strategies.seq_lens(min_seqs=True), "min_seqs=True must be an integer"),
    (lambda: strategies.seq_lens(steps=(16, 0)), r"steps\[1\]=0 must be an integer from 1"),
    (lambda: strategies.seq_lens(num_splits=0), "num_splits=0 must be an integer from 1"),
    (lambda: strategies.seq_lens(min_seqs=4, max_tokens=3), "max_tokens=3 must be at least .* = 4; raise it"),
    (lambda: strategies.gqa_heads(ratios=()), r"ratios=\(\) must be a non-empty tuple"),
    (lambda: strategies.gqa_heads(ratios=(8,), max_heads=7), r"max_heads=7 must be at least .*\(8,\); raise it"),
    (lambda: strategies.head_sizes(min_size=0), "min_size=0 must be an integer from 1"),
    (lambda: strategies.head_sizes(sizes=(13,), multiple_of=8), r"sizes=\(13,\) holds no multiple of 8"),
    (lambda: strategies.block_sizes(sizes=(3,), min_size=4), r"sizes=\(3,\) holds none between min_size=4"),
    (lambda: strategies.block_sizes(sizes=[16]), r"sizes=\[16\] must be a non-empty tuple"),  # type: ignore[arg-type]  # on purpose
    (lambda: strategies.split_counts(max_splits=0), "max_splits=0 must be an integer from 1"),
    (lambda: strategies.page_maps(max_shared_blocks=-1), "max_shared_blocks=-1 must be"),
    (lambda: strategies.page_maps(unused_table_entries="any"), "unused_table_entries='any' must be one of"),  # type: ignore[arg-type]  # on purpose
    (lambda: strategies.lse_pairs(min_pairs=2, max_pairs=1), "min_pairs=2 must not exceed max_pairs=1"),
    (lambda: strategies.lse_pairs(max_pairs=9), "max_pairs=9 must be an integer from 1 to 8"),
    (lambda: strategies.strides("attention"), "problem='attention' must be one of"),
    (lambda: strategies.strides("dense_decode", allowed="all"), "allowed='all' must be one of"),  # type: ignore[arg-type]  # on purpose
    (lambda: strategies.strides("dense_decode", max_strided=9), "max_strided=9 must be"),
    (lambda: strategies.needles(seq_lens=()), r"seq_lens=\(\) must be a non-empty tuple"),
    (lambda: strategies.needles(seq_lens=(3,), max_needles=4), "max_needles=4 must be an integer from 0 to 3"),
    (lambda: strategies.values(seq_lens=(3, -1)), r"seq_lens\[1\]=-1 must be"),
    (lambda: strategies.values(seq_lens=(3,), num_kv_heads=0), "num_kv_heads=0 must be"),
    (lambda: strategies.scales(head_size=0), "head_size=0 must be an integer from 1"),
    (lambda: strategies.option_choices({"tile": ()}), "non-empty tuple of choices"),
    (lambda: strategies.cases("prefill"), "problem='prefill' must be one of"),
    (lambda: strategies.cases("dense_decode", options={"a b": (1,)}), "must be an identifier"),
    (
        lambda: strategies.cases("paged_decode", supports=Supports(head_sizes=(13,), layouts=("packed",))),
        r"head_sizes=\(13,\).*add such a size or another layout",
    ),
    (
        lambda: strategies.Sizes(
            max_seqs=0, max_seq_len=1, max_tokens=1, max_heads=1, max_splits=1, max_head_elements=1,
            max_page_elements=1, max_cache_elements=1, work=(1,),
        ),
        r"Sizes\(max_seqs=0\): must be an integer >= 1",
    ),
    (
        lambda: strategies.Sizes(
            max_seqs=1, max_seq_len=1, max_tokens=1, max_heads=1, max_splits=1, max_head_elements=1,
            max_page_elements=1, max_cache_elements=1, work=(),
        ),
        r"Sizes\(work=\(\)\): must be a non-empty tuple",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("build", "message"), INVALID, ids=[message for _, message in INVALID])
def test_invalid_arguments_name_the_value_and_the_rule(build: Callable[[], object], message: str) -> None:
    """A wrong argument would draw nonsense, or fail in the middle of a run with someone else's message."""
    with pytest.raises(ValueError, match=message):
        build()
