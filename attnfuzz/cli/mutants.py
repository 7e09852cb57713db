"""``attnfuzz mutants``: how good a suite is, measured by the bugs that it finds in changed copies of a kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnfuzz.cli.options import (
    DEVICE,
    FILE,
    KERNEL_HELP,
    SHARD,
    Shard,
    budget_option,
    number_of_workers,
    writable_file,
)
from attnfuzz.cli.outcome import SHOWN, Outcome
from attnfuzz.cli.output import Refusal, refusing, while_anyone_reads, write_asked

if TYPE_CHECKING:
    from attnfuzz.mutation.measurement import MeasuredMutants, MutantsRequest


def _operators(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    from attnfuzz.mutation.operators import OPERATOR_NAMES

    for name in value:
        if name not in OPERATOR_NAMES:
            raise click.BadParameter(f"{name!r} must be one of {', '.join(OPERATOR_NAMES)}", ctx, param)
    return value


@click.command(epilog=KERNEL_HELP)
@click.argument("kernels", nargs=-1, required=True, metavar="KERNEL...")
@budget_option("30s", "Of the hunt for each mutant.")
@click.option("--jobs", callback=number_of_workers, default="auto", show_default=True, help="Mutants at a time.")
@click.option("--with", "command", metavar="COMMAND", help="Have a test command kill: 'pytest tests/test_mine.py'.")
@click.option(
    "--equivalent",
    "equivalents",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="List of mutants that nothing can find  [default: equivalent_mutants.toml beside the source]",
)
@click.option("--operator", "operators", multiple=True, callback=_operators, help="Only mutants of this operator.")
@click.option("--mutant", "ids", multiple=True, metavar="ID", help="Only this mutant.")
@SHARD
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of the cases drawn.")
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@click.option("--json", "json_file", type=FILE, callback=writable_file, help="Also write everything as JSON.")
@click.option("-o", "--output", type=FILE, callback=writable_file, help="Also write tables and survivors as Markdown.")
@click.option(
    "--resume",
    "earlier",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Go on from what --json wrote, also where that was interrupted.",
)
@click.option("--list", "only_list", is_flag=True, help="Print the mutants and run none.")
@click.option("--quiet", is_flag=True, help="Print only the result.")
def command(
    json_file: Path | None,
    output: Path | None,
    earlier: Path | None,
    only_list: bool,
    quiet: bool,
    shard: Shard | None,
    **asked: Any,
) -> Outcome:
    """Change the Triton code of KERNELs, one small bug at a time, and tell which of these mutants are found.

    Each is put to attnfuzz's search, or to the tests that --with names. No file is changed. The exit status is 1 if a
    mutant survives.
    """
    from attnfuzz.mutation.measurement import MutantsRequest

    part = (shard.number, shard.of) if shard is not None and shard.of is not None else (1, 1)
    request = MutantsRequest(shard=part, **asked)
    if only_list:
        return _list(request)
    if earlier is not None:
        request = _resumed(request, earlier)
    measured = _measure(request, json_file=json_file, quiet=quiet)
    from attnfuzz.report.mutants import write_mutants_json, write_mutants_markdown

    write_asked(
        ("--json", json_file, partial(write_mutants_json, measured)),
        ("--output", output, partial(write_mutants_markdown, measured)),
    )
    return outcome_of_mutants(measured)


def outcome_of_mutants(measured: MeasuredMutants) -> Outcome:
    """It fails unless every mutant is killed, equivalent or stillborn; missed are those that tests say nothing of."""
    statuses = {outcome.status for _, outcome in measured.outcomes}
    missed = "error" in statuses
    return Outcome(judged=len(measured.outcomes) or None, failed="survived" in statuses, missed=missed)


def _list(request: MutantsRequest) -> Outcome:
    from attnfuzz.judging.runner import Runner
    from attnfuzz.mutation.measurement import choose_mutants, in_shard
    from attnfuzz.report.mutants import print_mutants
    from attnfuzz.report.terminal import make_console

    with refusing(), Runner(device="cpu") as runner:
        _, mutants = choose_mutants(runner, request)
    print_mutants(make_console(), in_shard(mutants, request.shard))
    return SHOWN


def _resumed(request: MutantsRequest, earlier: Path) -> MutantsRequest:
    """``request`` with what ``earlier`` tells. Raises Refusal if that was measured in another way."""
    from attnfuzz.report.mutants import known_outcomes, read_mutants_json

    try:
        found = read_mutants_json(earlier)
    except OSError as error:
        raise Refusal(f"--resume {str(earlier)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Refusal(f"--resume cannot be read: {error}") from error
    before = {"budget": f"{found.budget_s:g}s", "seed": str(found.seed), "with": found.killer}
    now = {"budget": f"{request.budget_s:g}s", "seed": str(request.seed), "with": request.command or "attnfuzz"}
    for option, value in before.items():
        if value != now[option]:
            raise Refusal(
                f"--resume {str(earlier)!r} was measured with --{option} {value}, not {now[option]}; use the same, or "
                "leave out --resume"
            )
    return replace(request, known=known_outcomes(found), earlier_s=found.elapsed_s, earlier_device=found.device)


def _measure(request: MutantsRequest, *, json_file: Path | None, quiet: bool) -> MeasuredMutants:
    from attnfuzz.mutation.measurement import measure
    from attnfuzz.report.mutants import Checkpoints, MutantsProgress, print_measured
    from attnfuzz.report.terminal import make_console

    console = make_console()
    progress = MutantsProgress(console, quiet=quiet)
    so_far = (lambda measured: None) if json_file is None else Checkpoints(json_file)
    with refusing():
        measured = measure(request, note=progress.note, on_outcome=progress.on_outcome, so_far=so_far)
    with while_anyone_reads():
        print_measured(console, measured)
    return measured
