"""``--sanitizer`` of ``attnfuzz replay``: the same under NVIDIA's compute-sanitizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from attnfuzz.cli.output import Refusal
from attnfuzz.oracles import registry
from attnfuzz.sanitizer.running import TOOLS, SanitizerUnavailable, Tool

if TYPE_CHECKING:
    from attnfuzz.campaign.saved.replay import Replayed, SavedCase
    from attnfuzz.declaration import Declaration
    from attnfuzz.judging.runner import Runner


SANITIZER = click.option(
    "--sanitizer",
    type=click.Choice(TOOLS),
    help="Run kernels under this tool of NVIDIA's compute-sanitizer, and nothing but the tool judges. Far slower.",
)


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

    def run(regression: Regression, declaration: Declaration, runner: Runner) -> SavedRun:
        del runner  # its executors are not those that are sanitized
        case = adapt_options(regression.case, declaration.options)
        failure = judge_sanitized(sanitizer, declaration, case, preceding_for(declaration, regression))
        return SavedRun(Verdict(failure=failure), failed=int(failure is not None), runs=1)

    try:
        sanitizer = Sanitizer(tool, device=runner.device)
        yield from replay(saved, runner, kernels=kernels, on=on, trust=trust, run=run)
    except SanitizerUnavailable as error:  # where the tool is missing, or cannot work
        raise Refusal(f"--sanitizer: {error}") from error


def found_by_others(saved: Sequence[SavedCase]) -> str:
    """A sentence on cases that only a sanitizer can judge, if there are any; the oracles say nothing of them."""
    findings = [one.regression.finding for one in saved]
    kinds = [one.kind for one in findings if one.oracle == registry.SANITIZER.name]
    tools = sorted({kind.partition(":")[0] for kind in kinds})
    if not tools:
        return ""
    how = " and ".join(f"--sanitizer {tool}" for tool in tools)
    return f"{len(kinds)} of these were found under compute-sanitizer, and may pass without: replay them with {how}"
