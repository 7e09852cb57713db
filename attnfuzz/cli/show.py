"""Commands that only show something: ``list``, ``show`` a case, its ``repro`` script, ``triage``, ``doctor``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from attnfuzz.cli.options import FILE, KERNEL_HELP, TRUST, configured, profile_option, writable_file
from attnfuzz.cli.outcome import SHOWN, Outcome
from attnfuzz.cli.output import Refusal, refusing, write_asked

if TYPE_CHECKING:
    from attnfuzz.campaign.saved.replay import SavedCase


@click.command()
@click.argument("case", type=FILE, metavar="CASE")
@click.option("-v", "--verbose", is_flag=True, help="List fields of the case that have their default value, too.")
def show_command(case: Path, verbose: bool) -> Outcome:
    """Draw the regression file CASE: sequences, pages, and what fails."""
    with refusing():
        from attnfuzz.corpus import load_regression
        from attnfuzz.report.drawing import picture
        from attnfuzz.report.terminal import make_console

        regression = load_regression(case)
    make_console().print(picture(regression.case, regression.finding, defaults=verbose))
    return SHOWN


@click.command(epilog=KERNEL_HELP)
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("-v", "--verbose", is_flag=True, help="Show all that each kernel declares.")
def list_command(kernels: tuple[str, ...], verbose: bool) -> Outcome:
    """List KERNELs (all bundled ones by default) with their problems and options.

    For kernels of an engine that cannot run on this machine it says why, and what they need.
    """
    with refusing():
        from attnfuzz.judging.runner import Runner
        from attnfuzz.report.declarations import print_kernels
        from attnfuzz.report.terminal import make_console

        with Runner() as runner:
            declarations, absent = runner.kernels.listed(list(kernels) or ["*"])
    print_kernels(make_console(), declarations, absent, verbose=verbose)
    return SHOWN


@click.command(epilog=KERNEL_HELP)
@click.argument("case", type=FILE, metavar="CASE")
@click.option("--kernel", metavar="KERNEL", help="Take this kernel instead of the one that the file names.")
@TRUST
@click.option("-o", "--output", type=FILE, callback=writable_file, help="Write to this file instead of the terminal.")
def repro_command(case: Path, kernel: str | None, trust: bool, output: Path | None) -> Outcome:
    """Turn the regression file CASE into one self-contained Python file, to paste into an issue."""
    with refusing():
        from attnfuzz.campaign.saved.replay import SavedCase, kernel_and_case
        from attnfuzz.corpus import load_regression
        from attnfuzz.judging.runner import Runner
        from attnfuzz.report.scripts import Following, why_no_script

        regression = load_regression(case)
        if why := why_no_script(regression.finding.oracle):
            raise Refusal(f"{case} was found by {regression.finding.oracle}: {why}")
        from attnfuzz.report.repro import repro_script  # loads torch

        with Runner() as runner:
            found, fitting = kernel_and_case(SavedCase(case, regression), runner, kernel=kernel, trust=trust)
            saved = msgspec.structs.replace(regression, kernel=found.target, case=fitting)
            script = repro_script(saved, found, follow=Following(runner.device, runner).of(found))
    if output is None:
        click.echo(script, nl=False)
        return SHOWN
    from attnfuzz.own_files import write_file

    write_asked(("-o", output, lambda path: write_file(path, script.encode())))
    return SHOWN


@click.command()
@click.argument("paths", nargs=-1, type=FILE, metavar="[PATH]...")
@click.option("--fixed", is_flag=True, help="First mark the cases of PATH as fixed: they must pass from now on.")
@profile_option()
def triage_command(paths: tuple[Path, ...], fixed: bool) -> Outcome:
    """List saved cases (files or folders; the regressions folder by default): open, flaky and fixed, since when.

    Nothing is run: attnfuzz replay does that.
    """
    if fixed and not paths:
        raise Refusal("--fixed marks the saved cases that you name: attnfuzz triage --fixed FILE")
    with refusing():
        from attnfuzz.cli.replay import load_saved
        from attnfuzz.report.saved_cases import print_triage
        from attnfuzz.report.terminal import make_console

        saved = load_saved(paths, configured().regressions)
    if fixed:
        saved = [_fixed(one) for one in saved]
    print_triage(make_console(), saved)
    return SHOWN


def _fixed(saved: SavedCase) -> SavedCase:
    """Its file says so now, too."""
    from attnfuzz.corpus import encode_regression
    from attnfuzz.own_files import write_file

    regression = msgspec.structs.replace(saved.regression, status="fixed")
    write_asked(("--fixed", saved.path, lambda path: write_file(path, encode_regression(regression))))
    return replace(saved, regression=regression)


_STATUS_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@click.command()
def doctor_command() -> Outcome:
    """Check Python, packages, device, Triton's interpreter and caches. The exit status is 2 if anything is wrong."""
    from rich.text import Text

    from attnfuzz.doctor import examine
    from attnfuzz.report.terminal import make_console

    console = make_console()
    problems = 0
    for part in examine():
        problems += part.status == "problem"
        console.print(
            Text(f"{part.status:<8}", style=_STATUS_STYLES[part.status]).append(f"{part.name}: {part.text}", "default")
        )
        if part.remedy:
            console.print(Text(f"        {part.remedy}"))
    return Outcome(judged=None, missed=problems > 0)
