"""Page sizes, and how the pages of sequences lie in the cache."""

from __future__ import annotations

from hypothesis import strategies as st

from attnfuzz.problems.choices import BLOCK_SIZES, block_size_rank, paddings_of
from attnfuzz.problems.recipes import Padding, Pages
from attnfuzz.problems.supports import Supports, UnusedTableEntries
from attnfuzz.strategies.drawing import check_bounds, check_int, check_one_of, check_sizes, pick

__all__ = ["block_sizes", "draw_pages", "page_maps"]

_ORDERS = ("identity", "reversed", "shuffled", "shuffled")
_SPARE_BLOCKS = (0, 1, 2, 3, 8)
_EXTRA_COLUMNS = (0, 1, 2, 7)
_SHARED_BLOCKS = (0, 0, 1, 2, 3)
_SEEDS = range(64)


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


def draw_pages(
    draw: st.DrawFn,
    paddings: tuple[Padding, ...],
    *,
    max_shared_blocks: int,
    max_spare_blocks: int = 8,
    max_extra_columns: int = 7,
) -> Pages:
    """One map in four is plain, and so is what the shrinker tries first."""
    if pick(draw, (True, False, False, False)):
        return Pages()
    order = pick(draw, _ORDERS)
    padding = pick(draw, paddings)
    return Pages(
        order=order,
        spare_blocks=pick(draw, _up_to(max_spare_blocks, _SPARE_BLOCKS)),
        extra_columns=pick(draw, _up_to(max_extra_columns, _EXTRA_COLUMNS)),
        shared_blocks=pick(draw, _up_to(max_shared_blocks, _SHARED_BLOCKS)),
        padding=padding,
        seed=pick(draw, _SEEDS) if order == "shuffled" or padding == "wrong_page" else 0,
    )


@st.composite
def _page_maps(draw: st.DrawFn, paddings: tuple[Padding, ...], shared: int, spare: int, columns: int) -> Pages:
    return draw_pages(draw, paddings, max_shared_blocks=shared, max_spare_blocks=spare, max_extra_columns=columns)


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
    return _page_maps(paddings, max_shared_blocks, max_spare_blocks, max_extra_columns)


def _up_to(most: int, choices: tuple[int, ...]) -> list[int]:
    return [choice for choice in choices if choice <= most]
