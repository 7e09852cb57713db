"""Page maps: each page has one owner, shared pages count once, and padding is what the recipe says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from attnfuzz.problems.block_table import block_table_rows, num_blocks, physical_pages, used_blocks
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.recipes import Pages

SEQ_LENS = [(0,), (1,), (8,), (5, 0, 9), (0, 0, 7), (9, 4, 12, 1), (3, 30)]


def paged(seq_lens: tuple[int, ...], **pages: Any) -> PagedDecodeCase:
    return PagedDecodeCase(
        num_q_heads=1, num_kv_heads=1, head_size=4, seq_lens=seq_lens, scale=1.0, block_size=4, pages=Pages(**pages)
    )


def all_cases() -> list[PagedDecodeCase]:
    orders = ("identity", "reversed", "shuffled")
    choices = itertools.product(SEQ_LENS, orders, (0, 3), (0, 1, 2, 50))
    return [
        paged(seq_lens, order=order, spare_blocks=spare, shared_blocks=shared)
        for seq_lens, order, spare, shared in choices
    ]


def test_pages_are_owned_once_unless_shared() -> None:
    """Two sequences would overwrite each other's tokens, or a shared prefix would not be shared."""
    for case in all_cases():
        pages = physical_pages(case)
        assert [len(row) for row in pages] == [case.blocks_of(i) for i in range(case.num_seqs)]
        shared = min(case.pages.shared_blocks, len(pages[0]))
        for row in pages[1:]:
            common = min(shared, len(row))
            assert row[:common] == pages[0][:common]
        own = [page for i, row in enumerate(pages) for page in (row[min(shared, len(row)) :] if i else row)]
        assert len(set(own)) == len(own) == used_blocks(case)
        assert all(0 <= page < num_blocks(case) for page in own)


def test_orders() -> None:
    """The physical order of pages would not be the one that the case names."""
    assert physical_pages(paged((5, 0, 9))) == ((0, 1), (), (2, 3, 4))
    assert physical_pages(paged((5, 0, 9), order="reversed", spare_blocks=2)) == ((4, 3), (), (2, 1, 0))
    assert physical_pages(paged((5, 0, 9), shared_blocks=1)) == ((0, 1), (), (0, 2, 3))


def test_shuffled_order_is_fixed_forever() -> None:
    """Saved cases would be rebuilt with other page numbers."""
    case = paged((16, 12), order="shuffled", spare_blocks=3, seed=7)
    shuffled = ((9, 3, 8, 0), (4, 7, 2))
    assert physical_pages(case) == shuffled
    assert physical_pages(paged((16, 12), order="shuffled", spare_blocks=3, seed=8)) != shuffled


def test_shuffled_order_mixes_spare_pages_in() -> None:
    """Pages that nobody owns would only ever lie behind the used ones."""
    cases = [paged((16,), order="shuffled", spare_blocks=4, seed=seed) for seed in range(20)]
    assert any(page >= used_blocks(case) for case in cases for page in physical_pages(case)[0])


def test_shared_tokens_end_with_sequence_0() -> None:
    """Tokens past sequence 0's pages would be taken for shared ones."""
    assert paged((5, 30), shared_blocks=1).shared_tokens == 4
    assert paged((5, 30), shared_blocks=9).shared_tokens == 8
    assert paged((0, 30), shared_blocks=9).shared_tokens == 0


def test_cache_has_at_least_one_page() -> None:
    """A batch of empty sequences would get a cache of no elements."""
    assert num_blocks(paged((0, 0))) == 1
    assert num_blocks(paged((0, 0), spare_blocks=3)) == 3


@pytest.mark.parametrize("padding", ["zero", "wrong_page", "garbage"])
def test_rows_are_live_pages_then_padding(padding: str) -> None:
    """Entries past the last page would be undefined, or live ones overwritten."""
    for seq_lens in SEQ_LENS:
        case = paged(seq_lens, padding=padding, extra_columns=5, spare_blocks=2)
        rows = block_table_rows(case)
        assert {len(row) for row in rows} == {case.max_blocks_per_seq}
        for row, live in zip(rows, physical_pages(case), strict=True):
            assert row[: len(live)] == live
            unused = row[len(live) :]
            if padding == "zero":
                assert set(unused) <= {0}
            elif padding == "wrong_page":
                assert all(0 <= page < num_blocks(case) for page in unused)
                assert not set(unused) & set(live), "a page of the sequence itself is not wrong enough"
            else:
                assert set(unused) == {-1, 2**31 - 1, num_blocks(case)}


def test_wrong_page_of_a_sequence_that_owns_the_whole_cache() -> None:
    """Looking for a page that is not there would never end."""
    case = paged((8,), padding="wrong_page", extra_columns=7)
    assert set(block_table_rows(case)[0]) == {0, 1}
