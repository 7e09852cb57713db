"""attnfuzz.report.explained and its drawings: weights in the terminal, as SVG, PNG and JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from attnfuzz.corpus import FindingRecord, Regression
from attnfuzz.declaration import Declaration
from attnfuzz.explaining.explanation import Explanation, WeightBox, WeightedRow
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.report.explained import (
    FORMAT,
    Explained,
    RasteriserMissing,
    explained_png,
    explained_svg,
    print_explained,
    write_explained,
)
from attnfuzz.verdict import Failure

CASE = PagedDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(6,), scale=0.25, block_size=4)
BOXES = (
    WeightBox(
        title="page 0 (physical 3)",
        unit="offset",
        numbers=(0, 1, 2, 3),
        got=(0.5, 0.25, 0.25, None),
        expected=(0.25, 0.125, 0.125, 0.25),
        wrong=(True, False, False, True),
    ),
    WeightBox(title="...", skipped=2),
    WeightBox(
        title="page 3 (physical 7)",
        unit="offset",
        numbers=(0, 1),
        got=(0.0, 0.0),
        expected=(0.25, 0.0),
        wrong=(True, False),
    ),
)


def an_explanation(*, failure: Failure | None = None, boxes: tuple[WeightBox, ...] = BOXES) -> Explained:
    row = WeightedRow(title="sequence 0, query head 0", wrong=True, boxes=boxes)
    explanation = Explanation(
        lines=("token 4 <is> dropped",), rows=(row,), changes=("passes if changed to: float32",), runs=3
    )
    record = FindingRecord(oracle="accuracy", message="wrong")
    return Explained(
        path=Path("found.json"),
        regression=Regression(problem="paged_decode", kernel="mine.py:mine", case=CASE, finding=record),
        kernel=Declaration(name="mine", problem="paged_decode", target="mine.py:mine"),
        failure=failure or Failure(oracle="accuracy", kind="out:value", message="out is wrong"),
        explanation=explanation,
    )


def printed(explained: Explained, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        print_explained(console, explained)
    return capture.get()


def test_terminal_shows_weights_without_colour() -> None:
    """In a log, or to the colour-blind, a wrong weight would look like a right one."""
    lines = printed(an_explanation()).splitlines()
    (expected,) = [line for line in lines if line.startswith("expected")]
    got, marks = lines[lines.index(expected) + 1 : lines.index(expected) + 3]
    assert expected.split() == ["expected", "▅▃▃▅", "▅·"]
    assert got.split() == ["got", "█▅▅?", "··"]
    assert [i for i, mark in enumerate(marks) if mark == "✗"] == [10, 13, marks.rindex("✗")]
    assert marks.rindex("✗") == expected.index("▅·")


def test_terminal_gives_wrong_weights_in_numbers() -> None:
    """Bars of eight heights cannot show a weight that is a percent off."""
    text = printed(an_explanation())
    assert "✗ page 0 (physical 3), offset 3: NaN or infinite, expected 0.25" in text
    assert "✗ page 3 (physical 7), offset 0: 0, expected 0.25" in text


def test_terminal_wraps_pages() -> None:
    """Pages of a long sequence would run past the edge."""
    assert max(map(len, printed(an_explanation(), width=40).splitlines()[4:])) <= 60
    lines = [line for line in printed(an_explanation(), width=40).splitlines() if line.startswith("expected")]
    assert len(lines) == 3


def test_svg_is_whole_and_escaped() -> None:
    """Browsers would refuse the file, or run what a kernel's message says."""
    root = ElementTree.fromstring(explained_svg(an_explanation()))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "token 4 <is> dropped" in texts
    assert "2 pages, right" in texts
    assert texts.count("✗") == 2
    assert texts.count("?") == 1


def test_svg_follows_the_screen_unless_told_not_to() -> None:
    """A drawing would be black on black, or a picture dark on a white page."""
    assert "prefers-color-scheme: dark" in explained_svg(an_explanation())
    assert "prefers-color-scheme" not in explained_svg(an_explanation(), dark_screens=False)


def test_svg_bars_are_as_high_as_the_weights() -> None:
    """The picture would contradict the numbers."""
    root = ElementTree.fromstring(explained_svg(an_explanation()))
    bars = [element for element in root.iter("{http://www.w3.org/2000/svg}rect") if element.get("class") == "got"]
    heights = [float(bar.get("height", 0)) for bar in bars[:-1]]  # the last one is the legend's
    (wrong, _) = [
        float(element.get("height", 0))
        for element in root.iter("{http://www.w3.org/2000/svg}rect")
        if element.get("class") == "got wrong"
    ]
    assert heights == [24.0, 24.0]
    assert wrong == 48.0


def test_png_is_one() -> None:
    """`-o FILE.png` would write something else."""
    data = explained_png(an_explanation())
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 5000


def test_png_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without the extra would see a traceback."""
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(RasteriserMissing, match=r"pip install 'attnfuzz\[png\]'"):
        explained_png(an_explanation())


def test_json_holds_everything(tmp_path: Path) -> None:
    """A program could not tell what a person is told."""
    write_explained(tmp_path / "e.json", an_explanation())
    document = json.loads((tmp_path / "e.json").read_text())
    assert document["format"] == FORMAT == "attnfuzz.explanation/1"
    assert document["failure"]["message"] == "out is wrong"
    assert document["explanation"]["rows"][0]["boxes"][0]["got"] == [0.5, 0.25, 0.25, None]
    assert document["explanation"]["changes"] == ["passes if changed to: float32"]
