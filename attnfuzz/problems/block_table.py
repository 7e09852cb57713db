"""Which physical page holds which tokens, and what the block table says: plain integers. Torch-free.

Everything here depends only on sequence lengths, block size and the ``Pages`` recipe, and is the same on every machine.

What a window has passed is never seen again, so vLLM and SGLang give its pages back while the sequence still runs. The
table still names pages that exist, and what they hold is another's, or NaN that an earlier one left. Only whole pages
are freed: the tokens before the window in the page that it begins in stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

import msgspec

from attnfuzz.problems.attention import AttentionCase, PagedDecodeCase
from attnfuzz.problems.hashing import fold, stream_key
from attnfuzz.problems.recipes import Pages

_SHUFFLE, _WRONG_PAGE = 1, 2  # hash streams of a page recipe's seed
_INT32_MAX = (1 << 31) - 1

Rows = tuple[tuple[int, ...], ...]


def physical_pages(case: PagedDecodeCase) -> Rows:
    """Per sequence, the physical page of each of its logical pages (the live part of its block-table row)."""
    return _physical_pages(case.seq_lens, case.block_size, case.pages)


def block_table_rows(case: PagedDecodeCase) -> Rows:
    """``num_seqs`` rows of ``max_blocks_per_seq`` entries: live pages, then the padding recipe."""
    return _block_table_rows(case.seq_lens, case.block_size, case.pages, case.max_blocks_per_seq)


def used_blocks(case: PagedDecodeCase) -> int:
    """Pages that some sequence owns; a shared page counts once."""
    return _used_blocks(case.seq_lens, case.block_size, case.pages.shared_blocks)


def num_blocks(case: PagedDecodeCase) -> int:
    """Pages of the cache: used and spare ones, at least 1."""
    return _num_blocks(used_blocks(case), case.pages)


def _num_blocks(used: int, pages: Pages) -> int:
    return max(1, used + pages.spare_blocks, 1 + max(pages.taken, default=0))


def _used_blocks(seq_lens: tuple[int, ...], block_size: int, shared_blocks: int) -> int:
    owned = [-(-seq_len // block_size) for seq_len in seq_lens]
    shareable = min(shared_blocks, owned[0])
    return sum(owned) - sum(min(shareable, blocks) for blocks in owned[1:])


@lru_cache(maxsize=16)
def _physical_pages(seq_lens: tuple[int, ...], block_size: int, pages: Pages) -> Rows:
    order = iter(_page_order(_used_blocks(seq_lens, block_size, pages.shared_blocks), pages))
    first: tuple[int, ...] = ()
    rows: list[tuple[int, ...]] = []
    for i, seq_len in enumerate(seq_lens):
        owned = -(-seq_len // block_size)
        shared = first[: min(pages.shared_blocks, owned)] if i else ()
        rows.append((*shared, *(next(order) for _ in range(owned - len(shared)))))
        first = first or rows[0]
    return tuple(rows)


def _page_order(used: int, pages: Pages) -> list[int]:
    """Physical pages in the order in which sequences take them; spare pages come last or are never taken."""
    if pages.taken:
        others = _page_order(_num_blocks(used, pages), msgspec.structs.replace(pages, taken=(), spare_blocks=0))
        return list(dict.fromkeys((*pages.taken, *others)))
    if pages.order == "identity":
        return list(range(used))
    if pages.order == "reversed":
        return list(range(used - 1, -1, -1))
    key = stream_key(pages.seed, _SHUFFLE)
    return sorted(range(used + pages.spare_blocks), key=partial(fold, key))  # no ties: fold is a bijection


@lru_cache(maxsize=16)
def _block_table_rows(seq_lens: tuple[int, ...], block_size: int, pages: Pages, columns: int) -> Rows:
    live = _physical_pages(seq_lens, block_size, pages)
    total = _num_blocks(_used_blocks(seq_lens, block_size, pages.shared_blocks), pages)
    return tuple((*row, *_padding(i, row, columns - len(row), total, pages)) for i, row in enumerate(live))


def _padding(seq: int, owned: tuple[int, ...], count: int, total: int, pages: Pages) -> Iterator[int] | list[int]:
    if pages.padding == "zero":
        return [0] * count
    if pages.padding == "garbage":
        garbage = (-1, _INT32_MAX, total)
        return [garbage[(seq + i) % 3] for i in range(count)]
    return _wrong_pages(fold(stream_key(pages.seed, _WRONG_PAGE), seq) % total, set(owned), count, total)


def _wrong_pages(start: int, owned: set[int], count: int, total: int) -> Iterator[int]:
    """Existing pages that this sequence does not own, in turn from ``start``; any page if it owns all of them."""
    avoid = owned if len(owned) < total else set()
    page = start
    for _ in range(count):
        while page in avoid:
            page = (page + 1) % total
        yield page
        page = (page + 1) % total


def freed_tokens(case: AttentionCase) -> tuple[int, ...]:
    """How many of each sequence's first tokens lie in pages that were freed: dead memory to it.

    A page is freed once it lies before the windows of all query tokens of this call.
    """
    window = case.variant.window
    if window is None or not case.variant.freed_pages or not case.page_size:
        return (0,) * case.num_seqs
    found = []
    for seq_len, query_len in zip(case.seq_lens, case.query_counts, strict=True):
        seen = seq_len - max(0, query_len - 1)  # by the first of its query tokens
        found.append(max(0, seen - window) // case.page_size * case.page_size)
    return tuple(found)
