"""The rows of an explanation's picture: boxes of weights where pages lie together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from attnfuzz.explaining.explanation import WeightBox, WeightedRow
from attnfuzz.explaining.measured_row import clearly_wrong
from attnfuzz.explaining.places import SIDES, Places
from attnfuzz.explaining.row import Query
from attnfuzz.explaining.weights import Weights
from attnfuzz.explaining.words import row_name
from attnfuzz.problems.block_table import physical_pages
from attnfuzz.problems.cases import AttentionCase, Case, MergeStatesCase, PagedDecodeCase
from attnfuzz.verdict import MOST_PLACES, Blame

_MOST_ROWS = 3
_MOST_BOXES = 12
_MOST_SLOTS = 64


def rows_to_draw(case: Case, places: Places, weights: Weights, wrong: list[int]) -> list[WeightedRow]:
    """The first wrong rows, or the first row if none is."""
    rows = []
    for row in wrong[:_MOST_ROWS] or [0]:
        drawn = _Row(case, places, weights, row, to_blame(case, places, weights, row))
        rows.append(WeightedRow(title=row_name(case, row), wrong=row in wrong, boxes=tuple(_boxes(drawn))))
    return rows


def tokens_to_blame(case: Case, places: Places, weights: Weights, wrong: list[int]) -> Blame:
    """The first wrong rows, and the tokens of their own sequences that they weigh wrong."""
    rows = [divmod(row, case.num_q_heads) for row in wrong[:_MOST_ROWS]]
    if not isinstance(case, AttentionCase):
        return Blame(rows=tuple(rows))
    tokens = []
    for query in [Query.numbered(case, row) for row in wrong[:_MOST_ROWS]]:
        blamed = to_blame(case, places, weights, query.number)[places.of_query(query)]
        tokens += [(query.seq, position) for position in blamed.nonzero()[:, 0].tolist()]
    seqs = tuple(dict.fromkeys(case.row_seqs[number] for number, _ in rows))
    return Blame(tokens=tuple(dict.fromkeys(tokens))[:MOST_PLACES], seqs=seqs, rows=tuple(rows))


def to_blame(case: Case, places: Places, weights: Weights, row: int) -> Bool[Tensor, " places"]:
    """Weights that are wrong by themselves, where that can be told from those that are the others' complement."""
    wrong = weights.wrong[row]
    if isinstance(case, AttentionCase):
        query = Query.numbered(case, row)
        found = clearly_wrong(query, places, weights)
        if found.lost or found.gained:
            clear = [*places.of_query(query)[found.lost].tolist(), *found.gained]
            return torch.zeros_like(wrong).index_fill(0, torch.tensor(clear, dtype=torch.int64, device="cpu"), True)
    return wrong


@dataclass(frozen=True, slots=True)
class _Row:
    """One row, and which of its weights are to blame."""

    case: Case
    places: Places
    weights: Weights
    number: int
    wrong: Bool[Tensor, " places"]

    def box(self, title: str, chosen: Sequence[int], unit: str = "", numbers: Sequence[int] = (0,)) -> WeightBox:
        """The weights of `chosen` places, at `numbers`."""
        chosen = chosen[:_MOST_SLOTS]
        got = [float(self.weights.got[self.number, place]) for place in chosen]
        return WeightBox(
            title=title,
            unit=unit,
            numbers=tuple(numbers[:_MOST_SLOTS]),
            got=tuple(value if math.isfinite(value) else None for value in got),
            expected=tuple(float(self.weights.expected[self.number, place]) for place in chosen),
            wrong=tuple(bool(self.wrong[place]) for place in chosen),
        )


def _boxes(row: _Row) -> Iterator[WeightBox]:
    case, places = row.case, row.places
    if not isinstance(case, AttentionCase):
        own = [places.number(side, *divmod(row.number, case.num_q_heads)) for side in range(2)]
        for side, place in zip(SIDES, own, strict=True):
            yield row.box(side, [place])
        yield from _others(row, set(own))
        return
    query = Query.numbered(case, row.number)
    drawn: set[int] = set()
    boxes = []
    for title, slots in _pages(case, query.seq):
        own = [places.number(*slot, query.kv_head) for slot in slots]
        drawn.update(own)
        boxes.append(row.box(title, own, _unit(case), [b for _, b in slots]))
    yield from _with_gaps(boxes)
    yield from _others(row, drawn)


def _pages(case: AttentionCase, seq: int) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """The pages of a sequence with all their slots, or its rows in parts."""
    if isinstance(case, PagedDecodeCase):
        for i, page in enumerate(physical_pages(case)[seq]):
            yield f"page {i} (physical {page})", [(page, offset) for offset in range(case.block_size)]
        return
    for start in range(0, case.seq_lens[seq], _MOST_SLOTS):
        end = min(start + _MOST_SLOTS, case.seq_lens[seq])
        title = f"rows {start}-{end - 1}" if end - start > 1 else f"row {start}"
        yield title, [(seq, position) for position in range(start, end)]


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


def _others(row: _Row, drawn: set[int]) -> Iterator[WeightBox]:
    """Places that are not its own and have weight."""
    places = row.places
    by_box: dict[str, list[int]] = {}
    for place in row.wrong.nonzero()[:, 0].tolist():
        if place not in drawn:
            by_box.setdefault(_title(places, *places.coordinates(place)), []).append(place)
    for title, chosen in list(by_box.items())[:_MOST_BOXES]:
        yield row.box(title, chosen, _unit(row.case), [places.coordinates(place)[1] for place in chosen])


def _title(places: Places, a: int, b: int, c: int) -> str:
    if isinstance(places.case, MergeStatesCase):
        return f"{SIDES[a]} of token {b}, head {c}"
    head = f", KV head {c}" if places.shape[2] > 1 else ""
    where = f"physical {a}" if places.case.page_size else f"sequence {a}"
    return f"also read: {where}{head}"


def _unit(case: Case) -> str:
    if isinstance(case, MergeStatesCase):
        return ""
    return "offset" if case.page_size else "row"
