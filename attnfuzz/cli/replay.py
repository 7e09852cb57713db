"""``attnfuzz replay``, and ``attnfuzz bisect`` for the first of several environments in which a saved case fails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from attnfuzz.cli.options import (
    DEVICE,
    FILE,
    KERNEL_HELP,
    PYTHON,
    SHARD,
    TOLERANCE,
    TRUST,
    configured,
    profile_option,
    writable_file,
)
from attnfuzz.cli.outcome import SHOWN, Outcome
from attnfuzz.cli.output import Refusal, refusing, write_asked
from attnfuzz.cli.sanitizing import SANITIZER, found_by_others, replay_sanitized

if TYPE_CHECKING:
    from attnfuzz.campaign.environments import EnvironmentOutcome
    from attnfuzz.campaign.saved.replay import SavedCase
    from attnfuzz.cli.options import Shard
    from attnfuzz.isolation.pythons import Python
    from attnfuzz.problems.declared_numerics import Tolerance
    from attnfuzz.sanitizer.running import Tool


_NONE = "none"


@click.command(epilog=KERNEL_HELP)
@click.argument("paths", nargs=-1, type=FILE, metavar="[PATH]...")
@click.option("--kernel", "kernels", multiple=True, metavar="KERNEL", help="Run on this kernel instead; repeatable.")
@TRUST
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@click.option("--json", "json_file", type=FILE, callback=writable_file, help="Also write the results as JSON.")
@click.option(
    "--on",
    "others",
    multiple=True,
    metavar="KERNEL",
    help="Also run each case on these kernels, as far as they support it; repeatable, 'none' for none.",
)
@click.option(
    "--known",
    is_flag=True,
    help="Open cases are expected to fail (xfail), and fail the command if they pass (XPASS).",
)
@SHARD
@PYTHON
@SANITIZER
@TOLERANCE
@profile_option("device", "on", "tolerance")
def command(
    paths: tuple[Path, ...],
    kernels: tuple[str, ...],
    trust: bool,
    device: str,
    json_file: Path | None,
    others: tuple[str, ...],
    known: bool,
    shard: Shard | None,
    pythons: tuple[Path, ...],
    sanitizer: Tool | None,
    tolerance: Tolerance,
) -> Outcome:
    """Run saved cases (files or folders; the regressions folder by default) again.

    Each runs on the kernel that it names, which must be bundled or lie in this project, unless --kernel or --trust says
    what is to run. The exit status is 1 if any fails, and 2 if one could not be run here, or none was.
    A kernel of --on may compute another problem, or take another layout or no gaps in memory: the case is then
    described in its way.
    A folder that FlashInfer wrote with FLASHINFER_LOGLEVEL=10, or of one call in it, is made into saved cases first.
    Cases that a killed campaign left in .attnfuzz are removed if they pass.
    With several --python each case runs in each of these environments, and differences are told.
    With --shard this machine runs its part of the cases; where that is none, it says so and ends with 0.
    """
    if pythons and sanitizer:
        raise Refusal("--python does not go with --sanitizer, which starts this environment's Python; leave one out")
    with refusing():
        saved = load_saved(paths, configured().regressions)
        from attnfuzz.campaign.compared_environments import naming
        from attnfuzz.campaign.judge.journal import forget
        from attnfuzz.campaign.saved.replay import cleared, replay
        from attnfuzz.isolation.pythons import examine_all
        from attnfuzz.judging.runner import Runner
        from attnfuzz.report.saved_cases import print_replayed, print_total, write_replayed
        from attnfuzz.report.terminal import make_console, print_environment

        console = make_console()
        if shard is not None and shard.of is not None:
            part = saved[shard.number - 1 :: shard.of]
            console.print(f"{shard}: {len(part)} of {len(saved)} saved cases", soft_wrap=True)
            if not part:
                console.print("there are more shards than saved cases: nothing is left for this one to run")
                write_asked(("--json", json_file, lambda path: write_replayed(path, [], device="")))
                return SHOWN  # others run them all, so this one has missed nothing
            saved = part
        results = []
        is_typed = click.get_current_context().get_parameter_source("others") is ParameterSource.COMMANDLINE
        on = [one for one in others if one != _NONE and (is_typed or not kernels)]  # the project's go with its own
        environments: list[Python | None] = [*examine_all(pythons)]
        for python in environments or [None]:
            print_environment(console, python)
            where = None if python is None else python.path
            with naming(python), Runner(device=device, tolerance=tolerance, python=where) as runner:
                replaying = (
                    replay(saved, runner, kernels=kernels, on=on, trust=trust)
                    if sanitizer is None
                    else replay_sanitized(saved, runner, sanitizer, kernels=kernels, on=on, trust=trust)
                )
                for result in replaying:
                    results.append(replace(result, python=python, device=runner.device_name))
                    print_replayed(console, results[-1], known=known)
                device_name = runner.device_name
    # other kernels, and a tool that looks at something else, say nothing of the one that was running
    innocent = set() if kernels or sanitizer else cleared(results)
    print_total(console, saved, results, removed=innocent, known=known)
    if sanitizer is None and (remark := found_by_others(saved)):
        console.print(remark, soft_wrap=True)
    forget(innocent)
    write_asked(("--json", json_file, lambda path: write_replayed(path, results, device=device_name)))
    return Outcome(
        judged=sum(one.verdict is not None for one in results),
        failed=any(one.is_unexpected if known else one.failed for one in results),
        missed=any(one.is_missed for one in results),
    )


def load_saved(paths: tuple[Path, ...], folder: Path | None = None) -> list[SavedCase]:
    """Read every file in ``paths``, or else in ``folder``, by default the one called ``regressions`` here.

    What is wrong with any of them is said before the first one runs. Raises Refusal.
    """
    from attnfuzz.corpus import DEFAULT_FOLDER, regression_files

    places = tuple(place for path in paths or (folder or Path(DEFAULT_FOLDER),) for place in _as_files(path))
    files = regression_files(places) if paths or places[0].exists() else []
    if not files:
        where = ", ".join(str(path) for path in places)
        raise Refusal(f"there is no regression file (*.json) in {where}; save one with attnfuzz explore")
    return read_saved(files)


def _as_files(path: Path) -> tuple[Path, ...]:
    """``path``, or of a folder of calls that FlashInfer has dumped the cases that are made of them."""
    from attnfuzz.testing.flashinfer_dumps import DumpError, cases_of_dump, is_dump

    if not is_dump(path):
        return (path,)
    from attnfuzz.testing.capture import CAPTURED
    from attnfuzz.untrusted_text import only_printable

    try:
        found = cases_of_dump(path, Path(CAPTURED))
    except DumpError as error:
        raise Refusal(str(error)) from error
    for reason in found.left_out:
        click.echo(only_printable(f"not made a case: {reason}"), err=True)
    if not found.files:
        raise Refusal(f"{path} has no call of a paged decode or prefill wrapper of FlashInfer that a case describes")
    return tuple(found.files)


def read_saved(files: Iterable[Path]) -> list[SavedCase]:
    """Read every file. Raises Refusal that says of each what is wrong with it, if anything is."""
    from attnfuzz.campaign.saved.replay import SavedCase
    from attnfuzz.corpus import RegressionError, load_regression

    saved, wrong = [], []
    for file in files:
        try:
            saved.append(SavedCase(file, load_regression(file)))
        except RegressionError as error:
            wrong.append(str(error))
    if wrong:
        raise Refusal("\n".join(wrong))
    return saved


@click.command(epilog=KERNEL_HELP)
@click.argument("case", type=FILE, metavar="CASE")
@PYTHON
@click.option("--kernel", metavar="KERNEL", help="Run this kernel on the case instead.")
@TRUST
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@click.option("--json", "json_file", type=FILE, callback=writable_file, help="Also write the result as JSON.")
@TOLERANCE
@profile_option("device", "tolerance")
def bisect_command(
    case: Path,
    pythons: tuple[Path, ...],
    kernel: str | None,
    trust: bool,
    device: str,
    json_file: Path | None,
    tolerance: Tolerance,
) -> Outcome:
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
        from attnfuzz.isolation.pythons import examine_all
        from attnfuzz.report.saved_cases import print_outcome, write_bisection
        from attnfuzz.report.terminal import make_console, print_environment

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
    write_asked(("--json", json_file, lambda path: write_bisection(path, found, case)))
    judged = sum(outcome.ending != "is not judged" for outcome in found.ran.values())
    return Outcome(judged=judged, failed=found.first_failing is not None)


def _outcome(
    saved: SavedCase, python: Python, *, kernel: str | None, trust: bool, device: str, tolerance: Tolerance
) -> EnvironmentOutcome:
    """The outcome of the case in one environment. Not to have the kernel is an outcome: older ones often have not."""
    from dataclasses import replace

    from attnfuzz.campaign.compared_environments import naming, outcome_of
    from attnfuzz.campaign.environments import EnvironmentOutcome
    from attnfuzz.campaign.saved.replay import replay
    from attnfuzz.declaration import KernelLoadError
    from attnfuzz.judging.runner import Runner

    with naming(python), Runner(device=device, tolerance=tolerance, python=python.path) as runner:
        try:
            results = list(replay([saved], runner, kernels=[kernel] if kernel else [], trust=trust))
        except KernelLoadError as error:
            return EnvironmentOutcome(python, runner.device_name, "is not judged", message=str(error))
        if len(results) != 1:
            number = f"{len(results)} kernels" if results else "no kernel"
            raise Refusal(f"--kernel {kernel!r} names {number} of {saved.regression.problem}; bisect is about one")
        return outcome_of(replace(results[0], python=python, device=runner.device_name))
