"""``attnfuzz bench plot``: tables and plots of times that were measured before."""

from __future__ import annotations

from pathlib import Path

import click

from attnfuzz.cli.bench_report import require_rasteriser, show_and_write
from attnfuzz.cli.parameters import FILE, writable_file
from attnfuzz.cli.refusal import Refusal
from attnfuzz.data_files import MOST_RESULT_BYTES, read_data_file

__all__ = ["command"]


@click.command("plot")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "json_file", type=FILE, callback=writable_file, metavar="FILE", help="Write all in one.")
@click.option("--html", "html_file", type=FILE, callback=writable_file, metavar="FILE", help="Write a page with plots.")
@click.option("--png", "png_file", type=FILE, callback=writable_file, metavar="FILE", help="Write the plots.")
def command(files: tuple[Path, ...], json_file: Path | None, html_file: Path | None, png_file: Path | None) -> int:
    """Show what `attnfuzz bench kernels --json` wrote to FILES, on a machine without a GPU too.

    Several files are shown as one, if they were measured on the same kind of device.
    """
    from attnfuzz.bench.kernels.results import decode_report, joined
    from attnfuzz.report.terminal import make_console

    require_rasteriser(png_file)
    reports = []
    for file in files:
        try:
            reports.append(decode_report(read_data_file(file, MOST_RESULT_BYTES)))
        except OSError as error:
            raise Refusal(f"{file} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise Refusal(f"{file} is not what attnfuzz bench kernels --json writes: {error}") from error
    try:
        report = joined(reports)
    except ValueError as error:
        raise Refusal(str(error)) from error
    show_and_write(make_console(), report, json_file=json_file, html_file=html_file, png_file=png_file)
    return 0
