"""``attnfuzz conformance``: one fixed set of cases on the kernels of all engines."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnfuzz.cli.options import DEVICE, FILE, KERNEL_HELP, duration, of_engines, writable_file
from attnfuzz.cli.outcome import Outcome
from attnfuzz.cli.output import Refusal, refusing, while_anyone_reads, write_asked

if TYPE_CHECKING:
    from attnfuzz.declaration import Declaration
    from attnfuzz.judging.runner import Runner


@click.command(epilog=KERNEL_HELP)
@click.argument("kernels", nargs=-1, metavar="[ENGINE|KERNEL]...")
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@click.option("--budget", callback=duration, default=None, help="Time for all, shared out; what is left is not run.")
@click.option("--json", "json_file", type=FILE, callback=writable_file, help="Also write all outcomes as JSON.")
@click.option("--html", "html_file", type=FILE, callback=writable_file, help="Also write kernels x features as a page.")
def command(
    kernels: tuple[str, ...], device: str, budget: float | None, json_file: Path | None, html_file: Path | None
) -> Outcome:
    """Put a fixed set of cases to the kernels of ENGINEs (all that are installed by default), or to any KERNEL.

    Each case stands for a feature of inputs: a dtype, a head size, an empty sequence. It is described in the kernel's
    way, and what a kernel does not declare to support is no failure. With --budget each kernel has its share of what
    is left, and a word on each feature before the second case of any. The exit status is 1 if any kernel fails,
    and 2 if one could not run any case that it supports here.
    Stopped by Ctrl-C or SIGTERM, it writes what it knows by then.
    """
    until = math.inf if budget is None else time.monotonic() + budget
    with refusing():
        from attnfuzz.campaign.stopping import Interrupts
        from attnfuzz.conformance import examine, load_set
        from attnfuzz.judging.runner import Runner
        from attnfuzz.report.conformance import (
            print_absent,
            print_causes,
            print_examined,
            write_conformance,
            write_page,
        )
        from attnfuzz.report.terminal import make_console

        console = make_console()

        def note(text: str) -> None:
            with while_anyone_reads():
                console.print(text, soft_wrap=True, markup=False)

        with Runner(device=device) as runner:
            declarations, absent = _asked(kernels, runner)
            print_absent(console, absent)
            with Interrupts() as interrupts:
                result = examine(
                    declarations,
                    runner,
                    load_set(),
                    absent=absent,
                    done=lambda kernel: print_examined(console, kernel),
                    note=note,
                    stopped=lambda: interrupts.count > 0,
                    until=until,
                )
        with while_anyone_reads():
            print_causes(console, result)
    write_asked(
        ("--json", json_file, partial(write_conformance, result)), ("--html", html_file, partial(write_page, result))
    )
    return Outcome(
        judged=result.judged,
        failed=result.failed,
        missed=any(one.is_unjudged for one in result.kernels),
        signal=interrupts.first,
    )


def _asked(kernels: tuple[str, ...], runner: Runner) -> tuple[list[Declaration], list[str]]:
    """The kernels, and a sentence for each engine that is not there; only of engines that nobody named."""
    from attnfuzz.adapters import engines
    from attnfuzz.campaign.startup import load

    if kernels:
        known = engines()
        return load(runner, tuple(f"{one}:*" if one in known else one for one in kernels)), []
    found, absent = of_engines(partial(load, runner))
    if not found:
        raise Refusal(f"no engine is installed here; name kernels instead ({'; '.join(absent)})")
    return found, absent
