"""attnfuzz.explaining: rows and groups of them in words."""

from __future__ import annotations

from attnfuzz.explaining.explain import summarise
from attnfuzz.explaining.measured_row import Reading
from attnfuzz.explaining.words import scope
from attnfuzz.problems.cases import DenseDecodeCase, MergeStatesCase

CASE = DenseDecodeCase(num_q_heads=4, num_kv_heads=2, head_size=8, seq_lens=(3, 3, 3), scale=1.0)


def test_rows_are_named_as_one() -> None:
    """A list of rows would hide that a whole head, or every row, is wrong."""
    assert scope(CASE, range(12), count=12) == "every row"
    assert scope(CASE, [5], count=12) == "sequence 1, query head 1"
    assert scope(CASE, range(4, 12), count=12) == "sequences 1-2"
    assert scope(CASE, [2, 6, 10], count=12) == "query head 2 of every sequence"
    assert scope(CASE, [0, 1, 4, 5], count=12) == "sequences 0-1, query heads 0-1"
    assert scope(CASE, [0, 5], count=12) == "2 of 12 rows"
    assert scope(CASE, [1, 2], count=4) == "query heads 1-2"


def test_rows_of_a_merge_are_tokens() -> None:
    """A merge has no sequences to look for."""
    merge = MergeStatesCase(num_q_heads=2, num_tokens=2, head_size=8)
    assert scope(merge, [2], count=4) == "token 1, query head 0"


def test_what_rows_have_in_common_is_said_once() -> None:
    """Twelve lines would say the same of twelve rows."""
    readings = {row: Reading("all weights are 2.0 x the right ones", "factor") for row in range(12)}
    assert summarise(CASE, readings, count=12) == ["every row: all weights are 2.0 x the right ones"]


def test_what_most_rows_show_comes_first_and_what_is_vague_last() -> None:
    """One odd row would stand for all, or weights that are merely wrong for what they come of."""
    often, vague = Reading("often", "tokens"), Reading("weights differ", "scores")
    readings = {0: Reading("odd", "lse"), 1: often, 2: often, 3: vague}
    lines = summarise(CASE, readings, count=12)
    assert lines[0] == "sequence 0, query heads 1-2: often"
    assert lines[-1] == "sequence 0, query head 3: weights differ"


def test_of_a_single_row_only_what_is_wrong_is_said() -> None:
    """A line would begin with a row that goes without saying."""
    one = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=8, seq_lens=(3,), scale=1.0)
    assert summarise(one, {0: Reading("token 2 has weight 0", "tokens")}, count=1) == ["token 2 has weight 0"]
