"""The page of kernel times in headless Chromium, where one is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnfuzz.bench.kernels.run import KernelBench, measure_kernels
from attnfuzz.bench.kernels.shapes import SUITES
from attnfuzz.report.bench_page import bench_page
from tests.unit.test_report_html_in_browser import CHROMIUM, DARK, LIGHT, chromium, first_pixel
from tests.unit.timing_stand_ins import SDPA, Pretended, declared, times

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def page() -> str:
    plan = KernelBench(suites={"decode": SUITES["decode"]()}, options={})
    return bench_page(measure_kernels(plan, Pretended(lambda one: times(one, 1.1)), [declared("paged")], [SDPA]))


@pytest.mark.parametrize(("scheme", "background"), [(LIGHT, (0xF6, 0xF7, 0xF9)), (DARK, (0x0E, 0x10, 0x13))])
def test_it_is_drawn_light_and_dark(scheme: str, background: tuple[int, ...], page: str, tmp_path: Path) -> None:
    """The page would dazzle at night, or show dark lines on a dark ground."""
    run = chromium(page, tmp_path, scheme, f"--screenshot={tmp_path / 'page.png'}")
    assert first_pixel(tmp_path / "page.png") == background
    assert "Content Security Policy" not in run.stderr


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_texts_of_plots_have_the_colour_of_the_page(scheme: str, page: str, tmp_path: Path) -> None:
    """Dark words on a dark ground could not be read."""
    script = """<script>
    const style = (what) => getComputedStyle(document.querySelector(what));
    document.title = style(".plots text").fill + "|" + style(".plots svg").color;
    </script></body>"""
    allowed = page.replace("style-src 'unsafe-inline'", "style-src 'unsafe-inline'; script-src 'unsafe-inline'")
    run = chromium(allowed.replace("</body>", script), tmp_path, scheme, "--dump-dom")
    (title,) = re.findall("<title>(rgb[^<]+)</title>", run.stdout)
    fill, _, color = title.partition("|")
    assert fill == color
