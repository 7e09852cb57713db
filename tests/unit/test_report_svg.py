"""Drawings of the HTML page: attnfuzz.report.svg, histogram, timeline and case_svg."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from markupsafe import Markup

from attnfuzz.campaign.statistics import EXACT, LEAST, MOST, NOT_FINITE, Throughput
from attnfuzz.report.charts import histogram_svg, timeline_svg
from attnfuzz.report.drawing import case_svg, draw
from attnfuzz.report.svg import element, number, path_of_rects, text
from attnfuzz.verdict import Blame
from tests.cases import paged_case


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
