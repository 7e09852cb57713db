"""attnfuzz.explaining.words: what tokens have in common."""

from __future__ import annotations

import pytest

from attnfuzz.explaining.words import descriptions
from attnfuzz.problems.cases import AttentionCase, DenseDecodeCase, PagedDecodeCase

DENSE = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=8, seq_lens=(1,), scale=1.0)
PAGED = PagedDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=8, seq_lens=(1,), scale=1.0, block_size=4)


@pytest.mark.parametrize(
    ("case", "length", "positions", "name"),
    [
        (DENSE, 5, [4], "the last token"),
        (DENSE, 5, [0], "the first token"),
        (DENSE, 5, [0, 1, 2, 3, 4], "every token"),
        (PAGED, 9, [8], "the last, partial page"),
        (PAGED, 9, [8], "the last token"),
        (PAGED, 12, [8, 9, 10, 11], "the last page"),
        (PAGED, 12, [1, 5, 9], "offset 1 of every page"),
        (PAGED, 12, [4, 5, 6, 7, 8, 9, 10, 11], "every token after the first page"),
        (DENSE, 40, [16, 32], "the token at every boundary of a tile of 16"),
        (DENSE, 40, [35, 36, 37, 38, 39], "every token from 35 on"),
    ],
)
def test_tokens_have_a_name(case: AttentionCase, length: int, positions: list[int], name: str) -> None:
    """Rows of different lengths would not be seen to have the same mistake."""
    assert name in list(descriptions(case, length, positions))


def test_tokens_without_anything_in_common_have_none() -> None:
    """A pattern would be claimed that is none."""
    assert list(descriptions(DENSE, 9, [1, 2, 6])) == []
