"""``attnfuzz tolerances``: what fixed tolerances let through, beside the derived bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from attnfuzz.cli.outcome import SHOWN, Outcome
from attnfuzz.cli.output import refusing, while_anyone_reads

if TYPE_CHECKING:
    from attnfuzz.testing.tolerances import Suite


@click.command()
@click.option("--seq-len", type=click.IntRange(2, 1 << 16), default=512, show_default=True)
@click.option("--head-size", type=click.IntRange(1, 1024), default=128, show_default=True)
@click.option("--heads", type=click.IntRange(1, 256), default=8, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=click.IntRange(1, 256), default=2, show_default=True)
@click.option(
    "--dtype", type=click.Choice(("float16", "bfloat16", "float32")), default="float16", show_default=True
)  # fmt: skip
@click.option(
    "--design",
    type=click.Choice(("flash", "eager", "split")),
    default="flash",
    show_default=True,
    help="How a right kernel rounds: weights in 16 bits, scores too, or 8 partial results too.",
)
@click.option("--tolerance", "given", metavar="ATOL,RTOL", multiple=True, help="Instead of the suites'; repeatable.")
@click.option("--draws", type=click.IntRange(1, 10_000), default=32, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
def command(
    seq_len: int, head_size: int, heads: int, kv_heads: int, dtype: str, design: str, given: tuple[str, ...],
    draws: int, seed: int,
) -> Outcome:  # fmt: skip
    """Print what the tolerances of engines' suites let through, and how often they fail a right kernel.

    It decodes one sequence with numbers from N(0, 1), as suites draw them, and counts for the derived error bound and
    for each tolerance in how many draws a right kernel fails, and in how many a wrong one passes: one that gives zeros,
    leaves out the last token, or has a scale that is 1 % too large. It runs PyTorch only.
    """
    from attnfuzz.testing.tolerances import MISTAKES, SUITES, Setting, weigh

    if heads % kv_heads:
        raise click.UsageError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    suites = tuple(map(_suite, given)) or SUITES
    setting = Setting(seq_len, head_size, heads, kv_heads, dtype, design, draws, seed)  # type: ignore[arg-type]  # click has checked it
    with refusing(), while_anyone_reads():
        told = weigh(setting, suites)
        click.echo(
            f"{dtype}, {seq_len} tokens, head size {head_size}, {heads} query heads on {kv_heads} KV heads, {design}: "
            f"outputs {told.size:.2g}, derived bound {told.bound:.2g}, error of a right kernel {told.error:.2g}\n"
        )
        click.echo(f"| of {draws} draws | a right kernel fails | {' | '.join(f'{one} passes' for one in MISTAKES)} |")
        click.echo(f"|---|---:|{'---:|' * len(MISTAKES)}")
        for one in told.weighed:
            click.echo(f"| {one.name} | {one.right_fails} | {' | '.join(str(one.passes[name]) for name in MISTAKES)} |")
    return SHOWN


def _suite(given: str) -> Suite:
    from attnfuzz.testing.tolerances import Suite

    try:
        atol, rtol = map(float, given.split(","))
    except ValueError:
        raise click.UsageError(f"--tolerance {given!r} must be two numbers, such as 1e-2,1e-3") from None
    return Suite(f"{atol:g}, {rtol:g}", atol, rtol)
