"""``attnfuzz declare``: what a kernel supports, found out and written as Python to paste."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click

from attnfuzz.cli.options import DEVICE, budget_option
from attnfuzz.cli.outcome import Outcome, outcome_of, why_not_judged
from attnfuzz.cli.output import Refusal, refusing, while_anyone_reads


@click.command()
@click.argument("kernel", metavar="FILE[:NAME]")
@budget_option("5s", "How long to search within that declaration.")
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of that search.")
def command(kernel: str, **asked: Any) -> Outcome:
    """Find out what the kernels of FILE take, and print the Supports(...) that is true of each.

    Each kernel runs on some dozens of small cases: dtypes, layouts, strides, head sizes, page sizes, GQA ratios,
    log-sum-exp, empty sequences. Values for which it raises or fails throughout are left out; fields that it declares
    stay as they are. The rest is searched for a few seconds. A failure there is a bug, which no declaration is made of,
    and the exit status is 1; it is 2 if not all could be searched. Questions, which a further declaration would answer,
    are told beside it and do not count.
    """
    started = time.monotonic()
    from attnfuzz.campaign.request import CampaignRequest
    from attnfuzz.campaign.result import Reporter
    from attnfuzz.campaign.startup import run_campaign
    from attnfuzz.report.declarations import print_declared
    from attnfuzz.report.terminal import make_console

    with refusing(), tempfile.TemporaryDirectory() as scratch:
        request = CampaignRequest(
            kernels=(kernel,),
            started=started,
            save_folder=Path(scratch) / "found",
            asks_first=True,
            **asked,
        )
        result = run_campaign(request, Reporter(), state_folder=Path(scratch))
        if not result.statistics.cases and not result.findings and result.interrupted_by is None:
            raise Refusal(why_not_judged(result))
        with while_anyone_reads():
            print_declared(make_console(), result)
    return outcome_of(result)
