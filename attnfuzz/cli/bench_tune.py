"""``attnfuzz bench tune``: measure a kernel's options, and print a decision tree to commit."""

from __future__ import annotations

from pathlib import Path

import click

from attnfuzz.bench.tuning.batches import FEATURES
from attnfuzz.cli.bench_kernels import option_values
from attnfuzz.cli.parameters import DEVICE, FILE, KERNEL_HELP, duration, writable_file
from attnfuzz.cli.refusal import Refusal, refusing
from attnfuzz.problems.supports import OptionValue

__all__ = ["command"]

_HOST_KNOWS = FEATURES[:-1]


@click.command("tune", epilog=KERNEL_HELP)
@click.argument("kernel", metavar="KERNEL")
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE,...",
    callback=option_values,
    help="Values to try for an option, in place of all that the kernel declares; a single one keeps it fixed.",
)
@click.option(
    "--feature",
    "features",
    multiple=True,
    type=click.Choice(FEATURES),
    help="What a decision may depend on; by default what the host knows, so all but total_tokens.",
)
@click.option("--batches", type=click.IntRange(1, 1000), default=40, show_default=True, help="Ragged batches, at most.")
@click.option("--configurations", type=click.IntRange(1, 1000), default=48, show_default=True, help="At most.")
@click.option("--leaves", type=click.IntRange(1, 64), default=8, show_default=True, help="Of the tree, at most.")
@click.option("--cold/--warm", "is_cold", default=True, help="Keys and values in memory, or where they fit in L2.")
@click.option("--seconds", callback=duration, default="0.02s", show_default=True, help="Of each measurement.")
@click.option("--budget", callback=duration, default="10m", show_default=True, help="After which no batch is begun.")
@click.option("--python", "python_file", type=FILE, callback=writable_file, metavar="FILE", help="Write a module.")
@click.option("--json", "json_file", type=FILE, callback=writable_file, metavar="FILE", help="Write the tree as JSON.")
def command(
    kernel: str,
    device: str,
    options: dict[str, tuple[OptionValue, ...]],
    features: tuple[str, ...],
    batches: int,
    configurations: int,
    leaves: int,
    is_cold: bool,
    seconds: float,
    budget: float,
    python_file: Path | None,
    json_file: Path | None,
) -> int:
    """Measure the options that KERNEL declares over ragged batches, and print a small tree of if and else.

    Configurations that are wrong are left out and named; the exit status is then 1.
    """
    import msgspec

    from attnfuzz.bench.kernels.laboratory import Laboratory
    from attnfuzz.bench.tuning.run import Tuning, tune
    from attnfuzz.bench.tuning.source import python_source
    from attnfuzz.cli.bench_kernels import refuse_interpreter
    from attnfuzz.report.files import write_file
    from attnfuzz.report.terminal import make_console

    refuse_interpreter(device)
    console = make_console()
    with refusing(), Laboratory(device) as laboratory:
        refuse_interpreter(device, laboratory.machine.device)
        if laboratory.machine.device == "cpu":
            console.print(
                "Triton's interpreter: this shows that everything runs; the times say nothing", style="yellow"
            )
        found = laboratory.declarations([kernel])
        if len(found) != 1:
            raise Refusal(f"{kernel} names {len(found)} kernels; name one: {', '.join(one.target for one in found)}")
        plan = Tuning(
            options=options,
            features=features or _HOST_KNOWS,
            max_batches=batches,
            max_configurations=configurations,
            max_leaves=leaves,
            l2="cold" if is_cold and laboratory.machine.device == "cuda" else "warm",
            seconds=seconds,
            budget_s=budget,
        )
        try:
            tuned, measured = tune(laboratory, found[0], plan, note=lambda line: console.print(line))
        except ValueError as error:
            raise Refusal(str(error)) from error
    for configuration, why in measured.wrong:
        console.print(f"WRONG, left out: {configuration}: {why}", style="bold red")
    if measured.unreached:
        console.print(f"{measured.unreached} batches were not measured; raise --budget", style="yellow")
    console.print()
    source = python_source(tuned)
    console.print(source, soft_wrap=True)
    if python_file is not None:
        write_file(python_file, source.encode())
    if json_file is not None:
        write_file(json_file, msgspec.json.format(msgspec.json.encode(tuned), indent=1) + b"\n")
    return 1 if measured.wrong else 0
