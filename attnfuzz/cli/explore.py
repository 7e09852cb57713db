"""``attnfuzz explore``: search for bugs within a budget."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from attnfuzz.cli.options import (
    AGAINST,
    DEVICE,
    FILE,
    KERNEL_HELP,
    ORACLE,
    PYTHON,
    SHARD,
    TOLERANCE,
    TRUST,
    WORKERS,
    budget_option,
    profile_option,
    refuse_untyped_links,
    writable_file,
)
from attnfuzz.cli.outcome import Outcome, outcome_of
from attnfuzz.cli.output import Refusal, refusing, while_anyone_reads, write_asked
from attnfuzz.config import MAX_ASKED_LENGTH, MAX_ASKED_SEQS, RULES

if TYPE_CHECKING:
    from attnfuzz.campaign.request import CampaignRequest
    from attnfuzz.campaign.result import CampaignResult, Reporter
    from attnfuzz.cli.options import Shard
    from attnfuzz.isolation.pythons import Python


def _compositions(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    from attnfuzz.declaration import parts_of

    for one in given:
        if parts_of(one) is None:
            raise click.BadParameter(f"{one!r} must name two kernels, as KERNEL+MERGE or WRITER+READER", ctx, param)
    return given


@click.command(epilog=KERNEL_HELP)
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option(
    "--compose",
    "compositions",
    multiple=True,
    callback=_compositions,
    metavar="KERNEL+MERGE",
    help="Also search attention over two parts by KERNEL, merged by MERGE; WRITER+READER: over the cache that a kernel "
    "of CacheWrite wrote. Repeatable.",
)
@budget_option("60s", "Time to search, start-up not included; up to 10 s more until it is known what kernels take.")
@WORKERS
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of the search; drawn and printed by default.")
@SHARD
@click.option("--oracle", "oracles", type=ORACLE, multiple=True, help="Only these oracles (crash and hang stay on).")
@click.option(
    "--max-seq-len",
    type=click.IntRange(1, MAX_ASKED_LENGTH),
    help="Tokens of the longest sequence; by default as many as the kernel is fast enough for.",
)
@click.option("--max-seqs", type=click.IntRange(1, MAX_ASKED_SEQS), help="Draw batches of up to so many sequences.")
@click.option("--save-dir", "save_folder", type=FILE, help="Where findings go  [default: regressions]")
@click.option("--json", "json_file", type=FILE, callback=writable_file, help="Also write a summary as JSON.")
@click.option(
    "--junit", "junit_file", type=FILE, callback=writable_file, help="Also write a JUnit report for CI systems."
)
@click.option("--html", "html_file", type=FILE, callback=writable_file, help="Also write the report as one HTML page.")
@click.option("--fail-fast/--no-fail-fast", help="Stop at the first finding that counts, once it is shrunk.")
@PYTHON
@AGAINST
@TOLERANCE
@profile_option(*RULES)
@click.option(
    "--pedantic",
    is_flag=True,
    help="Search everything that the kernel does not declare away, not only what it was found to take.",
)
@click.option("--quiet", is_flag=True, help="Print only the result.")
@click.option("--resume", is_flag=True, help="Go on with the campaign that was interrupted in this folder.")
@TRUST
def command(
    kernels: tuple[str, ...],
    compositions: tuple[str, ...],
    shard: Shard | None,
    save_folder: Path | None,
    json_file: Path | None,
    junit_file: Path | None,
    html_file: Path | None,
    pythons: tuple[Path, ...],
    quiet: bool,
    resume: bool,
    trust: bool,
    **asked: Any,  # fields of the request
) -> Outcome:
    """Search KERNELs (all bundled ones by default) for bugs until the budget is spent.

    Where a kernel of yours declares nothing, the search finds out what it takes (see attnfuzz declare), searches only
    that, and names what it leaves out. The exit status is 1 for findings, but not for questions that a declaration
    answers nor for what --against knows; it is 2 if a kernel could not be judged, or an --oracle applied to no case.
    With --shard each machine has a seed of its own, made of the one given. Several --python share the budget, and what
    is found in one of these environments is run in the others.
    """
    started = time.monotonic()
    from attnfuzz.campaign.request import CampaignRequest
    from attnfuzz.isolation.pythons import examine_all

    if shard is not None and (given := asked["seed"]) is not None:
        asked["seed"] = seed = shard.own(given)
        if seed != given and not quiet:
            click.echo(f"{shard}: seed {seed}, made of {given}")
    with refusing():
        request = CampaignRequest(
            kernels=(*kernels, *compositions) or ("*",),
            started=started,
            save_folder=usable_save_folder(save_folder),
            **asked,
        )
        environments = examine_all(pythons)
        if resume and len(environments) > 1:
            raise Refusal("--resume goes on in one environment; give it the --python of the interrupted campaign alone")
        if len(environments) == 1:
            request = replace(request, python=environments[0])
        if resume:
            request = _resumed(request, trust=trust)
        result = _explore(request, environments, quiet=quiet)
    if json_file or junit_file or html_file:
        from attnfuzz.report.html import write_html
        from attnfuzz.report.junit import write_junit
        from attnfuzz.report.summary import write_summary

        write_asked(
            ("--json", json_file, partial(write_summary, result)),
            ("--junit", junit_file, partial(write_junit, result)),
            ("--html", html_file, partial(write_html, result)),
        )
    return outcome_of(result)


def _explore(request: CampaignRequest, environments: Sequence[Python], *, quiet: bool) -> CampaignResult:
    from attnfuzz.campaign.compared_environments import naming, search_across
    from attnfuzz.campaign.startup import run_campaign
    from attnfuzz.report.terminal import make_console, make_reporter, print_environment, print_result

    console = make_console()

    def reporter(python: Python | None) -> Reporter:
        if not quiet:
            print_environment(console, python)
        return make_reporter(console, quiet=quiet)

    if len(environments) > 1:
        result = search_across(request, environments, reporter)
    else:
        with naming(request.python):
            result = run_campaign(request, reporter(request.python))
    if result.stop_reason == "environment" and not result.statistics.cases:
        raise Refusal(result.troubles[0])
    with while_anyone_reads():
        print_result(console, result)
    return result


def _resumed(request: CampaignRequest, *, trust: bool) -> CampaignRequest:
    """The next part of an interrupted campaign; what is given on the command line counts more than what it had."""
    from attnfuzz.campaign.request import resumed
    from attnfuzz.campaign.saved.state import load_state

    context = click.get_current_context()
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    return resumed(request, load_state(), given=given, trust=trust)


def usable_save_folder(given: Path | None) -> Path:
    """Where findings go. Raises Refusal for one that is asked for and cannot be made; none is made yet.

    And for a link on the way, unless the user typed the name: then that is where findings are wanted.
    """
    from attnfuzz.corpus import DEFAULT_FOLDER
    from attnfuzz.own_files import why_not_made

    folder = given or Path(DEFAULT_FOLDER)
    refuse_untyped_links(folder, "save_folder", "--save-dir")
    if folder.is_file():
        raise Refusal(f"--save-dir {str(folder)!r} is a file; name a folder")
    if given is not None and (error := why_not_made(given)) is not None:
        why = f"{error.strerror}: {str(error.filename)!r}"
        raise Refusal(f"--save-dir {str(folder)!r} cannot be made ({why}); name another folder")
    return folder
