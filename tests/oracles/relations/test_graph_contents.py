"""Other contents for the tensors that a call is captured with."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

import attnfuzz
from attnfuzz.cases.supported import supports_case
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.relations.graph_replay import MOST_BYTES, contents_of, with_room
from attnfuzz.problems.block_table import num_blocks
from attnfuzz.problems.cases import (
    PROBLEMS,
    AttentionCase,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    Problem,
    SplitDecodeCase,
)
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.strategies import cases

SIZES = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 8, "scale": 0.25}
DENSE = DenseDecodeCase(**SIZES, seq_lens=(5, 0, 300), extra_rows=1)  # type: ignore[arg-type]  # ints and a float
PAGED = PagedDecodeCase(**SIZES, seq_lens=(5, 0, 21, 8), block_size=8)  # type: ignore[arg-type]  # as above
SHARED = msgspec.structs.replace(PAGED, pages=Pages(shared_blocks=2, order="reversed", padding="garbage"))
NEEDLES = msgspec.structs.replace(PAGED, values=Values(needles=(Needle(2, 20, 0),)))
QUERIES = PagedAttentionCase(**SIZES, seq_lens=(5, 0, 21, 8), query_lens=(5, 0, 2, 1), block_size=8)  # type: ignore[arg-type]  # as above
SPLIT = SplitDecodeCase(**SIZES, seq_lens=(1,), block_size=16, num_splits=3)  # type: ignore[arg-type]  # as above


def declared(case: Case, **limits: object) -> Declaration:
    supports = attnfuzz.Supports(graph_replay=True, **limits)  # type: ignore[arg-type]  # any limit
    return Declaration(name="kernel", problem=case.problem, supports=supports)


@pytest.mark.parametrize(
    "case",
    [DENSE, PAGED, SHARED, NEEDLES, SPLIT, QUERIES],
    ids=["dense", "paged", "shared", "needles", "split", "queries"],
)
def test_contents_have_the_shapes_that_were_captured(case: DenseDecodeCase | PagedDecodeCase) -> None:
    """A graph knows one address and one shape for each tensor; other ones would not be what it reads."""
    captured = with_room(declared(case), case)
    first, *others = contents_of(declared(case), captured)
    assert first.case == captured
    assert getattr(captured, "seq_lens", None) == case.seq_lens
    for content in others:
        assert tensor_specs(content.case) == tensor_specs(captured), content.words
        assert isinstance(content.case, AttentionCase)
        assert content.case.values.seed != case.values.seed


# A mask has the size of its lengths, and graphs of it are not replayed.
@pytest.mark.parametrize("problem", [one for one in PROBLEMS if one != "masked_attention"])
@pytest.mark.parametrize("limits", [{}, {"empty_sequences": False, "max_seq_len": 100}], ids=["all", "limited"])
def test_contents_of_drawn_cases_are_what_a_kernel_takes(problem: Problem, limits: dict[str, Any]) -> None:
    """A case with an odd recipe would end in an error, or in contents that the kernel has not declared to support."""
    supports = attnfuzz.Supports(graph_replay=True, unused_table_entries="garbage", **limits)
    declaration = Declaration(name="kernel", problem=problem, supports=supports)

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(cases(problem, supports=supports))
    def hold(case: Case) -> None:
        captured = with_room(declaration, case)
        for content in contents_of(declaration, captured):
            assert tensor_specs(content.case) == tensor_specs(captured)
            assert supports_case(supports, {}, content.case)

    hold()


def test_lengths_shrink_grow_and_become_empty() -> None:
    """What a server does with a captured graph would not be tried."""
    words = [content.words for content in contents_of(declared(PAGED), with_room(declared(PAGED), PAGED))]
    assert words == [
        "with what it was captured with",
        "with seq_lens shortened from [5, 0, 21, 8] to [2, 0, 10, 4]",
        "with seq_lens grown from [5, 0, 21, 8] to [74, 64, 106, 80]",
        "with seq_lens padded from [5, 0, 21, 8] to [5, 0, 0, 0]",
        "with seq_lens=[5, 0, 21, 8] on other pages",
    ]


def test_what_a_kernel_does_not_take_is_not_replayed() -> None:
    """A kernel would be blamed for lengths that it has declared not to support."""
    case = msgspec.structs.replace(PAGED, seq_lens=(1, 5, 21))
    declaration = declared(case, empty_sequences=False, max_seq_len=30)
    lengths = [
        one.case.seq_lens
        for one in contents_of(declaration, with_room(declaration, case))
        if isinstance(one.case, AttentionCase)
    ]
    assert lengths == [(1, 5, 21), (1, 2, 10), (30, 30, 30), (1, 5, 21)]


def test_without_room_sequences_shrink_only() -> None:
    """A case too large to be made larger would be replayed on memory that it does not have, or not at all."""
    words = " ".join(content.words for content in contents_of(declared(PAGED), PAGED))
    assert "shortened" in words
    assert "padded" in words
    assert "grown" not in words


def test_room_is_bounded() -> None:
    """Capturing a case of a few megabytes would take a multiple of what the case may."""
    case = msgspec.structs.replace(DENSE, seq_lens=(4000,) * 16, head_size=16)
    assert tensor_nbytes(case) < MOST_BYTES
    assert with_room(declared(case), case) == case
    assert num_blocks(with_room(declared(PAGED), PAGED)) > num_blocks(PAGED)  # type: ignore[arg-type]  # it is paged


def test_states_to_merge_change_their_kinds() -> None:
    """Branches on whether a state is empty, taken on the host, would stay those of the capture."""
    case = MergeStatesCase(num_q_heads=2, head_size=8, num_tokens=3, lse_pairs=(("finite", "-inf"), ("high", "low")))
    pairs = [one.case.lse_pairs for one in contents_of(declared(case), case) if isinstance(one.case, MergeStatesCase)]
    assert pairs == [case.lse_pairs, (("-inf", "finite"), ("low", "high")), (("-inf", "-inf"),)]
    assert len(contents_of(declared(case, empty_sequences=False), case)) == 2


def test_long_lists_of_lengths_are_cut() -> None:
    """A message about a large batch would fill the screen."""
    case = msgspec.structs.replace(PAGED, seq_lens=(2,) * 40)
    assert contents_of(declared(case), case)[1].words == (
        "with seq_lens shortened from [2, 2, 2, 2, 2, 2, 2, 2, ...] to [1, 1, 1, 1, 1, 1, 1, 1, ...]"
    )


def test_a_graph_without_padding_tokens_is_replayed_without() -> None:
    """A kernel that takes each row of q for a query token, and says so, would be called wrong."""
    captured = with_room(declared(QUERIES), QUERIES)
    unpadded = contents_of(declared(QUERIES, padding_tokens=False), captured)
    assert {getattr(content.case, "padding_tokens", None) for content in unpadded} == {0}
    padded = contents_of(declared(QUERIES), captured)
    assert [content.words for content in padded if getattr(content.case, "padding_tokens", 0) > 0] == [
        "with query_lens shortened from [5, 0, 2, 1] to [1, 0, 1, 1]",
        "with the last 2 of 4 sequences, which keep their lengths, as padding",
        "with the last 2 of 4 sequences, which are empty, as padding",
    ]


def test_query_tokens_move_to_other_sequences_within_frozen_bounds() -> None:
    """The grid of a graph is made for so many tokens, and its bounds are numbers that no replay can change."""
    captured = with_room(declared(QUERIES), QUERIES)
    assert isinstance(captured, PagedAttentionCase)
    contents = [content.case for content in contents_of(declared(QUERIES), captured)]
    found = [case for case in contents if isinstance(case, PagedAttentionCase)]
    assert {(case.num_query_slots, case.max_query_len, case.max_seq_len) for case in found} == {
        (8, captured.max_query_len, captured.max_seq_len)
    }
    assert {case.query_lens for case in found} == {(5, 0, 2, 1), (1, 2, 0, 5), (1, 0, 1, 1), (5, 0, 0, 0)}
    assert max(max(case.seq_lens) for case in found) > 21
