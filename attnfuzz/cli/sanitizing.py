"""``--sanitizer`` of ``attnfuzz replay`` and ``attnfuzz explore``: the same under NVIDIA's compute-sanitizer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from attnfuzz.cli.outcome import Outcome
from attnfuzz.cli.output import Refusal
from attnfuzz.oracles import registry
from attnfuzz.sanitizer.tool import TOOLS, SanitizerUnavailable, Tool

if TYPE_CHECKING:
    from rich.console import Console

    from attnfuzz.campaign.saved.replay import Replayed, SavedCase
    from attnfuzz.campaign.startup import CampaignRequest
    from attnfuzz.declaration import Declaration
    from attnfuzz.judging.runner import Runner
    from attnfuzz.sanitizer.findings import Culprit

__all__ = ["SANITIZER", "explore_sanitized", "found_by_others", "replay_sanitized"]

SANITIZER = click.option(
    "--sanitizer",
    type=click.Choice(TOOLS),
    help="Run kernels under this tool of NVIDIA's compute-sanitizer, and nothing but the tool judges. Far slower.",
)

_EXPLORES_WITH = {"kernels", "budget", "device", "seed", "save_dir", "fail_fast", "quiet", "sanitizer"}


@contextmanager
def refusing_sanitizer() -> Iterator[None]:
    """Where the tool is missing, or cannot work, one sentence."""
    try:
        yield
    except SanitizerUnavailable as error:
        raise Refusal(f"--sanitizer: {error}") from error


def replay_sanitized(
    saved: Sequence[SavedCase],
    runner: Runner,
    tool: Tool,
    *,
    kernels: Sequence[str],
    on: Sequence[str],
    trust: bool,
) -> Iterator[Replayed]:
    """As `replay`, but each case is in a process under `tool`, which alone judges. Raises Refusal."""
    from attnfuzz.campaign.saved.replay import SavedRun, preceding_for, replay
    from attnfuzz.cases.supported import adapt_options
    from attnfuzz.corpus import Regression
    from attnfuzz.sanitizer.findings import judge_sanitized
    from attnfuzz.sanitizer.running import Sanitizer
    from attnfuzz.verdict import Verdict

    with refusing_sanitizer():
        sanitizer = Sanitizer(tool, device=runner.device)

        def run(regression: Regression, declaration: Declaration, runner: Runner) -> SavedRun:
            del runner  # its executors are not those that are sanitized
            case = adapt_options(regression.case, declaration.options)
            failure = judge_sanitized(sanitizer, declaration, case, preceding_for(declaration, regression))
            return SavedRun(Verdict(failure=failure), failed=int(failure is not None), runs=1)

        yield from replay(saved, runner, kernels=kernels, on=on, trust=trust, run=run)


def found_by_others(saved: Sequence[SavedCase]) -> str:
    """What to say of cases that only a sanitizer can judge, if there are any; the oracles say nothing of them."""
    findings = [one.regression.finding for one in saved]
    kinds = [one.kind for one in findings if one.oracle == registry.SANITIZER.name]
    tools = sorted({kind.partition(":")[0] for kind in kinds})
    if not tools:
        return ""
    how = " and ".join(f"--sanitizer {tool}" for tool in tools)
    return f"{len(kinds)} of these were found under compute-sanitizer, and may pass without: replay them with {how}"


def explore_sanitized(request: CampaignRequest, tool: Tool, *, quiet: bool) -> Outcome:
    """Search as `request` says, one process after the other. Raises Refusal."""
    _refuse_what_goes_without()
    from attnfuzz.campaign.startup import load_searchable
    from attnfuzz.judging.runner import Runner
    from attnfuzz.report.terminal import make_console
    from attnfuzz.sanitizer.findings import Search
    from attnfuzz.sanitizer.running import Sanitizer

    console = make_console()

    def told(declaration: Declaration, culprit: Culprit, path: Path) -> None:
        _print_finding(console, declaration, culprit, path)

    with refusing_sanitizer():
        with Runner(device=request.device) as runner:
            sanitizer = Sanitizer(tool, device=runner.device)
            kernels = load_searchable(runner, request.kernels)
            device_name = runner.device_name
        seed = secrets.randbits(32) if request.seed is None else request.seed
        if not quiet:
            console.print(f"{len(kernels)} kernels under {tool} on {device_name}, seed {seed}", soft_wrap=True)
        search = Search(sanitizer, kernels, seed=seed, device_name=device_name)
        until = time.monotonic() + request.budget_s
        try:
            result = search.run(request.save_folder, until=until, fail_fast=request.fail_fast, told=told)
        except OSError as error:
            raise Refusal(f"{request.save_folder} cannot be written: {error.strerror}") from error
    found = len(result.culprits)
    console.print(
        f"{result.cases} cases under {tool} in {sanitizer.processes} processes: "
        f"{found} finding{'' if found == 1 else 's'}",
        soft_wrap=True,
    )
    if result.unreached:
        were = "kernel was" if len(result.unreached) == 1 else "kernels were"
        names = ", ".join(result.unreached)
        console.print(f"{len(result.unreached)} {were} never reached: {names}; raise --budget", soft_wrap=True)
    return Outcome(judged=result.cases, failed=bool(found), missed=bool(result.unreached))


def _refuse_what_goes_without() -> None:
    """Raise Refusal for options that a search under a sanitizer does not know; settings may have them all the same."""
    context = click.get_current_context()
    given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    other = sorted(set(given) - _EXPLORES_WITH)
    if other:
        option = {parameter.name: parameter.opts[0] for parameter in context.command.params}[other[0]]
        raise Refusal(
            f"{option} does not go with --sanitizer, which judges one process at a time and neither shrinks nor "
            f"reports; leave it out, or replay what is found with other options"
        )


def _print_finding(console: Console, declaration: Declaration, culprit: Culprit, path: Path) -> None:
    from rich.text import Text

    failure = culprit.failure
    console.print(Text(f"FOUND  {declaration.target}  {path}", style="bold red"), soft_wrap=True)
    for line in (f"{failure.name}: {failure.message}", *failure.details):
        console.print(Text(f"      {line}"), soft_wrap=True)
