"""``attnfuzz show``: a saved case as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from attnfuzz.cli.parameters import FILE
from attnfuzz.cli.refusal import refusing

__all__ = ["command"]


@click.command()
@click.argument("case", type=FILE, metavar="CASE")
@click.option("-v", "--verbose", is_flag=True, help="List fields of the case that have their default value, too.")
def command(case: Path, verbose: bool) -> int:
    """Draw the regression file CASE: sequences, pages, and what fails."""
    with refusing():
        from attnfuzz.corpus import load_regression
        from attnfuzz.report.drawing import picture
        from attnfuzz.report.terminal import make_console

        regression = load_regression(case)
    make_console().print(picture(regression.case, regression.finding, defaults=verbose))
    return 0
