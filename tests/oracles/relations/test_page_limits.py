"""Where page ids and offsets run out of bits."""

from __future__ import annotations

import msgspec
import pytest

from attnfuzz.oracles.relations.page_relocation import (
    far_pages,
    far_table,
    limits_of,
    page_strides,
    pages_to_same_alignment,
)
from attnfuzz.problems.block_table import num_blocks
from attnfuzz.problems.cases import MaskedAttentionCase, PagedDecodeCase

CASE = PagedDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(5, 3), scale=0.25, block_size=4)


def changed(**fields: object) -> PagedDecodeCase:
    return msgspec.structs.replace(CASE, **fields)


def test_limits_are_told_by_the_page_that_reaches_them() -> None:
    """A message would name a limit that has nothing to do with where it goes wrong."""
    assert page_strides(CASE) == {"k_cache": 64, "v_cache": 64}
    assert {limit.page: limit.words for limit in limits_of(CASE)} == {
        1 << 15: "2^15 page ids",
        1 << 16: "2^16 page ids",
        1 << 24: "2^31 bytes",
        1 << 25: "2^31 elements and 2^32 bytes",
        1 << 26: "2^32 elements",
    }
    (_, _, _, both, _) = limits_of(CASE)
    assert both.units == {"elements", "bytes"}


def test_caches_of_different_strides_have_limits_of_their_own() -> None:
    """What is true of K would be said of V."""
    words = [limit.words for limit in limits_of(changed(strides={"k_cache": "padded_rows"}))]
    assert "2^31 elements of k_cache and 2^32 bytes of k_cache" in words
    assert "2^31 elements of v_cache and 2^32 bytes of v_cache" in words


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        changed(head_size=13, block_size=7),
        changed(dtype="float32", strides={"v_cache": "padded_rows"}),
        changed(layout="packed", dtype="bfloat16"),
        changed(layout="interleaved", num_kv_heads=1, head_size=80),
        changed(block_size=256, head_size=256, num_kv_heads=1),
    ],
)
def test_pages_are_far_enough_and_aligned_as_before(case: PagedDecodeCase) -> None:
    """A right kernel would round differently on other alignments, a wrong one would not be reached."""
    strides, step = page_strides(case), pages_to_same_alignment(case)
    beyond, past_half = far_pages(case)
    for stride in strides.values():
        assert beyond * stride >= 1 << 32
        assert past_half * stride >= 1 << 31
    assert min(past_half * stride - (1 << 31) for stride in strides.values()) <= step * max(strides.values())
    assert beyond >= 1 << 16
    assert beyond % step == past_half % step == 0
    assert beyond + num_blocks(case) < 1 << 31
    assert beyond * max(strides.values()) % (1 << 32) < 1 << 31  # what wraps does not come out below


def test_ids_that_do_not_fit_are_left_out() -> None:
    """The block table could not name such a page."""
    assert far_pages(changed(head_size=1, block_size=1)) == []
    assert len(far_pages(changed(head_size=2, block_size=1))) == 1


@pytest.mark.parametrize(
    ("query_lens", "table"),
    [((1, 2, 0), (1, 5, 11)), ((1, 0, 0), (0, 0, 5)), ((2, 1, 1), None), ((0, 0, 1), None)],
)
def test_the_last_table_that_has_entries_reaches_beyond(
    query_lens: tuple[int, ...], table: tuple[int, int, int] | None
) -> None:
    """A later one would begin past 2^31, which `mask_indptr` cannot say; and a single entry cannot be beyond."""
    case = MaskedAttentionCase(
        num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(5, 3, 1), query_lens=query_lens, scale=0.25, block_size=4
    )
    assert far_table(case) == table
    assert far_table(CASE) is None
