"""Drawn batches in which some row sees nothing of a tile that its block begins or ends with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from attnfuzz.cases.supported import why_unsupported
from attnfuzz.problems.cases import Problem
from attnfuzz.problems.supports import OptionValue, Supports
from tests.quality.drawn import TILES, of_case
from tests.unit.drawing import drawn_cases

WINDOWS = Supports(variants=("window",))


def shares(problem: Problem, supports: Supports, count: int = 1000) -> Mapping[str, float]:
    counted = Counter(one for case in drawn_cases(problem, count, supports=supports) for one in of_case(case))
    return {name: number / count for name, number in counted.items()}


def test_rows_lose_their_first_tile_with_all_scores_on_one_side_of_it() -> None:
    """A maximum that is set to 0 by a tile before the window was met twice in 3,000 cases, with other numbers."""
    found = shares("paged_attention", WINDOWS)
    for tile in TILES:
        first = f"first tile of {tile} seen by other rows only"
        assert found[first] > 0.015
        assert found[f"{first}, all scores far below 0"] > 0.003
        assert found[f"a segment of tiles of {tile} seen by other rows only"] > 0.015
    assert found["first tile of 16 seen by other rows only, all scores far above 0"] > 0.003


def test_tiles_lie_behind_the_causal_edge_of_rows_without_any_window() -> None:
    """A tile that only the last row of a block sees would be given to all of them."""
    found = shares("paged_attention", Supports())
    assert all(found[f"last tile of {tile} seen by other rows only"] > 0.015 for tile in TILES)


def test_whole_tiles_lie_before_the_window_of_a_decoded_token() -> None:
    """What a kernel makes of a tile without any key, if it begins with the first one, was seen of small tiles only."""
    found = shares("paged_decode", WINDOWS)
    assert all(found[f"keys of {tile} before all that a row sees, all scores far below 0"] > 0.005 for tile in TILES)


@pytest.mark.parametrize("may_hide_all", [True, False])
def test_masks_hide_tiles_before_others_and_between_them(may_hide_all: bool) -> None:
    """Pages and chunks that are hidden were hardly ever as long as a tile."""
    found = shares("masked_attention", Supports(empty_sequences=may_hide_all), 2000)
    assert all(found[f"keys of {tile} before all that a row sees"] > 0.004 for tile in TILES)
    assert found["first tile of 64 seen by other rows only"] > 0.004
    assert found["a tile of 16 between others hidden"] > 0.002


def test_whole_tiles_of_a_tree_lie_between_two_of_its_branches() -> None:
    """A tile of query tokens that a row does not see, though it sees those before and after, came up in no tree."""
    found = shares("masked_attention", Supports(masks=("tree",)))
    assert found["a tile of 16 between others hidden"] > 0.004


def test_tiles_that_a_kernel_names_are_those_that_rows_part_at() -> None:
    """A kernel whose tiles have 96 keys would be tried at the ends of others."""
    options: Mapping[str, tuple[OptionValue, ...]] = {"block_n": (96,)}
    parted = 0
    for case in drawn_cases("paged_attention", 600, supports=WINDOWS, options=options):
        found: Any = case
        assert why_unsupported(WINDOWS, options, case) is None
        window = found.variant.window or max(found.seq_lens)
        starts = [[found.row_lens[row] - window for row in found.rows_of(seq)] for seq in range(found.num_seqs)]
        parted += any(min(of_seq) < 96 <= max(of_seq) for of_seq in starts if of_seq)
    assert parted > 20


def _past_a_block(found: Any, block: int) -> bool:
    """Whether a row of the second block of query tokens is not the sequence's last one."""
    return bool(max(found.query_lens) > block + 1)


def test_query_tokens_fill_more_than_one_block() -> None:
    """What is wrong in all blocks but the first, and not in the last row, was drawn in one case of a hundred."""
    drawn = drawn_cases("paged_attention", 1000)
    assert sum(_past_a_block(case, 16) for case in drawn) > 80
    assert sum(_past_a_block(case, 32) for case in drawn) > 8


@pytest.mark.parametrize("block", [32, 64])
def test_blocks_are_those_of_numbers_in_the_source(block: int) -> None:
    """A kernel whose blocks have 64 query tokens would be tried with 16 of them, as interpreted ones cost much."""
    found = drawn_cases("paged_attention", 1000, numbers=(block,))
    assert sum(_past_a_block(case, block) for case in found) > len(found) / 100
