"""``attnfuzz declare``: what a kernel supports, found out and written as Python to paste."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnfuzz.cli.options import DEVICE, duration
from attnfuzz.cli.output import Refusal, refusing, while_anyone_reads

if TYPE_CHECKING:
    from attnfuzz.campaign.result import CampaignResult

__all__ = ["command"]


@click.command()
@click.argument("kernel", metavar="FILE[:NAME]")
@click.option(
    "--budget", callback=duration, default="5s", show_default=True, help="How long to search within that declaration."
)
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of that search.")
def command(kernel: str, budget: float, device: str, seed: int) -> int:
    """Find out what the kernels of FILE take, and print the Supports(...) that is true of each.

    Each kernel runs on some dozens of small cases: dtypes, layouts, strides, head sizes, page sizes, GQA ratios,
    log-sum-exp, empty sequences. What raises or fails throughout is left out; fields that it declares stay as they are.
    Then what is left is searched for a few seconds. What fails there is a bug, and no declaration is made of it: then
    the exit status is 1. What a further declaration would end is told beside it, and does not count.
    """
    started = time.monotonic()
    from attnfuzz.campaign.result import Reporter
    from attnfuzz.campaign.startup import CampaignRequest, run_campaign
    from attnfuzz.report.declarations import print_declared
    from attnfuzz.report.terminal import make_console

    with refusing(), tempfile.TemporaryDirectory() as scratch:
        request = CampaignRequest(
            kernels=(kernel,),
            started=started,
            budget_s=budget,
            save_folder=Path(scratch) / "found",
            device=device,
            seed=seed,
        )
        result = run_campaign(request, Reporter(), state_folder=Path(scratch))
        _refuse_unless_searched(result)
        with while_anyone_reads():
            print_declared(make_console(), result)
    return 1 if result.fails else 0


def _refuse_unless_searched(result: CampaignResult) -> None:
    if result.stop_reason == "environment" or (result.troubles and not result.statistics.cases):
        raise Refusal(result.troubles[0])
