"""A case as a picture for the terminal: sequences, pages, needles, empty sequences, and what fails."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnfuzz.corpus import FindingRecord
from attnfuzz.oracles.verdict import Blame
from attnfuzz.problems.cases import Case
from attnfuzz.report.boxes import BoxRow, TextBox, cells, legend
from attnfuzz.report.drawing import Box, Drawing, draw
from attnfuzz.report.fields import field_table
from attnfuzz.report.headline import count, finding_lines, headline

__all__ = ["picture"]

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
        field_table(case, defaults=defaults),
        *([""] if said else []),
        *said,
    )


def _sequences(drawing: Drawing) -> Iterator[RenderableType]:
    if not drawing.sequences:
        return
    yield legend()
    for sequence in drawing.sequences:
        labels = (
            f"seq {sequence.number}" + (" ✗" if sequence.fails else ""),
            count(sequence.length, "token") if sequence.length else "empty",
        )
        yield BoxRow(labels, tuple(map(_box, sequence.boxes)), tuple(Text(note, "dim") for note in sequence.notes))


def _box(box: Box) -> TextBox:
    if box.skipped:
        return TextBox(box.title, Text(count(box.skipped, "page"), "dim"), "dim")
    is_page = box.title.startswith("page")
    content = cells(box.slots, width=_CELLS_PER_PAGE if is_page else _CELLS_PER_ROW)
    return TextBox(box.title, content, "red" if "fails" in box.slots and is_page else "")


def _states(drawing: Drawing) -> Iterator[RenderableType]:
    table = Table("token", "query head", "prefix LSE", "suffix LSE", "", box=None, pad_edge=False, header_style="bold")
    for state in drawing.states:
        fails = Text("✗ fails", "bold red") if state.fails else ""
        table.add_row(str(state.token), str(state.head), _lse(state.prefix), _lse(state.suffix), fails)
    yield table


def _lse(kind: str) -> Text:
    return Text(f"{kind} (empty)", "yellow") if kind.endswith("inf") else Text(kind)
