"""Drawings of cases on a terminal and as SVG."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from markupsafe import Markup
from rich.console import Console, RenderableType

from attnfuzz.campaign.statistics import EXACT, LEAST, MOST, NOT_FINITE, Throughput
from attnfuzz.corpus import FindingRecord
from attnfuzz.problems.cases import (
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    SplitDecodeCase,
)
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.variants import Variant
from attnfuzz.report.charts import histogram_svg, timeline_svg
from attnfuzz.report.drawing import case_svg, draw, picture
from attnfuzz.report.svg import element, number, path_of_rects, text
from attnfuzz.verdict import MOST_PLACES, Blame
from tests.sample_cases import paged_case


def drawn(renderable: RenderableType, width: int = 100) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]


def paged(**fields: object) -> PagedDecodeCase:
    base: dict[str, object] = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "block_size": 4}
    return PagedDecodeCase(**{**base, **fields})  # type: ignore[arg-type]  # each test gives fields of the right type


def dense(**fields: Any) -> DenseDecodeCase:
    return DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, scale=1.0, **fields)


def at(*, details: tuple[str, ...] = (), **places: Any) -> FindingRecord:
    return FindingRecord(oracle="accuracy", message="out is wrong", details=details, blame=Blame(**places))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        pytest.param(paged(seq_lens=(5,)), ["│ ████   ││ █···   │"], id="dead-slots"),
        pytest.param(paged(seq_lens=(3,), values=Values(needles=(Needle(0, 1, 0),))), ["│ █◆█·   │"], id="needles"),
        pytest.param(paged(seq_lens=(0, 3)), ["\nseq 0 empty\n"], id="empty-sequences"),
        pytest.param(
            paged(seq_lens=(4, 4), pages=Pages(shared_blocks=1, spare_blocks=2)),
            ["page 0 shared", "page 0 shared", "of 3 pages in the cache, no sequence owns: 1, 2"],
            id="shared-and-spare-pages",
        ),
        pytest.param(
            paged(seq_lens=(4,), pages=Pages(extra_columns=2, padding="garbage")),
            ["unused block-table entries: -1, 2147483647"],
            id="unused-table-entries",
        ),
        pytest.param(
            SplitDecodeCase(
                num_q_heads=1, num_kv_heads=1, head_size=16, scale=1.0, block_size=4, seq_lens=(5,), num_splits=4
            ),
            ["0-1 | 2-3 | 4-4 | empty"],
            id="splits",
        ),
        pytest.param(paged(seq_lens=(5,), options={"num_splits": 2}), ["0-2 | 3-4"], id="splits-of-an-option"),
        pytest.param(dense(seq_lens=(2, 3), extra_rows=1), ["│ ██·· "], id="dense-rows-past-the-length"),
        pytest.param(
            MergeStatesCase(
                num_q_heads=2, head_size=16, num_tokens=1, lse_pairs=(("finite", "-inf"), ("+inf", "high"))
            ),
            ["0 1 +inf (empty) high"],
            id="merged-states",
        ),
    ],
)
def test_what_a_case_is_about_is_drawn(case: Case, words: list[str]) -> None:
    """What a cause hangs on, such as a partial page or an empty sequence, would not be seen."""
    text = "\n".join(drawn(picture(case)))
    squeezed = re.sub(" +", " ", text)  # columns of a table
    for word in words:
        assert max(text.count(word), squeezed.count(word)) == words.count(word)


def test_pages_carry_physical_ids() -> None:
    """Boxes would be titled by position and hide what the block table says."""
    lines = drawn(picture(paged(seq_lens=(5,), pages=Pages(order="reversed"))))
    assert any("page 1 " in line and line.index("page 1") < line.index("page 0") for line in lines if "page 0" in line)


def test_failing_token_is_marked() -> None:
    """The token that the oracle names would look like any other."""
    lines = drawn(
        picture(paged(seq_lens=(5,)), at(details=("token 4 of sequence 0 is dropped",), tokens=((0, 4),), seqs=(0,)))
    )
    assert any("│ ✗···   │" in line for line in lines)
    assert any(line.startswith("seq 0 ✗") for line in lines)
    assert lines[-1] == "token 4 of sequence 0 is dropped"


def test_long_sequences_are_cut_but_keep_the_failing_page() -> None:
    """A sequence of thousands of pages would fill the terminal, or the cut would hide what matters."""
    lines = drawn(picture(paged(seq_lens=(4000,)), at(tokens=((0, 2002),))))
    text = "\n".join(lines)
    assert len(lines) < 60
    assert "██✗█" in text
    assert "page 500 " in text
    assert "490 pages" in text


def test_many_sequences_are_cut_but_keep_the_failing_one() -> None:
    """A batch of hundreds would fill the terminal, or the cut would hide the failing sequence."""
    lines = drawn(picture(paged(seq_lens=(1,) * 300), at(seqs=(200,))))
    assert any(line.startswith("seq 200 ✗") for line in lines)
    assert "... and 283 more sequences" in lines


def test_failing_state_is_marked_and_kept() -> None:
    """The token and head of a merge that fail would not be seen among hundreds."""
    case = MergeStatesCase(num_q_heads=2, head_size=16, num_tokens=200)
    lines = drawn(picture(case, at(rows=((150, 1),))))
    assert any(line.split() == ["150", "1", "finite", "finite", "✗", "fails"] for line in lines)
    assert "... and 367 more pairs" in lines


def test_field_table_lists_defaults_if_asked() -> None:
    """The two fields that a case is about would drown in forty that say nothing, or those could not be seen at all."""
    case = paged(seq_lens=(4,), layout="HND")
    rows = dict(line.split(maxsplit=1) for line in drawn(picture(case)) if " " in line.strip())
    assert rows["layout"] == '"HND"'
    assert "pages.order" not in rows
    rows = dict(
        line.split(maxsplit=1) for line in drawn(picture(paged(seq_lens=(4,)), defaults=True)) if " " in line.strip()
    )
    assert rows["layout"] == '"NHD"'
    assert rows["pages.order"] == '"identity"'
    assert rows["seq_lens"] == "[4]"


def test_a_squeezed_row_keeps_what_fails() -> None:
    """Squeezing many tokens into one cell would lose the failing one."""
    lines = drawn(picture(dense(seq_lens=(128,)), at(tokens=((0, 1),))))
    assert f"│ ✗{'█' * 63} │" in "\n".join(lines)


def test_pages_wrap_at_the_console_width() -> None:
    """Boxes wider than the terminal would be torn apart."""
    lines = [line for line in drawn(picture(paged(seq_lens=(16,))), width=40) if set(line) & set("┌│└")]
    assert len(lines) == 6
    assert max(map(len, lines)) == 12 + 2 * 10


def test_a_case_of_many_parts_is_drawn_at_once() -> None:
    """What is not shown was looked at all the same, which took minutes for a file of a megabyte."""
    pages = paged(seq_lens=(1 << 18,), block_size=1, pages=Pages(shared_blocks=5))
    assert "262132 pages" in "\n".join(drawn(picture(pages)))
    everywhere = at(tokens=tuple((i, 3) for i in range(MOST_PLACES)), seqs=tuple(range(MOST_PLACES)))
    many = paged(seq_lens=(20,) * 20_000, pages=Pages(shared_blocks=2))
    assert sum("✗" in line for line in drawn(picture(many, everywhere))) < 100
    fields: dict[str, Any] = {
        "seq_lens": (7,) * 20_000,
        "query_lens": (1,) * 20_000,
        "num_q_heads": 1,
        "num_kv_heads": 1,
    }
    variant = Variant(window=2, freed_pages=True)
    freed = PagedAttentionCase(head_size=16, scale=0.25, block_size=4, variant=variant, **fields)
    assert "seq 15" in "\n".join(drawn(picture(freed)))
    states = MergeStatesCase(num_q_heads=64, head_size=1, num_tokens=1 << 20)
    assert f"{(64 << 20) - 32} more pairs" in "\n".join(drawn(picture(states)))


def rects(path: str | None) -> list[tuple[float, float, float, float]]:
    """What ``path_of_rects`` was made of."""
    found = re.findall(r"M([\d.-]+) ([\d.-]+)h([\d.-]+)v([\d.-]+)h-[\d.]+z", path or "")
    return [(float(x), float(y), float(width), float(height)) for x, y, width, height in found]


def paths(svg: Markup, css_class: str) -> list[str | None]:
    return [path.get("d") for path in ElementTree.fromstring(svg).iter("path") if path.get("class") == css_class]


def test_attributes_and_texts_are_escaped() -> None:
    """A drawing with a kernel's name in it would be a way into the page."""
    drawn = element("g", text("<b>&", 1, 2.5), class_='"><script>', stroke_width=1.0, fill=None)
    assert ElementTree.fromstring(drawn).get("class") == '"><script>'
    assert "<script>" not in drawn
    assert 'stroke-width="1"' in drawn
    assert "fill" not in drawn
    assert "&lt;b&gt;&amp;" in drawn


