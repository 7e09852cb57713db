"""Where tokens go: the same place for a case in a batch as alone, and as its block table says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnfuzz.inputs.writing import placements
from attnfuzz.problems.block_table import block_table_rows, physical_pages
from attnfuzz.problems.cases import AttentionCase, DenseDecodeCase, PagedDecodeCase
from attnfuzz.strategies.cases import cases
from attnfuzz.values.tokens import token_table


def slots(case: AttentionCase) -> list[tuple[int, int]]:
    """Place of each token, sequence by sequence, in plain Python."""
    if isinstance(case, DenseDecodeCase):
        return [(seq, row) for seq, seq_len in enumerate(case.seq_lens) for row in range(seq_len)]
    assert isinstance(case, PagedDecodeCase)
    pages = physical_pages(case)
    size = case.block_size
    return [(pages[seq][i // size], i % size) for seq, seq_len in enumerate(case.seq_lens) for i in range(seq_len)]


@pytest.mark.parametrize("problem", ["dense_decode", "paged_decode"])
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_tokens_lie_where_the_case_says(problem: str, data: st.DataObject) -> None:
    """A token would be written to another sequence's row or page."""
    batch: list[Any] = data.draw(st.lists(cases(problem), min_size=1, max_size=5))
    for case, placement in zip(batch, placements(batch, token_table(batch, "cpu")), strict=True):
        assert list(zip(*(part.tolist() for part in placement.slots), strict=True)) == slots(case)
        assert tuple(placement.seq_lens.tolist()) == case.seq_lens
        if isinstance(case, PagedDecodeCase):
            assert placement.block_table is not None
            assert tuple(map(tuple, placement.block_table.tolist())) == block_table_rows(case)
