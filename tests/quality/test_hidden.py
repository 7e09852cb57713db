"""Cases in which nothing would show are rare among those that are drawn."""

from __future__ import annotations

import pytest

from tests.quality.hidden import SIZES, hidden


@pytest.mark.parametrize("name", ["paged_split_k", "paged_attention_segments"])
@pytest.mark.by_day("paged_split_k")
def test_few_drawn_cases_hide_a_doubled_output(name: str) -> None:
    """A search would spend its time on cases whose bound lets anything pass."""
    found = [is_hidden for _, is_hidden in hidden(name, SIZES["CPU"], 200)]
    assert len(found) > 100
    assert sum(found) <= 1
