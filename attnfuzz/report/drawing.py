"""A case as a picture: sequences, pages, slots, needles and what fails, in characters for a terminal or as SVG.

`draw` decides what is shown; `picture` and `case_svg` show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from operator import attrgetter
from typing import Any, Literal

import msgspec
from markupsafe import Markup
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnfuzz.cases.facets.facet import listed
from attnfuzz.corpus import FindingRecord
from attnfuzz.problems.block_table import block_table_rows, freed_tokens, num_blocks, physical_pages, used_blocks
from attnfuzz.problems.boundaries import num_splits_of
from attnfuzz.problems.cases import (
    AttentionCase,
    Case,
    MergeStatesCase,
    PagedDecodeCase,
    has_query_lens,
)
from attnfuzz.report.findings import count, finding_lines, headline, wrapped
from attnfuzz.report.svg import element, text
from attnfuzz.verdict import Blame

Mark = Literal["fails", "needle", "token", "dead"]
MARKS: dict[Mark, str] = {
    "fails": "fails",
    "needle": "needle",
    "token": "token",
    "dead": "no token (filled with NaN)",
}
"""Marks of a slot, the most important first, and their meaning."""

_MAX_PAGES = 12
_MAX_SEQS = 16
_MAX_SPLITS = 8
_MAX_STATES = 32


@dataclass(frozen=True, slots=True)
class Box:
    """Slots of memory that lie together. ``skipped``: it stands for that many pages that are not shown."""

    title: str
    slots: tuple[Mark, ...] = ()
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class DrawnSequence:
    """One sequence and where its tokens lie."""

    number: int
    length: int
    fails: bool
    boxes: tuple[Box, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrawnState:
    """A pair of states to be merged, with the kinds of their LSEs."""

    token: int
    head: int
    prefix: str
    suffix: str
    fails: bool


@dataclass(frozen=True, slots=True)
class Drawing:
    """Either ``sequences`` or ``states``, with what does not belong to any one of them below."""

    sequences: tuple[DrawnSequence, ...] = ()
    states: tuple[DrawnState, ...] = ()
    notes: tuple[str, ...] = ()


@singledispatch
def draw(case: Case, blame: Blame) -> Drawing:
    """The picture of ``case``. Long cases are cut, but what is to blame is kept."""
    del case, blame  # of a problem that no picture is known of
    return Drawing()


@draw.register
def _(case: AttentionCase, blame: Blame) -> Drawing:
    blamed = [i for i in sorted(blame.seqs) if _MAX_SEQS <= i < case.num_seqs]
    shown = [*range(min(_MAX_SEQS, case.num_seqs)), *blamed[:_MAX_SEQS]]
    left_out = case.num_seqs - len(shown)
    notes = [f"... and {count(left_out, 'more sequence')}"] if left_out else []
    notes += _spare_pages(case) if case.page_size else []
    freed = freed_tokens(case)
    return Drawing(sequences=tuple(_sequence(case, seq, blame, freed[seq]) for seq in shown), notes=tuple(notes))


def squeeze(slots: tuple[Mark, ...], *, cells: int) -> list[Mark]:
    """At most ``cells`` marks, each then the most important of several slots."""
    order = list(MARKS)
    per_cell = max(1, -(-len(slots) // cells))
    return [min(slots[start : start + per_cell], key=order.index) for start in range(0, len(slots), per_cell)]


def _sequence(case: Any, seq: int, blame: Blame, freed: int) -> DrawnSequence:
    length = case.seq_lens[seq]
    notes = tuple(_notes(case, seq, freed))
    marked: dict[int, Mark] = {needle.position: "needle" for needle in case.values.needles if needle.seq == seq}
    marked |= dict.fromkeys((position for number, position in blame.tokens if number == seq), "fails")
    if case.page_size:
        return DrawnSequence(seq, length, seq in blame.seqs, tuple(_pages(case, seq, marked, freed)), notes)
    slots = _slots(range(case.max_seq_len), range(freed, length), marked)
    title = f"rows 0-{len(slots) - 1}" if len(slots) > 1 else "row 0"
    return DrawnSequence(seq, length, seq in blame.seqs, (Box(title, slots),), notes)


def _slots(positions: range, live: range, marked: Mapping[int, Mark]) -> tuple[Mark, ...]:
    def mark(position: int) -> Mark:
        found = marked.get(position, "token")
        return found if found == "fails" or position in live else "dead"

    return tuple(mark(position) for position in positions)


def _pages(case: PagedDecodeCase, seq: int, marked: Mapping[int, Mark], freed: int) -> Iterator[Box]:
    """The pages near an end, and those in between with a needle or what fails."""
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


def _notes(case: Any, seq: int, freed: int) -> Iterator[str]:
    if has_query_lens(case.problem):
        yield _queries(case, seq)
    if freed:
        yield f"behind the window, in pages that were freed: {count(freed, 'token')}"
    if case.page_size:
        unused = block_table_rows(case)[seq][case.blocks_of(seq) :]
        if unused:
            yield f"unused block-table entries: {listed(unused)}"
    if (num_splits := num_splits_of(case)) > 1:
        yield f"in {count(num_splits, 'split')}, if even: {_splits(case.seq_lens[seq], num_splits)}"


def _queries(case: AttentionCase, seq: int) -> str:
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
    starts = [split * size for split in range(min(num_splits, _MAX_SPLITS))]
    ranges = [f"{start}-{min(start + size, length) - 1}" if start < length else "empty" for start in starts]
    return " | ".join(ranges) + (" | ..." if num_splits > _MAX_SPLITS else "")


def _spare_pages(case: Any) -> list[str]:
    if used_blocks(case) == num_blocks(case):
        return []
    used = {page for row in physical_pages(case) for page in row}
    spare = tuple(page for page in range(num_blocks(case)) if page not in used)
    if not spare:
        return []
    return [f"of {count(num_blocks(case), 'page')} in the cache, no sequence owns: {listed(spare)}"]


@draw.register
def _(case: MergeStatesCase, blame: Blame) -> Drawing:
    heads = case.num_q_heads
    num_pairs = case.num_tokens * heads
    first = [divmod(i, heads) for i in range(min(_MAX_STATES, num_pairs))]
    there = [(token, head) for token, head in sorted(blame.rows) if token < case.num_tokens and head < heads]
    shown = [*first, *[pair for pair in there if pair not in first][:_MAX_STATES]]
    states = []
    for token, head in shown:
        prefix, suffix = case.lse_pairs[(token * case.num_q_heads + head) % len(case.lse_pairs)]
        states.append(DrawnState(token, head, prefix, suffix, (token, head) in blame.rows))
    left_out = num_pairs - len(shown)
    return Drawing(states=tuple(states), notes=(f"... and {count(left_out, 'more pair')}",) if left_out else ())


_SYMBOLS: dict[Mark, tuple[str, str]] = {
    "fails": ("✗", "bold red"),
    "needle": ("◆", "yellow"),
    "token": ("█", "cyan"),
    "dead": ("·", "dim"),
}
"""Character and style of a mark."""

_GUTTER = 12


@dataclass(frozen=True, slots=True)
class _TextBox:
    """A titled box around ``content``; ``style`` colours its border."""

    title: str
    content: Text
    style: str = ""

    @property
    def width(self) -> int:
        return 4 + max(self.content.cell_len, len(self.title))

    def lines(self) -> tuple[Text, Text, Text]:
        inner = self.width - 2
        title = f" {self.title} " if self.title else ""
        middle = Text.assemble(
            ("│ ", self.style), self.content, " " * (inner - 2 - self.content.cell_len), (" │", self.style)
        )
        return (
            Text(f"┌{title.ljust(inner, '─')}┐", self.style),
            middle,
            Text(f"└{'─' * inner}┘", self.style),
        )


@dataclass(frozen=True, slots=True)
class _BoxRow:
    """``labels`` (at most three short lines) beside ``boxes``, wrapped at the console's width; ``notes`` below."""

    labels: tuple[str, ...]
    boxes: tuple[_TextBox, ...]
    notes: tuple[Text, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        labels = self.labels
        for boxes in wrapped(self.boxes, options.max_width - _GUTTER, attrgetter("width")):
            yield from _beside(labels, boxes)
            labels = ()
        if not self.boxes:
            yield Text(" ".join(self.labels))
        for note in self.notes:
            yield Text.assemble(" " * _GUTTER, note)


def _beside(labels: tuple[str, ...], boxes: Sequence[_TextBox]) -> Iterator[Text]:
    for i, parts in enumerate(zip(*(box.lines() for box in boxes), strict=True)):
        label = labels[i] if i < len(labels) else ""
        yield Text.assemble(label.ljust(_GUTTER), *parts)


def _field_table(case: Case, *, defaults: bool = False) -> Table:
    """The fields of ``case`` with their values; with ``defaults`` those too that have theirs, but less bright."""
    table = Table("field", "value", box=None, pad_edge=False, header_style="bold")
    changed = dict(_flat(msgspec.to_builtins(case)))
    fields = {name: msgspec.to_builtins(getattr(case, name)) for name in case.__struct_fields__}
    for name, value in _flat(fields) if defaults else changed.items():
        style = "bold" if name in changed else "dim"
        table.add_row(name, Text(msgspec.json.encode(value).decode()), style=style)
    return table


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


_CELLS_PER_PAGE = 16
_CELLS_PER_ROW = 64


def picture(case: Case, finding: FindingRecord | None = None, *, defaults: bool = False) -> RenderableType:
    """Draw ``case``, with what ``finding`` points to marked, and what it says.

    ``defaults``: list fields that have their default value, too.
    """
    drawing = draw(case, Blame() if finding is None else finding.blame)
    lines = () if finding is None else (finding.message, *finding_lines(finding, case))
    said = [Text(line, "red" if i == 0 else "") for i, line in enumerate(lines)]
    return Group(
        Text(headline(case), "bold"),
        "",
        *(_states(drawing) if drawing.states else _sequences(drawing)),
        *(Text(note, "dim") for note in drawing.notes),
        "",
        _field_table(case, defaults=defaults),
        *([""] if said else []),
        *said,
    )


def _sequences(drawing: Drawing) -> Iterator[RenderableType]:
    if not drawing.sequences:
        return
    pairs = ((_SYMBOLS[mark], f" {meaning}   ") for mark, meaning in MARKS.items())
    yield Text.assemble(*(part for pair in pairs for part in pair))
    for sequence in drawing.sequences:
        labels = (
            f"seq {sequence.number}" + (" ✗" if sequence.fails else ""),
            count(sequence.length, "token") if sequence.length else "empty",
        )
        yield _BoxRow(labels, tuple(map(_box, sequence.boxes)), tuple(Text(note, "dim") for note in sequence.notes))


def _box(box: Box) -> _TextBox:
    if box.skipped:
        return _TextBox(box.title, Text(count(box.skipped, "page"), "dim"), "dim")
    is_page = box.title.startswith("page")
    cells = squeeze(box.slots, cells=_CELLS_PER_PAGE if is_page else _CELLS_PER_ROW)
    content = Text.assemble(*map(_SYMBOLS.__getitem__, cells))
    return _TextBox(box.title, content, "red" if "fails" in box.slots and is_page else "")


def _states(drawing: Drawing) -> Iterator[RenderableType]:
    table = Table("token", "query head", "prefix LSE", "suffix LSE", "", box=None, pad_edge=False, header_style="bold")
    for state in drawing.states:
        fails = Text("✗ fails", "bold red") if state.fails else ""
        table.add_row(str(state.token), str(state.head), _lse(state.prefix), _lse(state.suffix), fails)
    yield table


def _lse(kind: str) -> Text:
    return Text(f"{kind} (empty)", "yellow") if kind.endswith("inf") else Text(kind)


_WIDTH = 760.0
_LABELS = 92.0
_SLOT = 11.0
_SLOTS_PER_LINE = 16
_MAX_SLOTS = 64
_PADDING = 5.0
_TITLE = 17.0
_GAP = 8.0
_LINE = 15.0
_CHARACTER = 6.2


def case_svg(drawing: Drawing) -> Markup:
    """The sequences of ``drawing`` below each other; pages wrap at the right."""
    parts: list[Markup] = []
    y = 0.0
    for sequence in drawing.sequences:
        drawn, height = _svg_sequence(sequence, y)
        parts += drawn
        y += height + _GAP
    return element(
        "svg",
        *parts,
        class_="case",
        viewBox=f"0 0 {_WIDTH:.0f} {max(y, _LINE):.0f}",
        width=_WIDTH,
        role="img",
        aria_label=f"{count(len(drawing.sequences), 'sequence')} with their pages",
    )


def _svg_sequence(sequence: DrawnSequence, top: float) -> tuple[list[Markup], float]:
    """Its elements, and how much height they take."""
    label = count(sequence.length, "token") if sequence.length else "empty"
    parts = [
        text(f"seq {sequence.number}", 0, top + _LINE - 3, class_="label fails" if sequence.fails else "label"),
        text(label, 0, top + 2 * _LINE - 3, class_="note"),
    ]
    x, y, line_height = _LABELS, top, 0.0
    for box in sequence.boxes:
        width, height = _size(box)
        if x > _LABELS and x + width > _WIDTH:
            x, y, line_height = _LABELS, y + line_height + _GAP, 0.0
        parts += _svg_box(box, x, y, width, height)
        x, line_height = x + width + _GAP, max(line_height, height)
    y += line_height or -3
    for note in sequence.notes:
        y += _LINE
        parts.append(text(note, _LABELS, y, class_="note"))
    return parts, max(y + _PADDING, top + 2 * _LINE + _PADDING) - top


def _size(box: Box) -> tuple[float, float]:
    shown = min(len(box.slots), _MAX_SLOTS)
    columns, lines = min(shown, _SLOTS_PER_LINE), -(-shown // _SLOTS_PER_LINE)
    title = _CHARACTER * max(len(box.title), len(_skipped(box)))
    return max(columns * _SLOT, title) + 2 * _PADDING, _TITLE + max(1, lines) * _SLOT + _PADDING


def _svg_box(box: Box, x: float, y: float, width: float, height: float) -> Iterator[Markup]:
    fails = "fails" in box.slots
    frame = "page fails" if fails else "page skipped" if box.skipped else "page"
    yield element("rect", x=x, y=y, width=width, height=height, rx=3.0, class_=frame)
    yield text(box.title, x + _PADDING, y + _TITLE - 5, class_="title fails" if fails else "title")
    if box.skipped:
        yield text(_skipped(box), x + _PADDING, y + _TITLE + _SLOT - 2, class_="note")
    for i, mark in enumerate(squeeze(box.slots, cells=_MAX_SLOTS)):
        line, column = divmod(i, _SLOTS_PER_LINE)
        yield _slot(mark, x + _PADDING + column * _SLOT, y + _TITLE + line * _SLOT)


def _slot(mark: Mark, x: float, y: float) -> Markup:
    half = (_SLOT - 1) / 2
    if mark == "needle":
        diamond = f"M{x + half} {y}l{half} {half}l-{half} {half}l-{half} -{half}z"
        return element("path", d=diamond, class_="needle")
    if mark == "dead":
        return element("circle", cx=x + half, cy=y + half, r=1.5, class_="dead")
    square = element("rect", x=x, y=y, width=_SLOT - 1, height=_SLOT - 1, rx=1.5, class_=mark)
    if mark == "token":
        return square
    cross = f"M{x + 2.5} {y + 2.5}l5 5m0 -5l-5 5"
    return element("g", square, element("path", d=cross, class_="cross"))


def _skipped(box: Box) -> str:
    return count(box.skipped, "page") if box.skipped else ""
