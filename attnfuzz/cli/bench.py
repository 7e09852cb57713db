"""``attnfuzz bench``: times of kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnfuzz.bench.kernels.shapes import SUITES, L2State, Mode
from attnfuzz.bench.tuning_record import FEATURES
from attnfuzz.cli.options import DEVICE, FILE, KERNEL_HELP, duration, of_engines, writable_file
from attnfuzz.cli.outcome import Outcome
from attnfuzz.cli.output import Refusal, refusing, write_asked
from attnfuzz.isolation.devices import likely_device
from attnfuzz.problems.supports import OptionValue

if TYPE_CHECKING:
    from attnfuzz.bench.kernels.run import TimingProcess
    from attnfuzz.declaration import Declaration


@click.group()
def command() -> None:
    """Time kernels, or choose their options, on a machine that does nothing else."""


_NONE = "none"

_SUITES = tuple(SUITES)
_L2: dict[str, tuple[L2State, ...]] = {"cold": ("cold",), "warm": ("warm",), "both": ("cold", "warm")}
_MODES: dict[str, tuple[Mode, ...]] = {"eager": ("eager",), "graph": ("graph",), "both": ("eager", "graph")}


def _refuse_interpreter(asked: str, found: str | None = None) -> None:
    """Raise Refusal for a machine without a GPU, unless "cpu" was ``asked`` for; ``found``: what there is, if known."""
    if asked == "auto" and (found or likely_device(asked)) == "cpu":
        raise Refusal(
            "times of Triton's interpreter say nothing about a kernel, and there is no GPU here; "
            "--device cpu runs a tiny suite all the same"
        )


def option_values(
    ctx: click.Context, param: click.Parameter, given: tuple[str, ...]
) -> dict[str, tuple[OptionValue, ...]]:
    """``NAME=VALUE[,VALUE...]``, of which a value is a number, true, false, or else a word."""
    found: dict[str, tuple[OptionValue, ...]] = {}
    for text in given:
        name, separator, values = text.partition("=")
        if not separator or not name.isidentifier() or not all(part.strip() for part in values.split(",")):
            raise click.BadParameter(
                f"{text!r} must read NAME=VALUE or NAME=VALUE,VALUE, as num_splits=8,16", ctx, param
            )
        found[name] = tuple(_value(part.strip()) for part in values.split(","))
    return found


def _value(text: str) -> OptionValue:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@command.command("kernels", short_help="Time kernels beside those of engines.", epilog=KERNEL_HELP)
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("--suite", "suites", type=click.Choice(_SUITES), multiple=True, help="Shapes to time; decode by default.")
@click.option(
    "--shape", "shapes", multiple=True, metavar="GLOB", help="Only shapes whose label fits, as '8x* page 16'."
)
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE,...",
    callback=option_values,
    help="Values to try for an option; the fastest is shown. By default the first that a kernel declares.",
)
@click.option(
    "--beside",
    multiple=True,
    metavar="KERNEL",
    help="Kernels to compare with, by default those of all engines that are installed; 'none' for none.",
)
@click.option("--cold", "l2", flag_value="cold", help="Only with keys and values in memory, not in the L2 cache.")
@click.option("--warm", "l2", flag_value="warm", help="Only with what fits in the L2 cache there already.")
@click.option(
    "--mode", type=click.Choice(tuple(_MODES)), default="both", show_default=True, help="How a kernel is launched."
)
@click.option("--seconds", callback=duration, default="0.05s", show_default=True, help="Length of a measurement.")
@click.option("--budget", callback=duration, default="10m", show_default=True, help="No measurement begins later.")
@click.option("--json", "json_file", type=FILE, callback=writable_file, metavar="FILE", help="Write everything.")
def kernels_command(
    kernels: tuple[str, ...],
    suites: tuple[str, ...],
    shapes: tuple[str, ...],
    device: str,
    options: dict[str, tuple[OptionValue, ...]],
    beside: tuple[str, ...],
    l2: str | None,
    mode: str,
    seconds: float,
    budget: float,
    json_file: Path | None,
) -> Outcome:
    """Time KERNELs (the bundled ones that can be captured into a CUDA graph by default) beside what is installed.

    Each is checked against float64 first; what is wrong gets no time. Times are medians of one call, launched one by
    one (eager) or from a CUDA graph, with keys and values in memory (cold) or, where they fit, in the L2 cache (warm).
    Without a GPU it needs --device cpu, which only shows that everything runs.

    The exit status is 1 if a kernel was wrong, failed or crashed, and 2 if only attnfuzz could not measure one.
    """
    from attnfuzz.bench.kernels.run import KernelBench, TimingProcess, choose_kernels, choose_shapes, measure_kernels
    from attnfuzz.bench.kernels.shapes import encode_report, smoke_suite
    from attnfuzz.own_files import write_file
    from attnfuzz.report import bench
    from attnfuzz.report.terminal import make_console

    _refuse_interpreter(device)
    console = make_console()
    with refusing(), TimingProcess(device) as process:
        is_smoke = process.machine.device == "cpu"
        _refuse_interpreter(device, process.machine.device)
        chosen = choose_kernels(process.declarations(kernels or ("*",)), named=bool(kernels))
        others, absent = _others(beside, process)
        _check_options(options, {name for known in (chosen, others) for one in known for name in one.options})
        plan = KernelBench(
            suites={"smoke": smoke_suite()} if is_smoke else choose_shapes(suites or ("decode",), shapes),
            options=options,
            l2=("warm",) if is_smoke else _L2[l2 or "both"],
            modes=_MODES[mode],
            seconds=seconds,
            budget_s=budget,
        )
        bench.print_machine(console, process.machine, others, absent)
        progress = bench.BenchProgress(console)
        report = measure_kernels(plan, process, chosen, others, progress)
    bench.print_report(console, report)
    write_asked(("--json", json_file, lambda path: write_file(path, encode_report(report))))
    statuses = [one.status for one in report.results if not one.is_reference]
    return Outcome(
        judged=sum(one != "unmeasured" for one in statuses),
        failed=not {"wrong", "failed", "crashed"}.isdisjoint(statuses),
        missed="unmeasured" in statuses,
    )


def _others(named: tuple[str, ...], process: TimingProcess) -> tuple[list[Declaration], list[str]]:
    """Kernels to compare with, and a sentence on each engine that is not there; only of engines that nobody named."""
    from attnfuzz.bench.kernels.run import choose_kernels

    if named:
        wanted = [one for one in named if one != _NONE]
        return (choose_kernels(process.declarations(wanted), named=True) if wanted else []), []
    return of_engines(process.declarations)


def _check_options(asked: dict[str, tuple[OptionValue, ...]], declared: set[str]) -> None:
    for name in asked:
        if name not in declared:
            known = ", ".join(sorted(declared)) or "none"
            raise Refusal(f"--option {name}: nothing that is timed has such an option; they have {known}")


def joint_option_values(
    ctx: click.Context, param: click.Parameter, given: tuple[str, ...]
) -> dict[tuple[str, ...], tuple[tuple[OptionValue, ...], ...]]:
    """``NAME[/NAME...]=VALUE[/VALUE...][,...]``: values of options that are taken together."""
    found: dict[tuple[str, ...], tuple[tuple[OptionValue, ...], ...]] = {}
    for text in given:
        names, _, values = text.partition("=")
        named = tuple(names.split("/"))
        choices = tuple(tuple(_value(part.strip()) for part in one.split("/")) for one in values.split(","))
        taken = {name for known in found for name in known}
        if (
            not all(name.isidentifier() and name not in taken for name in named)
            or len(set(named)) < len(named)
            or any(len(choice) != len(named) or "" in choice for choice in choices)
        ):
            raise click.BadParameter(
                f"{text!r} must read NAME=VALUE,VALUE or NAME/NAME=VALUE/VALUE,VALUE/VALUE, as block_m/num_warps=64/4,"
                "128/8, and each name may occur once", ctx, param,
            )  # fmt: skip
        found[named] = choices
    return found


@command.command("tune", short_help="Measure a kernel's options and print a tree of choices.", epilog=KERNEL_HELP)
@click.argument("kernel", metavar="KERNEL")
@click.option("--device", type=DEVICE, default="auto", show_default=True)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE,...",
    callback=joint_option_values,
    help="Values to try for an option, in place of all that the kernel declares; a single one keeps it fixed. "
    "NAME/NAME=VALUE/VALUE,... for options that go together.",
)
@click.option(
    "--feature",
    "features",
    multiple=True,
    type=click.Choice(FEATURES),
    help="What a decision may depend on; by default what the host knows, so all but total_tokens.",
)
@click.option("--batches", type=click.IntRange(1, 1000), default=40, show_default=True, help="Most ragged batches.")
@click.option("--configurations", type=click.IntRange(1, 1000), default=48, show_default=True, help="How many to try.")
@click.option("--leaves", type=click.IntRange(1, 64), default=8, show_default=True, help="Most leaves of the tree.")
@click.option("--cold/--warm", "is_cold", default=True, help="Keys and values in memory, or where they fit in L2.")
@click.option("--seconds", callback=duration, default="0.02s", show_default=True, help="Length of a measurement.")
@click.option("--budget", callback=duration, default="10m", show_default=True, help="No batch begins later.")
@click.option("--python", "python_file", type=FILE, callback=writable_file, metavar="FILE", help="Write a module.")
@click.option(
    "--json", "json_file", type=FILE, callback=writable_file, metavar="FILE", help="Write all times and the tree."
)
def tune_command(
    kernel: str,
    device: str,
    options: dict[tuple[str, ...], tuple[tuple[OptionValue, ...], ...]],
    features: tuple[str, ...],
    batches: int,
    configurations: int,
    leaves: int,
    is_cold: bool,
    seconds: float,
    budget: float,
    python_file: Path | None,
    json_file: Path | None,
) -> Outcome:
    """Measure the options that KERNEL declares over ragged batches, and print a small tree of if and else.

    A part of the batches is kept back, to show what the tree is worth on batches that it has not seen. Configurations
    that are wrong are left out and named; the exit status is then 1. Stopped by Ctrl-C or SIGTERM, it ends after the
    batch, and writes what it knows.
    """
    from attnfuzz.bench.kernels.run import TimingProcess
    from attnfuzz.bench.tuning import Tuning, tune
    from attnfuzz.bench.tuning_record import encode_tuned, grown, python_source
    from attnfuzz.campaign.stopping import Interrupts
    from attnfuzz.own_files import write_file
    from attnfuzz.report.terminal import make_console

    _refuse_interpreter(device)
    console = make_console()
    with refusing(), Interrupts() as interrupts, TimingProcess(device) as process:
        _refuse_interpreter(device, process.machine.device)
        if process.machine.device == "cpu":
            console.print(
                "Triton's interpreter: this shows that everything runs; the times say nothing", style="yellow"
            )
        found = process.declarations([kernel])
        if len(found) != 1:
            raise Refusal(f"{kernel} names {len(found)} kernels; name one: {', '.join(one.target for one in found)}")
        plan = Tuning(
            options=options,
            max_batches=batches,
            max_configurations=configurations,
            l2="cold" if is_cold and process.machine.device == "cuda" else "warm",
            seconds=seconds,
            budget_s=budget,
        )
        try:
            record = tune(process, found[0], plan, console.print, stopped=lambda: interrupts.count > 0)
            tuned = grown(found[0].target, record, features or FEATURES[:-1], leaves)
        except ValueError as error:
            raise Refusal(str(error)) from error
    for configuration, why in tuned.record.wrong:
        console.print(f"WRONG, left out: {configuration}: {why}", style="bold red")
    if tuned.record.unreached:
        console.print(f"{tuned.record.unreached} batches were not measured; raise --budget", style="yellow")
    console.print()
    source = python_source(tuned)
    console.print(source, soft_wrap=True)
    write_asked(
        ("--python", python_file, lambda path: write_file(path, source.encode())),
        ("--json", json_file, lambda path: write_file(path, encode_tuned(tuned))),
    )
    return Outcome(judged=len(record.batches), failed=bool(record.wrong), signal=interrupts.first)