@pytest.mark.parametrize(("value", "written"), [(1.0, "1"), (-2.5, "-2.5"), (1 / 3, "0.33"), (10, "10"), (0.001, "0")])
def test_numbers_are_short(value: float, written: str) -> None:
    """Ten thousand coordinates with sixteen digits make a page of megabytes, and "1e-05" or "-0" none at all."""
    assert number(value) == written


def test_many_rectangles_are_one_path() -> None:
    """A cell that is left out, or lies on another, would be a pair of features nobody can see."""
    wanted = [(0.0, 0.0, 9.0, 9.0), (10.5, 0.0, 9.0, 9.0), (0.0, 10.25, 9.0, 9.0)]
    assert rects(path_of_rects(wanted)) == wanted


def test_bars_lie_on_their_side_of_the_bound() -> None:
    """A case at its bound has passed; one bar over the line and a kernel looks broken."""
    svg = histogram_svg({EXACT: 4, LEAST: 1, 0: 100, 1: 1, MOST: 1, NOT_FINITE: 2})
    inside, over = (rects(path) for path in (*paths(svg, "bar"), *paths(svg, "bar over")))
    (bound,) = (re.match(r"M([\d.]+) ", path or "") for path in paths(svg, "bound"))
    assert bound is not None
    line = float(bound[1])
    assert (len(inside), len(over)) == (3, 3)
    assert max(x + width for x, _, width, _ in inside) <= line <= min(x for x, *_ in over)
    assert min(height for *_, height in (*inside, *over)) >= 2.0  # one case in a hundred is seen
    places = [x for x, *_ in (*inside, *over)]
    assert places == sorted(set(places))


