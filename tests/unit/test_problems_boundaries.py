"""Where pages, tiles and splits end."""

from __future__ import annotations

import msgspec
import pytest

from attnfuzz.problems.boundaries import (
    boundary_lengths,
    boundary_positions,
    has_empty_split,
    num_splits_of,
    split_count,
    steps_of,
    tile_sizes,
)
from attnfuzz.problems.cases import PagedDecodeCase, SplitDecodeCase
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import OptionValue, Supports


def test_tiles_are_the_integer_options_that_can_be_token_counts() -> None:
    """The boundary of a tile under an unusual name would never be aimed at."""
    options: dict[str, OptionValue] = {"BLOCK_N": 64, "tile": 16, "num_warps": 4, "num_splits": 8, "fast": True}
    assert tile_sizes(options) == (64, 16)
    assert split_count(options) == 8


def test_without_a_split_option_there_is_one_split() -> None:
    """A kernel without splits would be given cases that count empty ones."""
    assert split_count({"tile": 16}) == 1


def test_a_case_names_its_steps_and_splits() -> None:
    """The minimiser would not move lengths to the boundaries of the case at hand."""
    paged = simplest_case("paged_decode", Supports(block_sizes=(24,)), {"tile": (32,), "kv_splits": (3,)})
    split = simplest_case("split_decode", Supports(), {})
    assert isinstance(paged, PagedDecodeCase)
    assert isinstance(split, SplitDecodeCase)
    assert steps_of(paged) == (24, 32)
    assert num_splits_of(paged) == 3
    assert num_splits_of(msgspec.structs.replace(split, num_splits=5)) == 5


def test_lengths_surround_every_boundary() -> None:
    """Off-by-one errors at the end of a page, tile or split would stay out of reach."""
    lengths = boundary_lengths((16, 24), 4, 100)
    assert {0, 1, 2} <= set(lengths)
    for boundary in (16, 24, 32, 48, 4, 64, 96):
        assert {boundary - 1, boundary, boundary + 1} <= set(lengths)
    assert lengths == tuple(sorted(set(lengths)))
    assert max(lengths) == 100


def test_positions_name_first_and_last_token_of_each_part() -> None:
    """A needle would miss the token that a boundary error drops or doubles."""
    positions = boundary_positions(40, (16,), 3)
    assert {0, 39, 15, 16, 31, 32} <= set(positions)  # sequence, first and last page
    assert {13, 14, 27, 28} <= set(positions)  # splits of ceil(40 / 3) = 14 tokens
    assert all(0 <= position < 40 for position in positions)


def test_an_empty_sequence_has_no_position() -> None:
    """A needle would be put on a token that does not exist."""
    assert boundary_positions(0, (16,), 3) == ()


@pytest.mark.parametrize(
    ("seq_len", "num_splits", "empty"),
    [(5, 4, True), (8, 4, False), (3, 4, True), (0, 2, True), (0, 1, False)],
)
def test_empty_splits_are_those_of_flash_decoding(seq_len: int, num_splits: int, empty: bool) -> None:
    """A finding would be described by a feature that it does not have."""
    assert has_empty_split(seq_len, num_splits) is empty
