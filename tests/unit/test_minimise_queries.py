"""Query tokens of a failing case shrink to what the failure needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attnfuzz.minimise import minimise, simplifications, size_key
from attnfuzz.problems.cases import PagedAttentionCase
from attnfuzz.problems.recipes import Needle, Values
from attnfuzz.problems.supports import Supports

CASE = PagedAttentionCase(
    num_q_heads=6,
    num_kv_heads=2,
    head_size=64,
    scale=0.125,
    block_size=16,
    seq_lens=(40, 33, 5, 0, 21),
    query_lens=(37, 1, 5, 0, 0),
    query_slack=3,
    padding_tokens=5,
    seq_slack=9,
    values=Values(needles=(Needle(0, 2, 1), Needle(0, 39, 0))),
)

Fails = Callable[[Any], bool]


@pytest.mark.parametrize(
    ("fails", "seq_lens", "query_lens"),
    [
        (lambda case: True, (1,), (1,)),
        (lambda case: max(case.query_lens) > 16, (17,), (17,)),
        (lambda case: any(0 < n < length for n, length in _lens(case)), (2,), (1,)),
        (lambda case: any(2 <= n <= length - 3 for n, length in _lens(case)), (5,), (2,)),
        (lambda case: 0 in case.query_lens, (1, 1), (1, 0)),
        (lambda case: (0, 0) in _lens(case), (1, 0), (1, 0)),
        (lambda case: case.query_lens[0] % 16 == 5, (5,), (5,)),
    ],
    ids=[
        "anything",
        "second tile",
        "context",
        "chunk behind a context",
        "no query",
        "no token",
        "same place in its tile",
    ],
)
def test_minimal(fails: Fails, seq_lens: tuple[int, ...], query_lens: tuple[int, ...]) -> None:
    """A reader would wonder about query tokens, or context, that the bug does not need."""
    found = minimise(CASE, fails, supports=Supports(), options={})
    assert isinstance(found, PagedAttentionCase)
    assert sorted(zip(found.seq_lens, found.query_lens, strict=True)) == sorted(zip(seq_lens, query_lens, strict=True))
    assert (found.query_slack, found.seq_slack, found.padding_tokens, found.num_q_heads) == (0, 0, 0, 1)


def test_bounds_stay_loose_only_where_that_matters() -> None:
    """A bug that takes a bound for a length would lose what shows it."""
    is_loose: Fails = lambda case: case.max_seq_len > max(case.seq_lens)  # noqa: E731 - a typed lambda, as above
    found = minimise(CASE, is_loose, supports=Supports(), options={})
    assert isinstance(found, PagedAttentionCase)
    assert (found.seq_slack, found.query_slack, found.seq_lens) == (1, 0, (1,))


def test_every_step_is_a_smaller_case() -> None:
    """Shrinking would go round in circles."""
    key = size_key(CASE)
    assert all(size_key(one) < key for one in simplifications(CASE, supports=Supports(), options={}))


def _lens(case: PagedAttentionCase) -> list[tuple[int, int]]:
    return list(zip(case.query_lens, case.seq_lens, strict=True))