def test_nothing_compared_is_an_empty_histogram() -> None:
    """A kernel that only crashes has no errors to draw, and the page must be written all the same."""
    assert paths(histogram_svg({}), "bar") == [""]


def area(path: str | None, most: float) -> float:
    """Cases under a step curve of ``timeline_svg``, from the scale of its axis."""
    points = re.findall(r"L([\d.]+) ([\d.]+)H([\d.]+)", path or "")
    bottom, top, left, right = 178.0, 40.0, 52.0, 1028.0
    seconds = sum((float(end) - float(start)) * (bottom - float(y)) / (bottom - top) * most for start, y, end in points)
    return seconds / (right - left)


def test_the_area_is_the_number_of_cases() -> None:
    """Devices are stacked: the second one's curve is the sum of both."""
    throughput = Throughput()
    for second in range(60):
        throughput.add("0", second + 0.5, 30)
        throughput.add("1", second + 0.5, 10)
    svg = timeline_svg(throughput, elapsed_s=60.0, found=[])
    (first,), (both,) = paths(svg, "area d0"), paths(svg, "area d1")
    assert math.isclose(area(first, most=40.0), 30.0, rel_tol=0.01)
    assert math.isclose(area(both, most=40.0), 40.0, rel_tol=0.01)


def test_findings_are_marked_apart() -> None:
    """Three findings of one second would be three numbers on top of each other."""
    svg = timeline_svg(Throughput(), elapsed_s=60.0, found=[(30.0, "a"), (10.0, "b"), (30.1, "c"), (30.2, "d")])
    drawn = ElementTree.fromstring(svg)
    links = [link.get("href") for link in drawn.iter("a")]
    assert links == ["#b", "#a", "#c", "#d"]
    places = [float(circle.get("cx", "0")) for circle in drawn.iter("circle")]
    assert all(later - earlier >= 18 for earlier, later in pairwise(places))


def test_findings_of_the_last_second_stay_in_the_picture() -> None:
    """Their numbers would be pushed out at the right, and could not be clicked."""
    for many in (5, 200):
        drawn = ElementTree.fromstring(timeline_svg(Throughput(), elapsed_s=60.0, found=[(60.0, "a")] * many))
        places = [float(circle.get("cx", "0")) for circle in drawn.iter("circle")]
        assert all(0 < earlier < later <= 1031 for earlier, later in pairwise(places))


@pytest.mark.parametrize("elapsed_s", [0.0, 0.5, 1.0, 3600.0, 1e6])
def test_any_campaign_can_be_drawn(elapsed_s: float) -> None:
    """One that is interrupted at once, and one that runs for days."""
    throughput = Throughput()
    throughput.add("", min(elapsed_s, 0.4), 5)
    throughput.add("", elapsed_s, 5)
    drawn = ElementTree.fromstring(timeline_svg(throughput, elapsed_s=elapsed_s, found=[(elapsed_s, "a")]))
    assert "nan" not in ElementTree.tostring(drawn, encoding="unicode")
    assert len(list(drawn.iter("text"))) <= 3 + 9 + 1


def test_pages_stay_within_the_picture() -> None:
    """A long sequence must wrap and not be cut off at the right; one of 4000 pages must not be endless."""
    case = paged_case(block_size=7, seq_lens=(28_000, 0, 100))
    drawn = ElementTree.fromstring(case_svg(draw(case, Blame(tokens=((0, 14000),), seqs=(0,)))))
    _, _, width, height = map(float, drawn.get("viewBox", "").split())
    boxes = [rect for rect in drawn.iter("rect") if (rect.get("class") or "").startswith("page")]
    for box in boxes:
        assert float(box.get("x", "")) + float(box.get("width", "")) <= width
        assert float(box.get("y", "")) + float(box.get("height", "")) <= height
    assert len(boxes) == (10 + 1 + 1 + 1 + 2) + (12 + 1)  # with one box for each run of pages left out
    assert sum("fails" in (box.get("class") or "") for box in boxes) == 1
    assert height < 400
