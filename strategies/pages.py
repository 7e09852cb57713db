"""Page sizes, and how the pages of sequences lie in the cache."""

from __future__ import annotations

from hypothesis import strategies as st

from attnfuzz.problems.choices import BLOCK_SIZES, block_size_rank, paddings_of
from attnfuzz.problems.recipes import Padding, PageOrder, Pages
from attnfuzz.problems.supports import Supports, UnusedTableEntries
from attnfuzz.strategies.arguments import check_bounds, check_int, check_one_of, check_sizes
from attnfuzz.strategies.decisions import Decisions, decided

__all__ = ["PAGES_BYTES", "block_sizes", "decide_pages", "page_maps"]

_ORDERS: tuple[PageOrder, ...] = ("identity", "reversed", "shuffled", "shuffled")
_SPARE_BLOCKS = (0, 1, 2, 3, 8)
_EXTRA_COLUMNS = (0, 1, 2, 7)
_SHARED_BLOCKS = (0, 0, 1, 2, 3)
_SEEDS = range(64)
PAGES_BYTES = 7


def block_sizes(
    *, sizes: tuple[int, ...] = BLOCK_SIZES, min_size: int = 1, max_size: int = 256
) -> st.SearchStrategy[int]:
    """Tokens per page: one of ``sizes`` within the bounds. Shrinks to the smallest power of two. Raises ValueError."""
    check_sizes("sizes", sizes, high=1 << 20)
    check_bounds("size", min_size, max_size, low=1, high=1 << 20)
    kept = [size for size in set(sizes) if min_size <= size <= max_size]
    if not kept:
        raise ValueError(
            f"sizes={sizes!r} holds none between min_size={min_size} and max_size={max_size}; widen the bounds"
        )
    return st.sampled_from(sorted(kept, key=block_size_rank))


def decide_pages(
    decisions: Decisions,
    paddings: tuple[Padding, ...],
    *,
    max_shared_blocks: int,
    max_spare_blocks: int = 8,
    max_extra_columns: int = 7,
) -> Pages:
    """One map in four is plain, and so is what the shrinker tries first."""
    if decisions.pick((True, False, False, False)):
        return Pages()
    order = decisions.pick(_ORDERS)
    padding = decisions.pick(paddings)
    return Pages(
        order=order,
        spare_blocks=decisions.pick(_up_to(max_spare_blocks, _SPARE_BLOCKS)),
        extra_columns=decisions.pick(_up_to(max_extra_columns, _EXTRA_COLUMNS)),
        shared_blocks=decisions.pick(_up_to(max_shared_blocks, _SHARED_BLOCKS)),
        padding=padding,
        seed=decisions.pick(_SEEDS) if order == "shuffled" or padding == "wrong_page" else 0,
    )


def page_maps(
    *,
    unused_table_entries: UnusedTableEntries = "valid",
    max_shared_blocks: int = 3,
    max_spare_blocks: int = 8,
    max_extra_columns: int = 7,
) -> st.SearchStrategy[Pages]:
    """Identity, reversed and random page orders, pages shared with sequence 0, wider tables and spare pages.

    ``unused_table_entries``: what the kernel lets them hold (see ``Supports``). Shrinks to ``Pages()``.
    Raises ValueError.
    """
    check_one_of("unused_table_entries", unused_table_entries, ("zero", "valid", "garbage"))
    check_int("max_shared_blocks", max_shared_blocks, low=0, high=1 << 20)
    check_int("max_spare_blocks", max_spare_blocks, low=0, high=1 << 20)
    check_int("max_extra_columns", max_extra_columns, low=0, high=1 << 16)
    paddings = paddings_of(Supports(unused_table_entries=unused_table_entries))
    return decided(
        lambda decisions: decide_pages(
            decisions,
            paddings,
            max_shared_blocks=max_shared_blocks,
            max_spare_blocks=max_spare_blocks,
            max_extra_columns=max_extra_columns,
        ),
        size=PAGES_BYTES,
    )


def _up_to(most: int, choices: tuple[int, ...]) -> list[int]:
    return [choice for choice in choices if choice <= most]
