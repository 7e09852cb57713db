"""Pages found through the wrong entry of the block table, by each rule that has been seen to go wrong."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnfuzz.explaining.row import MeasuredRow, Reading
from attnfuzz.problems.block_table import block_table_rows, num_blocks
from attnfuzz.problems.cases import PagedDecodeCase

__all__ = ["RULES", "read_through_table"]

RULES = _NEXT, _BEFORE, _FIRST, _NUMBER, _OTHER_ROW = (
    "a page is read through the next entry of the block table",
    "a page is read through the entry before its own in the block table",
    "every page is read through the first entry of the block table",
    "a page's number in its sequence is taken for a physical page",
    "pages are read through another sequence's row of the block table",
)

_SHOWN = 2


def read_through_table(row: MeasuredRow) -> Reading | None:
    """The rules that give all of the row's weights; None if none does."""
    case = row.case
    if not isinstance(case, PagedDecodeCase) or not row.length:
        return None
    count = -(-row.length // case.block_size)
    own = block_table_rows(case)[row.seq][:count]
    fitting: dict[str, list[int]] = {}
    for words, pages in _rules(case, row.seq, count):
        if pages != list(own) and all(0 <= page < num_blocks(case) for page in pages) and _fits(row, case, pages):
            fitting.setdefault(words, pages)
    if not fitting:
        return None
    return Reading(_where(row, case, own, next(iter(fitting.values()))), tuple(fitting))


def _rules(case: PagedDecodeCase, seq: int, count: int) -> Iterator[tuple[str, list[int]]]:
    """For each rule the first `count` physical pages that it finds."""
    table = block_table_rows(case)
    own = table[seq]
    last = len(own) - 1
    yield _NEXT, [own[min(i + 1, last)] for i in range(count)]
    before = [own[max(i - 1, 0)] for i in range(count)]
    yield _BEFORE, before
    yield _FIRST, [own[0]] * count
    yield _NUMBER, list(range(count))
    for other, row in enumerate(table):
        if other != seq:
            yield _OTHER_ROW, list(row[:count])


def _fits(row: MeasuredRow, case: PagedDecodeCase, pages: list[int]) -> bool:
    steps = (divmod(position, case.block_size) for position in range(row.length))
    read = torch.tensor(
        [row.places.number(pages[page], offset, row.kv_head) for page, offset in steps], dtype=torch.int64, device="cpu"
    )
    return row.fits_lse(read) and row.fits(row.predicted(read, read))


def _where(row: MeasuredRow, case: PagedDecodeCase, own: tuple[int, ...], pages: list[int]) -> str:
    texts = []
    for i, (right, read) in enumerate(zip(own, pages, strict=True)):
        positions = list(range(i * case.block_size, min((i + 1) * case.block_size, row.length)))
        if right != read:
            is_are = "is" if len(positions) == 1 else "are"
            said = f"{row.tokens(positions)} {is_are} read from physical page {read}, where the table says {right}"
            texts.append(said)
    return "; ".join(texts[:_SHOWN]) + ("; ..." if len(texts) > _SHOWN else "")
