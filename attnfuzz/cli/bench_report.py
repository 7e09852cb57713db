"""What is done with times of kernels once they are known, be they measured now or read from a file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from attnfuzz.cli.refusal import Refusal

if TYPE_CHECKING:
    from rich.console import Console

    from attnfuzz.bench.kernels.results import Report

__all__ = ["require_rasteriser", "show_and_write"]


def require_rasteriser(png_file: Path | None) -> None:
    """Raise Refusal if a PNG is wanted that cannot be made, before all the work is done."""
    if png_file is not None and find_spec("resvg_py") is None:
        raise Refusal("--png needs resvg: pip install 'attnfuzz[png]', or use --html")


def show_and_write(
    console: Console, report: Report, *, json_file: Path | None, html_file: Path | None, png_file: Path | None
) -> None:
    """Print the tables, and write the files that were asked for."""
    from attnfuzz.bench.kernels.results import encode_report
    from attnfuzz.report import bench
    from attnfuzz.report.bench import summary_of
    from attnfuzz.report.bench_html import bench_page
    from attnfuzz.report.bench_png import bench_png
    from attnfuzz.report.files import write_file

    bench.print_report(console, report, {suite: summary_of(report, suite) for suite in report.suites})
    if json_file is not None:
        write_file(json_file, encode_report(report))
    if html_file is not None:
        write_file(html_file, bench_page(report).encode())
    if png_file is None:
        return
    if (png := bench_png(report)) is None:
        console.print("nothing was timed at more than one length, so there is nothing to draw: no PNG is written")
    else:
        write_file(png_file, png)
