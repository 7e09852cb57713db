"""``attnfuzz repro``: a saved case as one Python file that needs no attnfuzz."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from attnfuzz.cli.parameters import FILE, KERNEL_HELP, TRUST, writable_file
from attnfuzz.cli.refusal import Refusal, refusing
from attnfuzz.oracles.verdict import RELATION_ORACLES

__all__ = ["command"]


@click.command(epilog=KERNEL_HELP)
@click.argument("case", type=FILE, metavar="CASE")
@click.option("--kernel", metavar="KERNEL", help="Take this kernel instead of the one that the file names.")
@TRUST
@click.option("-o", "--output", type=FILE, callback=writable_file, help="Write to this file instead of the terminal.")
def command(case: Path, kernel: str | None, trust: bool, output: Path | None) -> int:
    """Turn the regression file CASE into one self-contained Python file, to paste into an issue."""
    with refusing():
        from attnfuzz.campaign.saved.replay import SavedCase, kernel_and_case
        from attnfuzz.corpus import load_regression
        from attnfuzz.judging.runner import Runner

        regression = load_regression(case)
        if regression.finding.oracle == "sanitizer":
            raise Refusal(
                f"{case} was found under compute-sanitizer, and a script compares results, which may not show it: "
                "use attnfuzz replay --sanitizer"
            )
        if regression.finding.oracle in RELATION_ORACLES:
            raise Refusal(
                f"{case} is a finding of {regression.finding.oracle}, which compares runs on several inputs, and a "
                "script holds only those of the case: use attnfuzz replay"
            )
        from attnfuzz.report.repro import repro_script  # loads torch

        with Runner(device="cpu") as runner:
            found, fitting = kernel_and_case(SavedCase(case, regression), runner, kernel=kernel, trust=trust)
        script = repro_script(msgspec.structs.replace(regression, kernel=found.target, case=fitting), found)
    if output is None:
        click.echo(script, nl=False)
        return 0
    try:
        output.write_text(script, encoding="utf-8")
    except OSError as error:
        raise Refusal(f"-o {str(output)!r} cannot be written: {error.strerror}") from error
    return 0
