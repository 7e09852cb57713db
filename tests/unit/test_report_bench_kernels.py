"""Tables, sentences, plots and the page of kernel times."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET

import pytest
from msgspec.structs import replace
from rich.console import Console

from attnfuzz.bench.kernels.measurements import MeasureReply, MeasureRequest, Report
from attnfuzz.bench.kernels.run import KernelBench, measure_kernels
from attnfuzz.bench.kernels.shapes import SUITES
from attnfuzz.report.bench import print_report, summary_of
from attnfuzz.report.bench_page import bench_page, charts_of, plots_png, plots_svg
from tests.unit.timing_stand_ins import SDPA, Pretended, declared, times

FACTORS = {"paged_split_k": 1.05, "torch:sdpa": 1.0, "merge_states": 1.1, "<b>naive": 3.0}


def answer(request: MeasureRequest) -> MeasureReply:
    if request.contender == "<b>naive" and request.shape.block_size == 24:
        return MeasureReply(status="wrong", error_ratio=9.0, note="9 times the error bound")
    factor = FACTORS[request.contender] * (1.2 if request.shape.room else 1.0)
    return times(request, factor)


@pytest.fixture(scope="module")
def report() -> Report:
    kernels = [declared("paged_split_k"), declared("<b>naive"), declared("merge_states", "merge_states")]
    plan = KernelBench(suites={name: SUITES[name]() for name in ("decode", "qwen", "merge", "graph")}, options={})
    return measure_kernels(plan, Pretended(answer), kernels, [SDPA])


def test_the_sentences_say_what_a_suite_was_run_for(report: Report) -> None:
    """Readers would have to work the ratios out from a table of numbers."""
    assert "paged_split_k (L2 cold): 1.05 times SDPA" in summary_of(report, "decode")
    assert "merge_states (L2 warm): 91% of a copy's bandwidth or more from 4096 tokens on" in summary_of(
        report, "merge"
    )
    (split, *_) = summary_of(report, "qwen")
    assert re.search(r"\+6\d\d% from 512 to 4096 tokens with 12/2 heads", split)
    (split, *_) = summary_of(report, "graph")
    assert "one graph for all lengths takes 1.20 times one made for the length" in split


def test_options_that_no_row_shows_are_told() -> None:
    """A kernel timed with the first of its tiles would pass for one with the tile that its wrapper takes."""
    kernels = [declared("paged_split_k", tile=(16, 32), num_splits=(1, 8)), declared("<b>naive")]
    plan = KernelBench(suites={"decode": SUITES["decode"]()[:1]}, options={"num_splits": (2, 4)})
    report = measure_kernels(plan, Pretended(answer), kernels, [SDPA])
    told = [line for line in summary_of(report, "decode") if "timed with" in line]
    assert told == ["paged_split_k: timed with tile=16; --option tries others"]


def test_a_table_has_ratios_and_marks(report: Report) -> None:
    """A wrong kernel would be a row like any other."""
    console = Console(file=io.StringIO(), width=200)
    print_report(console, report)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO
    (split,) = (line for line in lines if line.startswith("1x4096 page 16"))
    assert re.search(r"paged_split_k .* 95 +1\.05", split)
    assert any("WRONG: 9 times the error bound" in line for line in lines)
    assert "paged_split_k (L2 cold): 1.05 times SDPA" in [line.strip() for line in lines]


def test_a_long_remark_leaves_room_for_the_numbers() -> None:
    """One contender that fails would make the table of all others unreadable."""

    def fails(request: MeasureRequest) -> MeasureReply:
        return answer(request) if request.contender == SDPA.target else MeasureReply(status="failed", note="no " * 99)

    plan = KernelBench(suites={"decode": SUITES["decode"]()[:1]}, options={})
    failed = measure_kernels(plan, Pretended(fails), [declared("paged_split_k")], [SDPA])
    console = Console(file=io.StringIO(), width=120)
    print_report(console, failed)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO
    assert any(re.match(r"(1x4096 page 16)? +torch:sdpa +\d+\.\d ", line) for line in lines)


def test_charts_draw_each_contender_in_one_colour(report: Report) -> None:
    """Lines of two charts could not be compared."""
    charts = charts_of(report, "decode")
    assert [chart.title for chart in charts] == [*(f"32/8 heads, batch {n}" for n in (1, 8, 64)), "bandwidth"]
    assert {(line.name, line.colour) for chart in charts for line in chart.lines} == {
        ("paged_split_k", 0), ("<b>naive", 1), ("torch:sdpa", 2),
    }  # fmt: skip
    assert charts[-1].ceiling == pytest.approx(1000)
    dashed = [line for chart in charts_of(report, "graph")[:-1] for line in chart.lines if line.dashed]
    assert {line.name for line in dashed} == {
        f"{name} with room" for name in ("paged_split_k", "<b>naive", "torch:sdpa")
    }


@pytest.mark.parametrize("name", ["<b>$x_1$", "_mine.py:_decode"])
def test_a_plot_names_a_kernel_whatever_it_is_called(name: str) -> None:
    """Dollars would make a formula of a name, a leading underscore keep it from the key, and `<b>` break the page."""

    def answered(request: MeasureRequest) -> MeasureReply:
        return times(request, 1.0)

    plan = KernelBench(suites={"qwen": SUITES["qwen"]()}, options={})
    drawn = plots_svg(measure_kernels(plan, Pretended(answered), [declared(name)], [SDPA]), "qwen")
    assert drawn is not None
    texts = {element.text for element in ET.fromstring(drawn).iter() if element.tag.endswith("text")}
    assert {name, SDPA.target, "bandwidth", "copy", "tokens of the longest sequence"} <= texts


def test_the_page_needs_nothing_else_and_escapes_names(report: Report) -> None:
    """It would be empty without a network, or run what somebody called a kernel."""
    page = bench_page(report)
    assert "<b>naive" not in page
    assert "&lt;b&gt;naive" in page
    assert "GPU &lt;1&gt;" in page
    assert not re.search(r"(src|href)=\"(?!#)", page)
    assert page.count("<svg") == len(report.suites)
    assert 'class="bad"' in page


def test_the_page_says_what_is_missing_without_matplotlib(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has not installed matplotlib would get no tables either, or not know why there are no plots."""
    monkeypatch.setattr("attnfuzz.report.bench_page.can_plot", lambda: False)
    page = bench_page(report)
    assert "<svg" not in page
    assert "pip install" in page
    assert 'class="bad"' in page


def test_the_picture_is_drawn(report: Report) -> None:
    """--png would write something that nothing can open, or fail where there is nothing to draw."""
    png = plots_png(replace(report, suites=("merge",)))
    assert png is not None
    assert png.startswith(b"\x89PNG")
    assert plots_png(Report(started="", machine=report.machine, peak_gb_s=1, suites=(), results=[])) is None
