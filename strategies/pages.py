"""Page sizes, and how the pages of sequences lie in the cache."""

from __future__ import annotations

from attnfuzz.problems.recipes import Padding, PageOrder, Pages
from attnfuzz.strategies.decisions import Decisions

_ORDERS: tuple[PageOrder, ...] = ("identity", "reversed", "shuffled", "shuffled")
_SPARE_BLOCKS = (0, 1, 2, 3, 8)
_EXTRA_COLUMNS = (0, 1, 2, 7)
_SHARED_BLOCKS = (0, 0, 1, 2, 3)
_SEEDS = range(64)
PAGES_BYTES = 7


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


def _up_to(most: int, choices: tuple[int, ...]) -> list[int]:
    return [choice for choice in choices if choice <= most]
