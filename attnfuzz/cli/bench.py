"""``attnfuzz bench``: figures about attnfuzz itself, and times of kernels."""

from __future__ import annotations

import click

from attnfuzz.cli import bench_kernels, bench_plot, bench_tune
from attnfuzz.cli.parameters import DEVICE, KERNEL_HELP, duration, number_of_workers
from attnfuzz.cli.refusal import refusing

__all__ = ["command"]

_KERNELS = click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
_DEVICE = click.option("--device", type=DEVICE, default="auto", show_default=True)


def _several_workers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int | None, ...]:
    return tuple(number_of_workers(ctx, param, each.strip()) for each in value.split(","))


@click.group()
def command() -> None:
    """Measure attnfuzz itself, or kernels, on a machine that does nothing else."""


command.add_command(bench_kernels.command)
command.add_command(bench_plot.command)
command.add_command(bench_tune.command)


@command.command(epilog=KERNEL_HELP)
@_KERNELS
@_DEVICE
@click.option("--seconds", callback=duration, default="30s", show_default=True, help="Of each measurement.")
@click.option("--warmup", callback=duration, default="15s", show_default=True, help="Before each, not counted.")
@click.option("--workers", callback=_several_workers, default="1,auto", show_default=True, help="A campaign for each.")
@click.option("--plain-loop/--no-plain-loop", default=True, help="Compare with one Hypothesis test and no harness.")
@click.option("--scaling/--no-scaling", default=True, help="Also run on 2, 4 and all GPUs, where there are several.")
def throughput(
    kernels: tuple[str, ...],
    device: str,
    seconds: float,
    warmup: float,
    workers: tuple[int | None, ...],
    plain_loop: bool,
    scaling: bool,
) -> int:
    """Cases a second over KERNELs (all bundled ones by default), and where a case's time goes.

    The exit status is 1 if a bug was found on the way: nothing that a declaration would end.
    """
    from attnfuzz.bench.setting import find_setting
    from attnfuzz.bench.throughput import ThroughputPlan, measure_throughput
    from attnfuzz.report import bench
    from attnfuzz.report.terminal import make_console

    console = make_console()
    with refusing():
        setting = find_setting(kernels, device)
        plan = ThroughputPlan(
            kernels=setting.kernels,
            device=setting.device,
            seconds=seconds,
            warmup_s=warmup,
            workers=workers,
            gpus=setting.gpus if scaling else setting.gpus[:1],
            plain_loop=plain_loop,
        )
        bench.print_setting(console, setting)
        rows = measure_throughput(plan, lambda row: bench.print_row(console, row))
    bench.print_throughput(console, rows)
    return 1 if any(row.measured is not None and row.measured.result.fails for row in rows) else 0


@command.command(epilog=KERNEL_HELP)
@_KERNELS
@_DEVICE
@click.option("--budget", callback=duration, default="1h", show_default=True, help="Of both campaigns.")
@click.option("--workers", callback=number_of_workers, default="auto", show_default=True)
def endurance(kernels: tuple[str, ...], device: str, budget: float, workers: int | None) -> int:
    """Search KERNELs alone, and at the same time beside one that crashes on 5 % of its cases, one that hangs and one
    that leaks; each with half of the workers.

    The exit status is 1 if one of these three was not found, or a healthy one failed.
    """
    from attnfuzz.bench.endurance import measure_endurance
    from attnfuzz.bench.setting import find_setting
    from attnfuzz.report import bench
    from attnfuzz.report.terminal import make_console

    console = make_console()
    with refusing():
        setting = find_setting(kernels, device)
        bench.print_setting(console, setting)
        endured = measure_endurance(setting.kernels, seconds=budget, workers=workers, device=setting.device)
    bench.print_endurance(console, endured)
    return 0 if all(endured.found.values()) and not endured.strays else 1
