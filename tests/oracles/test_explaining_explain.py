"""attnfuzz.explaining.explain: what is said of kernels that make one mistake each."""

from __future__ import annotations

import re
from typing import Any

import pytest

from attnfuzz.explaining.explain import explain_case
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.problems.cases import DenseDecodeCase, PagedDecodeCase, Problem
from attnfuzz.problems.recipes import Pages, Values
from tests.oracles.explained_kernels import kernel

NORMAL = Values(keys="normal", values="normal")
PAGES = Pages(order="shuffled", spare_blocks=1)


def dense(*lengths: int, **fields: Any) -> DenseDecodeCase:
    base: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 2, "head_size": 8, "scale": 0.5, "dtype": "float32"}
    return DenseDecodeCase(**{**base, "values": NORMAL, "extra_rows": 1, **fields}, seq_lens=lengths)


def paged(*lengths: int, **fields: Any) -> PagedDecodeCase:
    base: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 8, "scale": 0.5, "dtype": "float32"}
    return PagedDecodeCase(**{**base, "values": NORMAL, "block_size": 4, "pages": PAGES, **fields}, seq_lens=lengths)


def explained(mistake: str, case: DenseDecodeCase | PagedDecodeCase, problem: Problem = "dense_decode") -> Explanation:
    return explain_case(kernel(mistake, problem), case, device="cpu", seconds=60.0)


