"""A case as a picture for the terminal: sequences, pages, needles, empty sequences, and what fails."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnfuzz.problems.block_table import block_table_rows, num_blocks, physical_pages
from attnfuzz.problems.cases import (
    AttentionCase,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedDecodeCase,
    SplitDecodeCase,
)
from attnfuzz.report.boxes import MARKS, Box, BoxRow, Mark, cells
from attnfuzz.report.fields import field_table

__all__ = ["Blame", "picture"]

_CELLS_PER_PAGE = 16
_CELLS_PER_ROW = 64
_MAX_PAGES = 12
_MAX_SEQS = 16
_MAX_ENTRIES = 8
_MAX_STATES = 32

_TOKEN = r"\btoken (\d+)(?: \([^()]*\))? of sequence (\d+)"


@dataclass(frozen=True, slots=True)
class Blame:
    """What a failure's lines point to: ``tokens`` are (sequence, position), ``rows`` sequences, ``states`` of a merge
    (token, head)."""

    tokens: frozenset[tuple[int, int]] = frozenset()
    rows: frozenset[int] = frozenset()
    states: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def of(cls, lines: Iterable[str]) -> Blame:
        """Read "token 16 (page 1, offset 0) of sequence 0", "sequence 0" and "out[seq 0, ..." in a finding's lines."""
        text = "\n".join(lines)
        tokens = [(int(seq), int(token)) for token, seq in re.findall(_TOKEN, text)]
        rows = [int(seq) for seq in re.findall(r"(?:\bsequence |\[seq )(\d+)", text)]
        states = [(int(token), int(head)) for token, head in re.findall(r"\[token (\d+), head (\d+)", text)]
        return cls(frozenset(tokens), frozenset(rows), frozenset(states))


def picture(case: Case, *, lines: Iterable[str] = ()) -> RenderableType:
    """Draw ``case``; ``lines`` are a finding's message and details, whose tokens and sequences are marked."""
    lines = tuple(lines)
    blame = Blame.of(lines)
    body = _states(case, blame) if isinstance(case, MergeStatesCase) else _sequences(case, blame)
    finding = [Text(line, "red" if i == 0 else "") for i, line in enumerate(lines)]
    return Group(_headline(case), "", *body, "", field_table(case), *([""] if finding else []), *finding)


def _headline(case: Case) -> Text:
    parts = [case.problem, case.dtype, f"head_size {case.head_size}"]
    if isinstance(case, MergeStatesCase):
        parts += [_count(case.num_tokens, "token"), _count(case.num_q_heads, "query head")]
    else:
        parts += [f"{_count(case.num_q_heads, 'query head')} on {_count(case.num_kv_heads, 'KV head')}"]
    if isinstance(case, PagedDecodeCase):
        parts += [f"{case.layout}, pages of {_count(case.block_size, 'token')}"]
    return Text(" · ".join(parts), "bold")


def _sequences(case: AttentionCase, blame: Blame) -> Iterator[RenderableType]:
    yield _legend()
    shown = [i for i in range(case.num_seqs) if i < _MAX_SEQS or i in blame.rows]
    for seq in shown:
        yield _sequence(case, seq, blame)
    if len(shown) < case.num_seqs:
        yield Text(f"... and {_count(case.num_seqs - len(shown), 'more sequence')}", "dim")
    if isinstance(case, PagedDecodeCase):
        yield from _spare_pages(case)


def _legend() -> Text:
    meaning = {"fails": "fails", "needle": "needle", "token": "token", "dead": "dead memory (poisoned)"}
    pairs = (((symbol, style), f" {meaning[mark]}   ") for mark, (symbol, style) in MARKS.items())
    return Text.assemble(*(part for pair in pairs for part in pair))


def _sequence(case: AttentionCase, seq: int, blame: Blame) -> BoxRow:
    length = case.seq_lens[seq]
    title = f"seq {seq}" + (" ✗" if seq in blame.rows else "")
    labels = (title, _count(length, "token") if length else "empty")
    if isinstance(case, PagedDecodeCase):
        return BoxRow(labels, tuple(_pages(case, seq, blame)), tuple(_paged_notes(case, seq)))
    slots = _slots(case, seq, range(case.max_seq_len if isinstance(case, DenseDecodeCase) else length), blame)
    title = f"rows 0-{len(slots) - 1}" if len(slots) > 1 else "row 0"
    return BoxRow(labels, (Box(title, cells(slots, width=_CELLS_PER_ROW)),))


