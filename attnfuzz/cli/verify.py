"""``attnfuzz verify``: pass or fail for one kernel, for whoever did not write it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from attnfuzz.cli.explore import usable_save_folder
from attnfuzz.cli.options import DEVICE, FILE, WORKERS, budget_option
from attnfuzz.cli.outcome import Outcome, outcome_of, why_not_judged
from attnfuzz.cli.output import Refusal, Undelivered, print_document, refusing, show_error, while_anyone_reads
from attnfuzz.untrusted_text import only_printable

if TYPE_CHECKING:
    from attnfuzz.campaign.finding import Finding
    from attnfuzz.campaign.result import CampaignResult
    from attnfuzz.corpus import Regression
    from attnfuzz.own_files import OwnFolder


_UNPACKED = "attnfuzz-solution-"


@click.command()
@click.argument("file", metavar="FILE[:NAME]")
@budget_option("60s", "Time to search, start-up not included.")
@WORKERS
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of the search; drawn and told by default.")
@click.option("--pedantic", is_flag=True, help="Leave nothing out that the kernel does not declare away.")
@click.option(
    "--save-dir", "save_folder", type=FILE, help="Write the counterexample there, and a script that shows it."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document (attnfuzz.verify/1) and nothing else.")
def command(file: str, save_folder: Path | None, as_json: bool, **asked: Any) -> Outcome:
    """Judge one kernel, written by whomever, and end with 0 if it passes, 1 if it fails, 2 if it cannot be judged.

    FILE is a Python file with a kernel, or a solution file of FlashInfer-Bench (.json). The search ends at the first
    finding that counts, once its case is small. Where the file declares nothing, the search finds out what the kernel
    takes, and is stricter than explore: it leaves out and names what the kernel refuses, but wrong numbers for a page
    size and lowered precision are failures. It writes only what --save-dir asks for.
    """
    started = time.monotonic()
    from attnfuzz.campaign.request import CampaignRequest
    from attnfuzz.campaign.result import Reporter
    from attnfuzz.campaign.startup import run_campaign

    outcome = Outcome(judged=0)
    try:
        if save_folder is not None:
            usable_save_folder(save_folder)
        with refusing(), _kernel_of(file) as target, tempfile.TemporaryDirectory(prefix="attnfuzz-verify-") as scratch:
            request = CampaignRequest(
                kernels=(target,),
                started=started,
                save_folder=Path(scratch, "found"),
                fail_fast=True,
                verifying=True,
                asks_first=True,
                **asked,
            )
            result = run_campaign(request, Reporter(), state_folder=Path(scratch))
            outcome = outcome_of(result)
            if result.fails:  # an interruption takes nothing from that
                outcome = replace(outcome, signal=None)
            elif outcome.status or result.unbuilt:
                raise Refusal(why_not_judged(result))
            _tell(result, file, target, save_folder, as_json=as_json)
    except Undelivered:
        raise
    except Refusal as refusal:
        if as_json:
            _print_error(file, refusal, time.monotonic() - started)
        if outcome.signal is None:
            raise
        show_error(refusal)
    return outcome


@contextmanager
def _kernel_of(file: str) -> Iterator[str]:
    """A context that loads the kernel; a solution file is unpacked for as long."""
    if not file.endswith(".json"):
        yield file
        return
    from attnfuzz.corpus.solution import SolutionError, load_solution, unpack

    with tempfile.TemporaryDirectory(prefix=_UNPACKED) as folder:
        try:
            target = unpack(load_solution(Path(file)), Path(folder))
        except SolutionError as error:
            raise Refusal(str(error)) from error
        yield target


def _tell(result: CampaignResult, file: str, target: str, save_dir: Path | None, *, as_json: bool) -> None:
    from attnfuzz.report.files import as_json as as_json_text
    from attnfuzz.report.terminal import make_console
    from attnfuzz.report.verified import counting, lines_of, verification_of

    told = counting(result)
    files = (None, None) if told is None or save_dir is None else _save(result, told.finding, target, save_dir)
    (searched,) = result.statistics.kernels.values()
    name = searched.declaration.target.rpartition(":")[2]
    place = file if file.endswith(".json") or file.endswith(f":{name}") else f"{file}:{name}"
    verification = verification_of(result, place, regression=files[0], script=files[1])
    if not as_json:
        with while_anyone_reads():
            console = make_console()
            for line in lines_of(verification):
                console.print(line, soft_wrap=True)
        return
    try:
        print_document(as_json_text(verification))
    except Undelivered:
        for line in lines_of(verification):  # a verdict that has been worked for is told all the same
            click.echo(only_printable(line), err=True)
        raise


def _save(result: CampaignResult, found: Finding, target: str, folder: Path) -> tuple[Path, Path | None]:
    """The counterexample, and a script where one can show it; the sources of a solution lie beside it then."""
    from attnfuzz.corpus import write_regression
    from attnfuzz.own_files import LinkError, OwnFolder
    from attnfuzz.report.scripts import why_no_script

    regression = found.regression(result.statistics.device_name)
    source = Path(target.rpartition(":")[0] or target).parent
    is_solution = source.name.startswith(_UNPACKED)
    try:
        if is_solution:
            kept = OwnFolder(folder / f"{found.declaration.name}-sources", below=folder)
            _copy(source, kept)
            regression = msgspec.structs.replace(regression, kernel=str(kept.path / target.removeprefix(f"{source}/")))
        path = write_regression(regression, folder)
        if is_solution or why_no_script(regression.finding.oracle):
            return path, None
        text = _script(regression, found)
        if text is None:
            return path, None
        return path, OwnFolder(folder).write(f"{path.stem}.py", text.encode())
    except LinkError as error:
        raise Refusal(str(error)) from error
    except OSError as error:
        raise Refusal(f"--save-dir {str(folder)!r} cannot be written: {error.strerror}; name another folder") from error


def _copy(sources: Path, folder: OwnFolder) -> None:
    """The files of a solution, without what came to be when they were imported."""
    for file in sorted(sources.rglob("*")):
        path = file.relative_to(sources)
        if file.is_file() and "__pycache__" not in path.parts:
            place = folder.inner(*path.parent.parts)
            place.make()
            place.write(path.name, file.read_bytes())


def _script(regression: Regression, found: Finding) -> str | None:
    """None for a case that is too large for one, and a kernel whose sources cannot be had."""
    from attnfuzz.declaration import KernelLoadError
    from attnfuzz.problems.limits import CaseTooLarge
    from attnfuzz.report.repro import repro_script  # loads torch

    try:
        return repro_script(regression, found.declaration)
    except (CaseTooLarge, KernelLoadError):
        return None


def _print_error(file: str, refusal: Refusal, elapsed_s: float) -> None:
    from attnfuzz.report.files import as_json
    from attnfuzz.report.verified import failed_to_verify

    try:
        print_document(as_json(failed_to_verify(file, refusal.message, elapsed_s)))
    except Undelivered as lost:
        raise Undelivered(f"{refusal.message}; and {lost.message}") from refusal
