"""Weight in places that the row must not read: whose they are, and what they were read in place of."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnfuzz.explaining.row import MeasuredRow, Reading
from attnfuzz.explaining.tables import RULES
from attnfuzz.explaining.words import weight
from attnfuzz.problems.block_table import block_table_rows
from attnfuzz.problems.cases import PagedDecodeCase

__all__ = ["another_page", "read_elsewhere"]

_SHOWN = 3


def read_elsewhere(row: MeasuredRow, gained: list[int], lost: list[int]) -> Reading:
    """A row with weight in places `gained`, none of which it owns, and none at its positions `lost`."""
    for explain in (_another_head, _behind_the_query, _past_the_end, _another_sequence, another_page, _other_slots):
        found = explain(row, gained, lost)
        if found is not None:
            return found
    shown = [f"{row.places.name(place, reader=row.seq)} has weight {weight(row.got[place])}" for place in gained]
    text = f"{', '.join(shown[:_SHOWN])}{', ...' if len(shown) > _SHOWN else ''}, expected 0"
    if lost:
        has = "has" if len(lost) == 1 else "have"
        text += f"; {row.tokens(lost)} {has} weight 0, expected {weight(row.expected[row.own[lost]].sum())}"
    return Reading(text, tuple(_owners_of(row, gained)))


def _owners_of(row: MeasuredRow, gained: list[int]) -> Iterator[str]:
    """What all places have in common."""
    contents = {row.places.contents(*row.places.coordinates(place)[:2]) for place in gained}
    if contents == {"which no sequence owns"}:
        yield "memory is read that no sequence owns"
    elif all(text.startswith("past the end") for text in contents):
        yield "memory past the end of a sequence is read"


def _another_head(row: MeasuredRow, gained: list[int], lost: list[int]) -> Reading | None:
    slots = {row.places.coordinates(int(place))[:2]: t for t, place in enumerate(row.own.tolist())}
    found = [row.places.coordinates(place) for place in gained]
    heads = {head for _, _, head in found}
    if len(heads) != 1 or any((a, b) not in slots for a, b, _ in found):
        return None
    (head,) = heads
    read = torch.tensor(
        [row.places.number(*row.places.coordinates(int(place))[:2], head) for place in row.own],
        dtype=torch.int64,
        device="cpu",
    )
    what = ""
    if not row.fits(row.predicted(read, read)):
        what = "V of " if row.fits(row.predicted(row.own, read)) else ""
    where = "" if len(lost) == row.length - row.first_seen or not lost else f" for {row.tokens(lost)}"
    formulas = _head_formulas(row, head)
    return Reading(
        f"query head {row.head} reads {what}KV head {head}, expected {row.kv_head}{where}",
        (
            *(f"query head h reads {what}KV head {f}, expected h // {row.case.gqa_ratio}" for f in formulas),
            f"{what or 'K and V of '}another KV head are read",
        ),
    )


def _head_formulas(row: MeasuredRow, head: int) -> Iterator[str]:
    case = row.case
    ambiguous = case.gqa_ratio == case.num_kv_heads
    if head == row.head % case.gqa_ratio and case.gqa_ratio > 1:
        yield f"h % {case.gqa_ratio}" + ("" if ambiguous else " (the group size)")
    if head == row.head % case.num_kv_heads and not ambiguous:
        yield f"h % {case.num_kv_heads} (the number of KV heads)"
    if head == row.head:
        yield "h"
    yield str(head)
    for divisor in range(1, 2 * case.gqa_ratio + 2):
        if divisor != case.gqa_ratio and head == min(row.head // divisor, case.num_kv_heads - 1):
            yield f"h // {divisor}"


def _past_the_end(row: MeasuredRow, gained: list[int], lost: list[int]) -> Reading | None:
    if lost or not row.length:
        return None
    length = row.case.seq_lens[row.seq]
    last, first = row.places.slot(row.seq, length - 1)
    found = [row.places.coordinates(place) for place in gained]
    if any(a != last or b <= first or head != row.kv_head for a, b, head in found):
        return None
    offsets = [b for _, b, _ in found]
    positions = [length + offset - first - 1 for offset in offsets]
    total = weight(row.got[gained].sum())
    several = "s" if len(offsets) > 1 else ""
    ends = f"{positions[0]}" if not several else f"{positions[0]}-{positions[-1]}"
    is_paged = isinstance(row.case, PagedDecodeCase)
    where = f" ({row.places.slot_name(last, offsets[0])}{' on' if several else ''})" if is_paged else ""
    return Reading(
        f"slot{several} {ends}{where} past the end of the sequence {'have' if several else 'has'} weight {total}, "
        "expected 0",
        ("slots past the end of a sequence are read",),
    )


def _behind_the_query(row: MeasuredRow, gained: list[int], lost: list[int]) -> Reading | None:
    """Tokens of the same sequence that the query must not see yet."""
    if lost:
        return None
    behind = row.places.own(row.seq, row.kv_head)[row.length :].tolist()
    if not set(gained) <= set(behind):
        return None
    positions = sorted(row.length + behind.index(place) for place in gained)
    total = weight(row.got[gained].sum())
    has, last = ("has" if len(positions) == 1 else "have"), row.tokens([row.length - 1])
    return Reading(
        f"{row.tokens(positions)}, behind the query at {last}, {has} weight {total}, expected 0",
        (
            f"{'the next token' if len(positions) == 1 else f'{len(positions)} tokens'} behind the query "
            f"{'is' if len(positions) == 1 else 'are'} read",
            "tokens behind the query are read",
        ),
    )


def _another_sequence(row: MeasuredRow, gained: list[int], lost: list[int]) -> Reading | None:
    others = [row.places.owners.get(row.places.coordinates(place)[:2], []) for place in gained]
    heads = {row.places.coordinates(place)[2] for place in gained}
    for seq in {seq for owners in others for seq, _ in owners} - {row.seq}:
        positions = [position for owners in others for owner, position in owners if owner == seq]
        if len(positions) == len(gained) and heads == {row.kv_head} and len(lost) == row.length - row.first_seen:
            start = min(positions) if row.first_seen else 0
            if sorted(positions) != list(range(start, start + len(positions))):
                continue
            step = seq - row.seq
            return Reading(
                f"the tokens of sequence {seq} are read, expected those of sequence {row.seq}",
                (
                    f"the tokens of sequence {seq} are read",
                    f"sequence s reads the tokens of sequence s{step:+d}",
                ),
            )
    return None


def another_page(row: MeasuredRow, gained: list[int], lost: list[int]) -> Reading | None:
    """Whole pages, or what of them is live, read from elsewhere at the same offsets; None if that is not what it is."""
    case = row.case
    if not isinstance(case, PagedDecodeCase) or not lost:
        return None
    wanted: dict[int, list[int]] = {}
    for position in lost:
        wanted.setdefault(position // case.block_size, []).append(position % case.block_size)
    found: dict[int, list[int]] = {}
    for place in gained:
        page, offset, head = row.places.coordinates(place)
        if head != row.kv_head:
            return None
        found.setdefault(page, []).append(offset)
    if len(found) > len(wanted) or any(offsets not in wanted.values() for offsets in found.values()):
        return None
    pairs = _paired(wanted, found)
    if pairs is None:
        return None
    table = block_table_rows(case)
    texts, general = [], []
    for page, read in pairs[:_SHOWN]:
        tokens = row.tokens([page * case.block_size + offset for offset in wanted[page]])
        is_are = "are" if len(wanted[page]) > 1 else "is"
        texts.append(f"{tokens} {is_are} read from physical page {read}, where the table says {table[row.seq][page]}")
        general.append(set(_origins(row, table, page, read)))
    common = set.intersection(*general)
    return Reading("; ".join(texts), tuple(origin for origin in _ORIGINS if origin in common))


_ORIGINS = (
    *RULES,
    "a physical page is read that no sequence owns",
    "a page is read that is not the one in the block table",
)


def _origins(row: MeasuredRow, table: tuple[tuple[int, ...], ...], page: int, read: int) -> Iterator[str]:
    own = table[row.seq]
    if page + 1 < len(own) and own[page + 1] == read:
        yield _ORIGINS[0]
    if page and own[page - 1] == read:
        yield _ORIGINS[1]
    if own[0] == read:
        yield _ORIGINS[2]
    if page == read:
        yield _ORIGINS[3]
    if any(read in other for seq, other in enumerate(table) if seq != row.seq):
        yield _ORIGINS[4]
    if not any(slot[0] == read for slot in row.places.owners):
        yield _ORIGINS[5]
    yield _ORIGINS[6]


def _paired(wanted: dict[int, list[int]], found: dict[int, list[int]]) -> list[tuple[int, int]] | None:
    """Which page was read in place of which; one that is found once may stand for several."""
    left = dict(found)
    pairs = []
    for page, offsets in wanted.items():
        fitting = [read for read, its in left.items() if its == offsets]
        fitting = fitting or [read for read, its in found.items() if its == offsets]
        if not fitting:
            return None
        pairs.append((page, fitting[0]))
        left.pop(fitting[0], None)
    return None if left else pairs


def _other_slots(row: MeasuredRow, gained: list[int], lost: list[int]) -> Reading | None:
    """Token by token, in the order of memory."""
    if len(gained) != len(lost):
        return None
    texts = [
        f"{row.tokens([position])} is read from {row.places.name(place, reader=row.seq)}"
        for position, place in zip(lost, gained, strict=True)
    ]
    more = ", ..." if len(texts) > _SHOWN else ""
    return Reading("; ".join(texts[:_SHOWN]) + more, ("tokens are read from places that are not theirs",))
