"""Shapes and suites: the bytes that must move, and what is measured under which name."""

from __future__ import annotations

import pytest

from attnfuzz.bench.kernels.shapes import SUITES, Shape, bytes_to_move, smoke_suite
from attnfuzz.problems.cases import MAX_SEQ_LEN

DECODE = Shape(label="", num_q_heads=32, num_kv_heads=8, head_size=128, seq_lens=(4096,))


def test_bytes_of_decode_are_keys_values_queries_and_results() -> None:
    """The bandwidth of every kernel would be wrong by the same factor, and none would look odd."""
    cache = 2 * 4096 * 8 * 128 * 2
    assert bytes_to_move(DECODE) == cache + 32 * (2 * 128 * 2 + 4)


def test_bytes_of_a_merge_are_three_states() -> None:
    """The share of a copy's bandwidth would be wrong for merges."""
    merge = Shape(label="", num_q_heads=32, head_size=128, num_tokens=4096)
    assert bytes_to_move(merge) == 3 * 4096 * 32 * (128 * 2 + 4)


@pytest.mark.parametrize(("suite", "kinds"), [("decode", {"decode"}), ("merge", {"merge"}), ("mixed", {"mixed"})])
def test_suites_hold_shapes_of_their_kind(suite: str, kinds: set[str]) -> None:
    """A suite would time kernels of another problem, or none."""
    assert {shape.kind for shape in SUITES[suite]()} == kinds


@pytest.mark.parametrize("suite", SUITES)
def test_shapes_of_a_suite_are_told_apart_by_label(suite: str) -> None:
    """Two rows of a table could not be told apart, and --shape would choose both."""
    shapes = SUITES[suite]()
    assert len({shape.label for shape in shapes}) == len(shapes)
    assert all(shape.longest <= MAX_SEQ_LEN for shape in shapes)


def test_queries_of_a_mixed_batch_are_no_more_than_its_keys() -> None:
    """A query would come before the first key of its sequence."""
    for shape in (*SUITES["mixed"](), *smoke_suite()):
        assert all(
            queries <= length for queries, length in zip(shape.queries, shape.seq_lens, strict=bool(shape.seq_lens))
        )
