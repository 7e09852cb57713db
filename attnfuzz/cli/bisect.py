"""``attnfuzz bisect``: the first of several environments in which a saved case fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnfuzz.cli.configured import TOLERANCE, profile_option
from attnfuzz.cli.parameters import DEVICE, FILE, KERNEL_HELP, PYTHON, TRUST, writable_file
from attnfuzz.cli.refusal import Refusal, refusing

if TYPE_CHECKING:
    from attnfuzz.campaign.environments import EnvironmentOutcome
    from attnfuzz.campaign.saved.replay import SavedCase
    from attnfuzz.execution.pythons import Python
    from attnfuzz.problems.tolerance import Tolerance

__all__ = ["command"]


@click.command(epilog=KERNEL_HELP)
@click.argument("case", type=FILE, metavar="CASE")
@PYTHON
@click.option("--kernel", metavar="KERNEL", help="Run this kernel on the case instead.")
@TRUST
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@click.option("--json", "json_file", type=FILE, callback=writable_file, help="Also write the result as JSON.")
@TOLERANCE
@profile_option("device", "tolerance")
def command(
    case: Path,
    pythons: tuple[Path, ...],
    kernel: str | None,
    trust: bool,
    device: str,
    json_file: Path | None,
    tolerance: Tolerance,
) -> int:
    """Run the regression file CASE in several environments, the oldest first, and name the first in which it fails.

    It runs with the first --python and the last. Where it passes with one and fails with the other, those between are
    halved until two neighbours are left; where it passes with both, all others run. The exit status is 1 if it fails
    anywhere.
    """
    if len(pythons) < 2:
        raise Refusal("bisect compares environments; name two or more, the oldest first: --python OLD --python NEW")
    with refusing():
        from attnfuzz.campaign.environments import bisect
        from attnfuzz.campaign.saved.replay import SavedCase
        from attnfuzz.corpus import load_regression
        from attnfuzz.execution.pythons import examine_all
        from attnfuzz.report.environments import print_environment, print_outcome, write_bisection
        from attnfuzz.report.terminal import make_console

        saved = SavedCase(case, load_regression(case))
        environments = examine_all(pythons)
        console = make_console()

        def run(python: Python) -> EnvironmentOutcome:
            print_environment(console, python)
            outcome = _outcome(saved, python, kernel=kernel, trust=trust, device=device, tolerance=tolerance)
            print_outcome(console, saved.path, outcome)
            return outcome

        found = bisect(environments, run, target=kernel or saved.regression.kernel)
        if all(outcome.ending == "is not judged" for outcome in found.ran.values()):
            raise Refusal(f"{case} {found}")
    console.print(f"{case} {found}", soft_wrap=True)
    if json_file is not None:
        try:
            write_bisection(json_file, found, case)
        except OSError as error:
            raise Refusal(f"--json {str(json_file)!r} cannot be written: {error.strerror}") from error
    return 0 if found.first_failing is None else 1


def _outcome(
    saved: SavedCase, python: Python, *, kernel: str | None, trust: bool, device: str, tolerance: Tolerance
) -> EnvironmentOutcome:
    """What comes of the case in one environment. Not to have the kernel is an outcome: older ones often have not."""
    from dataclasses import replace

    from attnfuzz.campaign.across import naming, outcome_of
    from attnfuzz.campaign.environments import EnvironmentOutcome
    from attnfuzz.campaign.saved.replay import replay
    from attnfuzz.declaration import KernelLoadError
    from attnfuzz.execution.runner import Runner

    with naming(python), Runner(device=device, tolerance=tolerance, python=python.path) as runner:
        try:
            results = list(replay([saved], runner, kernels=[kernel] if kernel else [], trust=trust))
        except KernelLoadError as error:
            return EnvironmentOutcome(python, runner.device_name, "is not judged", message=str(error))
        if len(results) != 1:
            number = f"{len(results)} kernels" if results else "no kernel"
            raise Refusal(f"--kernel {kernel!r} names {number} of {saved.regression.problem}; bisect is about one")
        return outcome_of(replace(results[0], python=python, device=runner.device_name))