def _slots(case: AttentionCase, seq: int, positions: range, blame: Blame) -> list[Mark]:
    needles = {needle.position for needle in case.values.needles if needle.seq == seq}
    failing = {position for row, position in blame.tokens if row == seq}

    def mark(position: int) -> Mark:
        if position in failing:
            return "fails"
        if position >= case.seq_lens[seq]:
            return "dead"
        return "needle" if position in needles else "token"

    return [mark(position) for position in positions]


def _pages(case: PagedDecodeCase, seq: int, blame: Blame) -> Iterator[Box]:
    rows = physical_pages(case)
    others = {page for i, row in enumerate(rows) if i != seq for page in row}
    skipped = 0
    for i, page in enumerate(rows[seq]):
        slots = _slots(case, seq, range(i * case.block_size, (i + 1) * case.block_size), blame)
        near_an_end = i < _MAX_PAGES - 2 or i >= len(rows[seq]) - 2
        if not near_an_end and not {"fails", "needle"} & set(slots):
            skipped += 1
            continue
        if skipped:
            yield Box("...", Text(_count(skipped, "page"), "dim"), "dim")
            skipped = 0
        title = f"page {page}" + (" shared" if page in others else "")
        yield Box(title, cells(slots, width=_CELLS_PER_PAGE), "red" if "fails" in slots else "")


def _paged_notes(case: PagedDecodeCase, seq: int) -> Iterator[Text]:
    unused = block_table_rows(case)[seq][case.blocks_of(seq) :]
    if unused:
        more = ", ..." if len(unused) > _MAX_ENTRIES else ""
        listed = ", ".join(str(entry) for entry in unused[:_MAX_ENTRIES])
        yield Text(f"unused block-table entries: {listed}{more}", "dim")
    num_splits = case.num_splits if isinstance(case, SplitDecodeCase) else case.options.get("num_splits")
    if isinstance(num_splits, int) and num_splits > 0:
        yield Text(f"in {_count(num_splits, 'split')}, if even: {_splits(case.seq_lens[seq], num_splits)}", "dim")


def _splits(length: int, num_splits: int) -> str:
    """Token ranges of equal splits, which is how the bundled kernels cut: "0-5 | 6-11 | empty"."""
    size = -(-length // num_splits)
    starts = [split * size for split in range(min(num_splits, _MAX_ENTRIES))]
    ranges = [f"{start}-{min(start + size, length) - 1}" if start < length else "empty" for start in starts]
    return " | ".join(ranges) + (" | ..." if num_splits > _MAX_ENTRIES else "")


def _spare_pages(case: PagedDecodeCase) -> Iterator[Text]:
    used = {page for row in physical_pages(case) for page in row}
    spare = [page for page in range(num_blocks(case)) if page not in used]
    if spare:
        more = ", ..." if len(spare) > _MAX_ENTRIES else ""
        listed = ", ".join(map(str, spare[:_MAX_ENTRIES]))
        yield Text(f"of {_count(num_blocks(case), 'page')} in the cache, no sequence owns: {listed}{more}", "dim")


def _states(case: MergeStatesCase, blame: Blame) -> Iterator[RenderableType]:
    table = Table("token", "query head", "prefix LSE", "suffix LSE", "", box=None, pad_edge=False, header_style="bold")
    pairs = [divmod(i, case.num_q_heads) for i in range(case.num_tokens * case.num_q_heads)]
    shown = [pair for i, pair in enumerate(pairs) if i < _MAX_STATES or pair in blame.states]
    for token, head in shown:
        prefix, suffix = case.lse_pairs[(token * case.num_q_heads + head) % len(case.lse_pairs)]
        fails = Text("✗ fails", "bold red") if (token, head) in blame.states else ""
        table.add_row(str(token), str(head), _lse(prefix), _lse(suffix), fails)
    yield table
    if len(shown) < len(pairs):
        yield Text(f"... and {_count(len(pairs) - len(shown), 'more pair')}", "dim")


def _lse(kind: str) -> Text:
    return Text(f"{kind} (empty)", "yellow") if kind.endswith("inf") else Text(kind)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
