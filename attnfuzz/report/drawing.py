"""What the picture of a case shows, for whoever draws it: pages, slots, needles, and what fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from attnfuzz.oracles.verdict import Blame
from attnfuzz.problems.block_table import block_table_rows, num_blocks, physical_pages, used_blocks
from attnfuzz.problems.boundaries import num_splits_of
from attnfuzz.problems.cases import (
    AttentionCase,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
)
from attnfuzz.problems.freed import freed_tokens
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.report.headline import count

__all__ = ["MARKS", "Box", "Drawing", "Mark", "Sequence", "State", "draw", "squeeze"]

Mark = Literal["fails", "needle", "token", "dead"]
MARKS: dict[Mark, str] = {
    "fails": "fails",
    "needle": "needle",
    "token": "token",
    "dead": "no token (filled with NaN)",
}
"""What a slot can be, the most important first, and what that means."""

_MAX_PAGES = 12
_MAX_SEQS = 16
_MAX_ENTRIES = 8
_MAX_STATES = 32


@dataclass(frozen=True, slots=True)
class Box:
    """Slots of memory that lie together. ``skipped``: it stands for that many pages that are not shown."""

    title: str
    slots: tuple[Mark, ...] = ()
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence and where its tokens lie."""

    number: int
    length: int
    fails: bool
    boxes: tuple[Box, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """A pair of states to be merged, with the kinds of their LSEs."""

    token: int
    head: int
    prefix: str
    suffix: str
    fails: bool


@dataclass(frozen=True, slots=True)
class Drawing:
    """Either ``sequences`` or ``states``, with what does not belong to any one of them below."""

    sequences: tuple[Sequence, ...] = ()
    states: tuple[State, ...] = ()
    notes: tuple[str, ...] = ()


def draw(case: Case, blame: Blame) -> Drawing:
    """The picture of ``case``. Long cases are cut, but what is to blame is kept."""
    if isinstance(case, OpenCase):
        return Drawing()
    if isinstance(case, MergeStatesCase):
        return _merge(case, blame)
    blamed = [i for i in sorted(blame.seqs) if _MAX_SEQS <= i < case.num_seqs]
    shown = [*range(min(_MAX_SEQS, case.num_seqs)), *blamed[:_MAX_SEQS]]
    left_out = case.num_seqs - len(shown)
    notes = [f"... and {count(left_out, 'more sequence')}"] if left_out else []
    notes += _spare_pages(case) if isinstance(case, PagedDecodeCase) else []
    freed = freed_tokens(case)
    return Drawing(sequences=tuple(_sequence(case, seq, blame, freed[seq]) for seq in shown), notes=tuple(notes))


def squeeze(slots: tuple[Mark, ...], *, cells: int) -> list[Mark]:
    """At most ``cells`` marks, each then the most important of several slots."""
    order = list(MARKS)
    per_cell = max(1, -(-len(slots) // cells))
    return [min(slots[start : start + per_cell], key=order.index) for start in range(0, len(slots), per_cell)]


def _sequence(case: AttentionCase, seq: int, blame: Blame, freed: int) -> Sequence:
    length = case.seq_lens[seq]
    notes = tuple(_notes(case, seq, freed))
    marked: dict[int, Mark] = {needle.position: "needle" for needle in case.values.needles if needle.seq == seq}
    marked |= dict.fromkeys((position for number, position in blame.tokens if number == seq), "fails")
    if isinstance(case, PagedDecodeCase):
        return Sequence(seq, length, seq in blame.seqs, tuple(_pages(case, seq, marked, freed)), notes)
    positions = range(case.max_seq_len if isinstance(case, DenseDecodeCase) else length)
    slots = _slots(positions, range(freed, length), marked)
    title = f"rows 0-{len(slots) - 1}" if len(slots) > 1 else "row 0"
    return Sequence(seq, length, seq in blame.seqs, (Box(title, slots),), notes)


def _slots(positions: range, live: range, marked: Mapping[int, Mark]) -> tuple[Mark, ...]:
    def mark(position: int) -> Mark:
        found = marked.get(position, "token")
        return found if found == "fails" or position in live else "dead"

    return tuple(mark(position) for position in positions)


def _pages(case: PagedDecodeCase, seq: int, marked: Mapping[int, Mark], freed: int) -> Iterator[Box]:
    """Those near an end, and those in between with a needle or what fails."""
    pages, size = physical_pages(case)[seq], case.block_size
    live = range(freed, case.seq_lens[seq])
    between = range(_MAX_PAGES - 2, len(pages) - 2)
    telling = {position // size for position, mark in marked.items() if mark == "fails" or position in live}
    ends = {*range(min(_MAX_PAGES - 2, len(pages))), *range(max(0, len(pages) - 2), len(pages))}
    shared = _shared_pages(case, seq)
    following = 0
    for i in sorted(ends | {page for page in telling if page in between}):
        if i > following:
            yield Box("...", skipped=i - following)
        following = i + 1
        slots = _slots(range(i * size, following * size), live, marked)
        yield Box(f"page {pages[i]}" + (" shared" if i < shared else ""), slots)


def _shared_pages(case: PagedDecodeCase, seq: int) -> int:
    """How many of a sequence's first pages are another one's too: all that share have sequence 0's."""
    others = max(map(case.blocks_of, range(1, case.num_seqs)), default=0) if seq == 0 else case.blocks_of(0)
    return min(case.pages.shared_blocks, others)


def _notes(case: AttentionCase, seq: int, freed: int) -> Iterator[str]:
    if isinstance(case, PagedAttentionCase):
        yield _queries(case, seq)
    if freed:
        yield f"behind the window, in pages that were freed: {count(freed, 'token')}"
    if isinstance(case, PagedDecodeCase):
        unused = block_table_rows(case)[seq][case.blocks_of(seq) :]
        if unused:
            yield f"unused block-table entries: {_listed(unused)}"
    if (num_splits := num_splits_of(case)) > 1:
        yield f"in {count(num_splits, 'split')}, if even: {_splits(case.seq_lens[seq], num_splits)}"


def _queries(case: PagedAttentionCase, seq: int) -> str:
    """Which of the tokens are the queries, and where those are in q."""
    rows, length = case.rows_of(seq), case.seq_lens[seq]
    if not rows:
        return "no query token"
    if len(rows) == 1:
        return f"query: token {length - 1} (q[{rows.start}])"
    return f"queries: tokens {length - len(rows)}-{length - 1} (q[{rows.start}:{rows.stop}])"


def _splits(length: int, num_splits: int) -> str:
    """Token ranges of equal splits, which is how the bundled kernels cut: "0-5 | 6-11 | empty"."""
    size = -(-length // num_splits)
    starts = [split * size for split in range(min(num_splits, _MAX_ENTRIES))]
    ranges = [f"{start}-{min(start + size, length) - 1}" if start < length else "empty" for start in starts]
    return " | ".join(ranges) + (" | ..." if num_splits > _MAX_ENTRIES else "")


def _spare_pages(case: PagedDecodeCase) -> list[str]:
    if used_blocks(case) == num_blocks(case):
        return []
    used = {page for row in physical_pages(case) for page in row}
    spare = tuple(page for page in range(num_blocks(case)) if page not in used)
    if not spare:
        return []
    return [f"of {count(num_blocks(case), 'page')} in the cache, no sequence owns: {_listed(spare)}"]


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:_MAX_ENTRIES])) + (", ..." if len(numbers) > _MAX_ENTRIES else "")


def _merge(case: MergeStatesCase, blame: Blame) -> Drawing:
    heads = case.num_q_heads
    num_pairs = case.num_tokens * heads
    first = [divmod(i, heads) for i in range(min(_MAX_STATES, num_pairs))]
    there = [(token, head) for token, head in sorted(blame.rows) if token < case.num_tokens and head < heads]
    shown = [*first, *[pair for pair in there if pair not in first][:_MAX_STATES]]
    states = []
    for token, head in shown:
        prefix, suffix = case.lse_pairs[(token * case.num_q_heads + head) % len(case.lse_pairs)]
        states.append(State(token, head, prefix, suffix, (token, head) in blame.rows))
    left_out = num_pairs - len(shown)
    return Drawing(states=tuple(states), notes=(f"... and {count(left_out, 'more pair')}",) if left_out else ())
