"""``attnfuzz list``: the kernels that can be searched."""

from __future__ import annotations

import click

from attnfuzz.cli.parameters import KERNEL_HELP
from attnfuzz.cli.refusal import refusing

__all__ = ["command"]


@click.command(epilog=KERNEL_HELP)
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("-v", "--verbose", is_flag=True, help="Show all that each kernel declares.")
def command(kernels: tuple[str, ...], verbose: bool) -> int:
    """List KERNELs (all bundled ones by default) with their problems and options."""
    with refusing():
        from attnfuzz.judging.runner import Runner
        from attnfuzz.report.declarations import print_kernels
        from attnfuzz.report.terminal import make_console

        with Runner(device="cpu") as runner:
            declarations = runner.declarations(list(kernels) or ["*"])
    print_kernels(make_console(), declarations, verbose=verbose)
    return 0