@pytest.mark.parametrize(
    ("mistake", "case", "line"),
    [
        ("last_token_dropped", dense(5, 3), r"^token 4 of sequence 0 is dropped$"),
        ("last_token_dropped", dense(5, 3), r"sequence 0, query head 0: token 4 has weight 0, expected 0\.\d+$"),
        ("one_token_too_many", dense(3, num_q_heads=2), r"\(past the end of sequence 0\) has weight 0\.\d+"),
        ("kv_heads_exchanged", dense(5), r"query head 0 reads KV head 1, expected 0$"),
        ("no_lse_and_kv_heads_exchanged", dense(5), r"^lse is not written$"),
        ("no_lse_and_kv_heads_exchanged", dense(5), r"query head 0 reads KV head 1, expected 0$"),
        ("v_heads_exchanged", dense(5), r"query head 0 reads V of KV head 1, expected 0$"),
        ("scale_off", dense(6), r"^the scores are 1\.01 x the right ones"),
        ("query_of_another_head", dense(6), r"^the query of sequence 0, head 1 is read$"),
        ("another_sequence", dense(4, 4), r"^sequence 0 reads the first 4 tokens of sequence 1$"),
        ("scaled_output", dense(4), r"all weights are 0\.5 x the right ones"),
        ("base_two", dense(4), r"lse is in base 2, not a natural logarithm"),
        ("upper_half_doubled", dense(4), r"dimensions 4-7 of the output weigh the tokens otherwise than the rest"),
        ("squared", dense(4), r"its weights depend on the values"),
        ("plus_one", dense(4), r"part of the output does not come from any value in the cache \(out\[dim 0\] = 1\.0"),
        ("plus_a_little_of_keys", dense(4), r"part of the output does not come from any value in the cache"),
        ("k_for_v", dense(4), r"part of the output is read from K \(out\[dim 6\] = 1\.4"),
        ("random", dense(4), r"two runs of the same input differ in out"),
        ("first_row_only", dense(4, 4), r"^out\[seq 1\] is not written$"),
        ("adds_to_out", dense(4), r"^out is made of memory that was never written$"),  # and not: is not written
        ("not_masked", dense(4), r"NaN enters from V of sequence 0, row 4, past the end of sequence 0$"),
        ("scales_q", dense(4), r"the kernel changes its input q$"),
        ("rows_exchanged", dense(4, 6), r"^this is the result of sequence 1, head 0$"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(mistake: str, case: DenseDecodeCase, line: str) -> None:
    """The explanation would name another token, head, tensor or row, or none."""
    lines = explained(mistake, case).lines
    assert any(re.search(line, said) for said in lines), "\n".join(lines)


def test_a_token_that_weighs_much_in_place_of_nothing_is_no_factor() -> None:
    """The only weight that is large enough to see is right, and all would be called 1 x the right ones."""
    lines = explained("first_token_added", dense(17, values=Values(keys="rising", logit_exponent=6))).lines
    assert not any("x the right ones" in line for line in lines), "\n".join(lines)
    assert any(re.search(r"token 0 has weight 0\.5, expected \d\.\d+e-", line) for line in lines), "\n".join(lines)


def test_weights_that_come_out_right_are_not_called_right_where_only_lse_is_wrong() -> None:
    """A token that is counted twice and has all the weight would be said to have the right one."""
    (line,) = [line for line in explained("lse_off", dense(4)).lines if "lse" in line][:1]
    assert re.search(r"here only lse shows it: -?\d+\.\d+, expected -?\d+\.\d+$", line), line


def test_of_a_kernel_that_raises_nothing_is_added() -> None:
    """The finding says what it raises, and a second line would say that this was not looked into."""
    assert explained("raises", dense(4)).lines == ()


def test_a_page_that_is_read_in_place_of_another_is_named() -> None:
    """The block table would be searched for the wrong entry."""
    found = explained("entry_before", paged(7, 10), "paged_decode")
    text = "\n".join(found.lines)
    assert "a page is read through the entry before its own of the block table" in found.lines
    assert "tokens 4-6 (page 1) have weight 0" in text


@pytest.mark.parametrize("problem", ["dense_decode", "paged_decode"])
def test_of_a_right_kernel_nothing_wrong_is_said(problem: Problem) -> None:
    """A maintainer would be told of a mistake that is not there."""
    case = dense(5, 0, 3) if problem == "dense_decode" else paged(5, 0, 3)
    found = explained("right", case, problem)
    assert [line.partition(":")[0] for line in found.lines] == ["every weight is right, and so is the LSE"]
    assert not any(row.wrong for row in found.rows)


def test_of_a_kernel_without_lse_nothing_else_is_said() -> None:
    """Rows would be called wrong because of a number that the kernel does not give."""
    assert explained("no_lse", dense(5, 0, 3)).lines == ("lse is not written",)


@pytest.mark.parametrize("mistake", ["one_token_too_many", "no_lse_and_no_tokens"])
def test_weights_that_say_nothing_of_tokens_contradict_no_mistake(mistake: str) -> None:
    """What runs of other cases have told would be dropped, for "the output is 0.5 x the right one" or for nothing."""
    assert explained(mistake, dense(1, values=Values(keys="equal", values="positions"))).causes is None


def test_rows_to_draw_mark_what_is_to_blame() -> None:
    """The picture would mark all weights, since each grows where one is missing."""
    row = explained("last_token_dropped", paged(6), "paged_decode").rows[0]
    assert [box.wrong for box in row.boxes] == [(False,) * 4, (False, True, False, False)]
    assert row.boxes[1].got[1] == 0 < row.boxes[1].expected[1]
    assert row.wrong


def test_time_is_kept() -> None:
    """A campaign would stand still while a large case explains itself."""
    found = explain_case(kernel("right"), dense(5), device="cpu", seconds=0.0)
    assert found.lines == ("(there was no time to find out more)",)
    assert found.runs <= 1


@pytest.mark.parametrize(
    ("mistake", "line"),
    [
        ("right", r"^every weight is right"),
        ("last_token_dropped", r"token 600 \(page 150, offset 0\) has weight 0, expected 0\.\d+$"),
        ("one_token_too_many", r"\(past the end of sequence 0\) has weight"),
    ],
)
def test_of_many_places_the_odd_ones_are_found(mistake: str, line: str) -> None:
    """A case that has not been shrunk would take hundreds of runs, or not be explained at all."""
    case = paged(601, 77, num_kv_heads=2, head_size=16, values=Values(keys="normal", logit_exponent=-1))
    found = explain_case(kernel(mistake, "paged_decode"), case, device="cpu", seconds=60.0)
    assert any(re.search(line, said) for said in found.lines), "\n".join(found.lines)
    assert found.runs < 200


def test_a_case_that_is_too_large_says_so() -> None:
    """Weighing tens of thousands of places would take minutes without a word."""
    found = explain_case(kernel("right"), dense(1 << 16, num_q_heads=2), device="cpu", seconds=60.0)
    assert "too many to measure" in found.lines[0]
