"""The HTML page in a real browser: headless Chromium, where one is installed."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest

from attnfuzz.report.html import html_page
from tests.common.report_results import DENSE, a_finding, a_result

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")

DARK, LIGHT = "--blink-settings=preferredColorScheme=0", "--blink-settings=preferredColorScheme=1"


def chromium(page: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open ``page`` with all of the network away; what the page complains about comes out on stderr."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    command = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",  # without which it does not run as root; the page is ours
        "--disable-gpu",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1200,900",
        *options,
        file.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def first_pixel(png: Path) -> tuple[int, ...]:
    """Red, green and blue of the top left corner: the first of a row is stored as it is, whatever the row's filter."""
    data, pixels, place = png.read_bytes(), b"", 8
    while place < len(data):
        length = int.from_bytes(data[place : place + 4], "big")
        if data[place + 4 : place + 8] == b"IDAT":
            pixels += data[place + 8 : place + 8 + length]
        place += 12 + length
    return tuple(zlib.decompress(pixels)[1:4])


@pytest.fixture(scope="module")
def page() -> str:
    return html_page(a_result(a_finding(), a_finding(DENSE), devices=("0", "1")))


@pytest.mark.parametrize(("scheme", "background"), [(LIGHT, (0xF6, 0xF7, 0xF9)), (DARK, (0x0E, 0x10, 0x13))])
def test_it_is_drawn_light_and_dark(scheme: str, background: tuple[int, ...], page: str, tmp_path: Path) -> None:
    """What the reader prefers must decide, and the browser must have nothing to complain about."""
    run = chromium(page, tmp_path, scheme, f"--screenshot={tmp_path / 'shot.png'}")
    assert first_pixel(tmp_path / "shot.png") == background
    assert [line for line in run.stderr.splitlines() if "CONSOLE" in line] == []


def test_what_is_pointed_at_is_told_and_commands_have_a_button(page: str, tmp_path: Path) -> None:
    """The map has no room for numbers, so the script must find the one; "copy" would seem to be of another box."""
    script = """<script>
    const figure = document.querySelector(".all-pairs"), svg = figure.querySelector("svg");
    const data = JSON.parse(figure.querySelector("script").textContent);
    const column = data.names.indexOf("page size: pow2 to 16"), row = data.names.indexOf("last page: 1 token");
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const at = (level) => (data.places[level] + 4) * scale;
    svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + at(column), clientY: box.top + at(row)}));
    const edges = [".copy", "pre.command"].map((name) => document.querySelector(name).getBoundingClientRect());
    document.title = edges[0].top >= edges[1].top && edges[0].bottom <= edges[1].bottom;
    </script></body>"""
    run = chromium(page.replace("</body>", script), tmp_path, "--dump-dom")
    (told,) = re.findall(r'class="readout"[^>]*>([^<]+)<', run.stdout)
    assert html.unescape(told) == "page size: pow2 to 16 × last page: 1 token: 22 cases"
    assert "<title>true</title>" in run.stdout


def test_a_page_may_not_call_home(page: str, tmp_path: Path) -> None:
    """Even a message that slipped through unescaped could load nothing from anywhere."""
    script = '<img src="https://example.org/a.png"><script>fetch("https://example.org/")</script></body>'
    run = chromium(page.replace("</body>", script), tmp_path, "--dump-dom")
    refused = [line for line in run.stderr.splitlines() if "Content Security Policy" in line]
    assert any("a.png" in line for line in refused)
    assert any("connect" in line for line in refused)
