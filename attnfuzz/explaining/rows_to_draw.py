"""The rows of an explanation's picture: boxes of weights where pages lie together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from attnfuzz.explaining.explanation import WeightBox, WeightedRow
from attnfuzz.explaining.places import SIDES, Places
from attnfuzz.explaining.weights import Weights
from attnfuzz.explaining.words import row_name
from attnfuzz.problems.block_table import physical_pages
from attnfuzz.problems.cases import AttentionCase, Case, MergeStatesCase, PagedDecodeCase

__all__ = ["rows_to_draw"]

_MOST_ROWS = 4
_MOST_BOXES = 12
_MOST_SLOTS = 64


def rows_to_draw(case: Case, places: Places, weights: Weights, wrong: list[int]) -> list[WeightedRow]:
    """The first wrong rows, or the first row if none is."""
    chosen = wrong[:_MOST_ROWS] or [0]
    return [
        WeightedRow(title=row_name(case, row), wrong=row in wrong, boxes=tuple(_boxes(case, places, weights, row)))
        for row in chosen
    ]


def _boxes(case: Case, places: Places, weights: Weights, row: int) -> Iterator[WeightBox]:
    if isinstance(case, MergeStatesCase):
        own = [places.number(side, *divmod(row, case.num_q_heads)) for side in range(2)]
        for side, place in zip(SIDES, own, strict=True):
            yield _box(weights, row, side, [place], "", [0])
        yield from _others(places, weights, row, set(own))
        return
    seq, head = divmod(row, case.num_q_heads)
    kv_head = head // case.gqa_ratio
    drawn: set[int] = set()
    boxes = []
    for title, slots in _pages(case, seq):
        own = [places.number(*slot, kv_head) for slot in slots]
        drawn.update(own)
        boxes.append(_box(weights, row, title, own, _unit(case), [b for _, b in slots]))
    yield from _with_gaps(boxes)
    yield from _others(places, weights, row, drawn)


def _pages(case: AttentionCase, seq: int) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """The pages of a sequence with all their slots, or its rows in parts."""
    if isinstance(case, PagedDecodeCase):
        for i, page in enumerate(physical_pages(case)[seq]):
            yield f"page {i} (physical {page})", [(page, offset) for offset in range(case.block_size)]
        return
    for start in range(0, case.seq_lens[seq], _MOST_SLOTS):
        end = min(start + _MOST_SLOTS, case.seq_lens[seq])
        yield (
            f"rows {start}-{end - 1}" if end - start > 1 else f"row {start}",
            [(seq, position) for position in range(start, end)],
        )


def _with_gaps(boxes: list[WeightBox]) -> Iterator[WeightBox]:
    """Boxes with anything wrong, and those near an end."""
    skipped = 0
    for i, box in enumerate(boxes):
        if len(boxes) > _MOST_BOXES and not any(box.wrong) and 2 <= i < len(boxes) - 2:
            skipped += 1
            continue
        if skipped:
            yield WeightBox(title="...", skipped=skipped)
            skipped = 0
        yield box


def _others(places: Places, weights: Weights, row: int, drawn: set[int]) -> Iterator[WeightBox]:
    """Places that are not its own and have weight."""
    found = [place for place in weights.wrong[row].nonzero()[:, 0].tolist() if place not in drawn]
    by_box: dict[str, list[int]] = {}
    for place in found:
        a, b, c = places.coordinates(place)
        by_box.setdefault(_title(places, a, b, c), []).append(place)
    for title, chosen in list(by_box.items())[:_MOST_BOXES]:
        numbers = [places.coordinates(place)[1] for place in chosen]
        unit = "" if isinstance(places.case, MergeStatesCase) else _unit(places.case)
        yield _box(weights, row, title, chosen, unit, numbers)


def _title(places: Places, a: int, b: int, c: int) -> str:
    if isinstance(places.case, MergeStatesCase):
        return f"{SIDES[a]} of token {b}, head {c}"
    head = f", KV head {c}" if places.shape[2] > 1 else ""
    where = f"physical {a}" if isinstance(places.case, PagedDecodeCase) else f"sequence {a}"
    return f"also read: {where}{head}"


def _unit(case: Case) -> str:
    return "offset" if isinstance(case, PagedDecodeCase) else "row"


def _box(weights: Weights, row: int, title: str, chosen: Sequence[int], unit: str, numbers: Sequence[int]) -> WeightBox:
    chosen = chosen[:_MOST_SLOTS]
    got = [float(weights.got[row, place]) for place in chosen]
    return WeightBox(
        title=title,
        unit=unit,
        numbers=tuple(numbers[:_MOST_SLOTS]),
        got=tuple(value if math.isfinite(value) else None for value in got),
        expected=tuple(float(weights.expected[row, place]) for place in chosen),
        wrong=tuple(bool(weights.wrong[row, place]) for place in chosen),
    )
