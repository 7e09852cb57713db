"""Wrong arguments of public strategies are refused when the strategy is built."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnfuzz import strategies
from attnfuzz.problems.supports import Supports

INVALID: list[tuple[Callable[[], object], str]] = [
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
