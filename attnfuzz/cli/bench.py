"""``attnfuzz bench``: figures about attnfuzz itself, and times of kernels."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from attnfuzz.bench.kernels.measurements import L2State, Mode
from attnfuzz.bench.kernels.shapes import SUITES
from attnfuzz.bench.tuning_record import FEATURES
from attnfuzz.cli.options import DEVICE, FILE, KERNEL_HELP, duration, number_of_workers, writable_file
from attnfuzz.cli.outcome import SHOWN, Outcome
from attnfuzz.cli.output import Refusal, refusing, write_asked
from attnfuzz.data_files import MOST_RESULT_BYTES, read_data_file
from attnfuzz.isolation.devices import likely_device
from attnfuzz.problems.supports import OptionValue

if TYPE_CHECKING:
    from rich.console import Console

    from attnfuzz.bench.kernels.measurements import Report
    from attnfuzz.bench.kernels.run import TimingProcess
    from attnfuzz.bench.tuning_record import Tuned
    from attnfuzz.campaign.stopping import Interrupts
    from attnfuzz.declaration import Declaration

__all__ = ["command", "joint_option_values", "option_values"]


_KERNELS = click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
_DEVICE = click.option("--device", type=DEVICE, default="auto", show_default=True)


def _several_workers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int | None, ...]:
    return tuple(number_of_workers(ctx, param, each.strip()) for each in value.split(","))


@click.group()
def command() -> None:
    """Measure attnfuzz itself, or kernels, on a machine that does nothing else."""


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
) -> Outcome:
    """Cases a second over KERNELs (all bundled ones by default), and where a case's time goes.

    The exit status is 1 if a bug was found on the way: nothing that a declaration would end.
    """
    from attnfuzz.bench.throughput import ThroughputPlan, find_setting, measure_throughput
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
    results = [row.measured.result for row in rows if row.measured is not None]
    return Outcome(judged=sum(one.statistics.cases for one in results), failed=any(one.fails for one in results))


@command.command(epilog=KERNEL_HELP)
@_KERNELS
@_DEVICE
@click.option("--budget", default="60s", show_default=True, help="Of each campaign.")
@click.option("--workers", default="auto", show_default=True)
@click.option("--seed", default="1", show_default=True)
@click.option("--runs", type=click.IntRange(1), default=2, show_default=True, help="Only the first has to compile all.")
@click.option("--command", "started_by", help="What starts another attnfuzz, to compare with.")
def campaigns(
    kernels: tuple[str, ...],
    device: str,
    budget: str,
    workers: str,
    seed: str,
    runs: int,
    started_by: str | None,
) -> Outcome:
    """What a person sees in the first minute of `attnfuzz explore KERNELs`, with nothing compiled and then again.

    Seconds from the start of the command to its first line, its first case and each finding; cases in the first 60.
    """
    from attnfuzz.bench.first_minute import measure_first_minutes
    from attnfuzz.report import bench
    from attnfuzz.report.terminal import make_console

    console = make_console()
    asked = [*kernels, "--budget", budget, "--workers", workers, "--seed", seed, "--device", device]
    measured = []
    try:
        for one in measure_first_minutes(asked, command=shlex.split(started_by or ""), runs=runs):
            bench.print_first_minute(console, one)
            measured.append(one)
    except (OSError, RuntimeError, msgspec.MsgspecError) as error:
        raise Refusal(str(error)) from error
    return Outcome(judged=sum(one.summary.cases for one in measured))


@command.command(epilog=KERNEL_HELP)
@_KERNELS
@_DEVICE
@click.option("--budget", callback=duration, default="1h", show_default=True, help="Of both campaigns.")
@click.option("--workers", callback=number_of_workers, default="auto", show_default=True)
def endurance(kernels: tuple[str, ...], device: str, budget: float, workers: int | None) -> Outcome:
    """Search KERNELs alone, and at the same time beside one that crashes on 5 % of its cases, one that hangs and one
    that leaks; each with half of the workers.

    The exit status is 1 if one of these three was not found, or a healthy one failed.
    """
    from attnfuzz.bench.endurance import measure_endurance
    from attnfuzz.bench.throughput import find_setting
    from attnfuzz.report import bench
    from attnfuzz.report.terminal import make_console

    console = make_console()
    with refusing():
        setting = find_setting(kernels, device)
        bench.print_setting(console, setting)
        endured = measure_endurance(setting.kernels, seconds=budget, workers=workers, device=setting.device)
    bench.print_endurance(console, endured)
    return Outcome(judged=len(endured.found), failed=bool(endured.strays) or not all(endured.found.values()))


def _require_matplotlib(png_file: Path | None) -> None:
    """Raise Refusal if a PNG is wanted that cannot be made, before all the work is done."""
    from attnfuzz.report.bench_page import NO_MATPLOTLIB, can_plot

    if png_file is not None and not can_plot():
        raise Refusal(f"--png: {NO_MATPLOTLIB}; or use --html, for the tables")


def _show_and_write(
    console: Console, report: Report, *, json_file: Path | None, html_file: Path | None, png_file: Path | None
) -> None:
    """Print the tables, and write the files that were asked for."""
    from attnfuzz.bench.kernels.measurements import encode_report
    from attnfuzz.own_files import write_file
    from attnfuzz.report.bench import print_report
    from attnfuzz.report.bench_page import NO_MATPLOTLIB, bench_page, can_plot, plots_png

    print_report(console, report)
    if html_file is not None and not can_plot():
        console.print(f"the page has tables only: {NO_MATPLOTLIB}", style="yellow", soft_wrap=True)
    png = None if png_file is None else plots_png(report)
    if png_file is not None and png is None:
        console.print("nothing was timed at more than one length, so there is nothing to draw: no PNG is written")
    write_asked(
        ("--json", json_file, lambda path: write_file(path, encode_report(report))),
        ("--html", html_file, lambda path: write_file(path, bench_page(report).encode())),
        ("--png", png_file if png is not None else None, lambda path: write_file(path, png or b"")),
    )


@command.command("plot")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "json_file", type=FILE, callback=writable_file, metavar="FILE", help="Write all in one.")
@click.option("--html", "html_file", type=FILE, callback=writable_file, metavar="FILE", help="Write a page with plots.")
@click.option("--png", "png_file", type=FILE, callback=writable_file, metavar="FILE", help="Write the plots.")
def plot_command(
    files: tuple[Path, ...], json_file: Path | None, html_file: Path | None, png_file: Path | None
) -> Outcome:
    """Show what `attnfuzz bench kernels --json` wrote to FILES, on a machine without a GPU too.

    Several files are shown as one, if they were measured on the same kind of device.
    """
    from attnfuzz.report.terminal import make_console

    _require_matplotlib(png_file)
    report = _read_reports(files)
    _show_and_write(make_console(), report, json_file=json_file, html_file=html_file, png_file=png_file)
    return SHOWN


def _read_reports(files: tuple[Path, ...]) -> Report:
    """All as one. Raises Refusal."""
    from attnfuzz.bench.kernels.measurements import decode_report, joined

    reports = []
    for file in files:
        try:
            reports.append(decode_report(read_data_file(file, MOST_RESULT_BYTES)))
        except OSError as error:
            raise Refusal(f"{file} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise Refusal(f"{file} is not what attnfuzz bench kernels --json writes: {error}") from error
    try:
        return joined(reports)
    except ValueError as error:
        raise Refusal(str(error)) from error


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


@command.command("kernels", epilog=KERNEL_HELP)
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("--suite", "suites", type=click.Choice(_SUITES), multiple=True, help="Which shapes; decode by default.")
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
    help="What to compare with: the kernels of all engines that are installed by default; 'none' for nothing.",
)
@click.option("--cold", "l2", flag_value="cold", help="Only with keys and values in memory, not in the L2 cache.")
@click.option("--warm", "l2", flag_value="warm", help="Only with what fits in the L2 cache there already.")
@click.option("--mode", type=click.Choice(tuple(_MODES)), default="both", show_default=True, help="How it is launched.")
@click.option("--seconds", callback=duration, default="0.05s", show_default=True, help="Of each measurement.")
@click.option("--budget", callback=duration, default="10m", show_default=True, help="After which no other is begun.")
@click.option("--json", "json_file", type=FILE, callback=writable_file, metavar="FILE", help="Write everything.")
@click.option("--html", "html_file", type=FILE, callback=writable_file, metavar="FILE", help="Write a page with plots.")
@click.option("--png", "png_file", type=FILE, callback=writable_file, metavar="FILE", help="Write the plots.")
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
    html_file: Path | None,
    png_file: Path | None,
) -> Outcome:
    """Time KERNELs (the bundled ones that can be captured into a CUDA graph by default) beside what is installed.

    Each is checked against float64 first; what is wrong gets no time. Times are medians of one call, launched one by
    one (eager) or from a CUDA graph, with keys and values in memory (cold) or, where they fit, in the L2 cache (warm).
    Without a GPU it needs --device cpu, which only shows that everything runs.

    The exit status is 1 if a kernel was wrong, failed or crashed, and 2 if only attnfuzz could not measure one.
    """
    from attnfuzz.bench.kernels.run import KernelBench, TimingProcess, choose_kernels, choose_shapes, measure_kernels
    from attnfuzz.bench.kernels.shapes import smoke_suite
    from attnfuzz.report import bench
    from attnfuzz.report.terminal import make_console

    _refuse_interpreter(device)
    _require_matplotlib(png_file)
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
    _show_and_write(console, report, json_file=json_file, html_file=html_file, png_file=png_file)
    return _outcome_of(report)


def _outcome_of(report: Report, interrupts: Interrupts | None = None) -> Outcome:
    statuses = [one.status for one in report.results if not one.is_reference]
    return Outcome(
        judged=sum(one != "unmeasured" for one in statuses),
        failed=not {"wrong", "failed", "crashed"}.isdisjoint(statuses),
        missed="unmeasured" in statuses,
        signal=None if interrupts is None else interrupts.first,
    )


def _others(named: tuple[str, ...], process: TimingProcess) -> tuple[list[Declaration], list[str]]:
    """What to compare with, and a sentence on each engine that is not there; only of engines that nobody named."""
    from attnfuzz.adapters import engines
    from attnfuzz.bench.kernels.run import choose_kernels
    from attnfuzz.declaration import KernelLoadError

    if named:
        wanted = [one for one in named if one != _NONE]
        return (choose_kernels(process.declarations(wanted), named=True) if wanted else []), []
    found: list[Declaration] = []
    absent: list[str] = []
    for engine in engines():
        try:
            found += process.declarations([f"{engine}:*"])
        except KernelLoadError as error:
            absent.append(str(error))
    return found, absent


def _check_options(asked: dict[str, tuple[OptionValue, ...]], declared: set[str]) -> None:
    for name in asked:
        if name not in declared:
            known = ", ".join(sorted(declared)) or "none"
            raise Refusal(f"--option {name}: nothing that is timed has such an option; they have {known}")


_FOR_COMPILING, _LAST_BUILD = 0.3, (0.7, 0.9)
"""Of the budget: until when attnfuzz's own kernels are compiled ahead; and when an engine's last build begins and ends.
"""


@command.command("ladder")
@click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--suite", "suites", type=click.Choice(_SUITES), multiple=True, help="Only figures of this suite.")
@_DEVICE
@click.option("--seconds", callback=duration, default="0.02s", show_default=True, help="Of each measurement.")
@click.option("--budget", callback=duration, default="4m", show_default=True, help="After which no other is begun.")
@click.option("--json", "json_file", type=FILE, callback=writable_file, metavar="FILE", help="Write everything.")
@click.option(
    "--page", type=FILE, callback=writable_file, metavar="FILE", help="Write Markdown, and pictures in pictures/."
)
def ladder_command(
    files: tuple[Path, ...],
    suites: tuple[str, ...],
    device: str,
    seconds: float,
    budget: float,
    json_file: Path | None,
    page: Path | None,
) -> Outcome:
    """Time the bundled kernels from the naive one to the fastest, beside the engines that are installed, and draw it.

    With FILEs, which an earlier run wrote with --json, nothing is measured, and no GPU is needed. Stopped by Ctrl-C,
    SIGTERM or its budget, it has a part of every figure and writes what it knows. The exit status is 1 if a kernel was
    wrong, failed or crashed.
    """
    from attnfuzz.bench.kernels.measurements import encode_report
    from attnfuzz.campaign.stopping import Interrupts
    from attnfuzz.own_files import write_file
    from attnfuzz.report.bench_page import NO_MATPLOTLIB, can_plot

    if page is not None and not can_plot():
        raise Refusal(f"--page: {NO_MATPLOTLIB}")
    if page is None and json_file is None:
        raise Refusal("nothing would be kept of it: name a file with --json, a page with --page, or both")
    interrupts = Interrupts(raising=True)
    if files:
        report = _read_reports(files)
    else:
        _refuse_interpreter(device)
        with refusing(), interrupts:
            report = _measured_ladder(suites, device, seconds, budget, interrupts)
    write_asked(
        ("--json", json_file, lambda path: write_file(path, encode_report(report))),
        ("--page", page, lambda path: _write_ladder(path, report)),
    )
    return _outcome_of(report, interrupts)


def _measured_ladder(
    suites: tuple[str, ...], device: str, seconds: float, budget: float, interrupts: Interrupts
) -> Report:
    from attnfuzz.bench.kernels.ladder import FIGURES, Builds, compile_ahead, ladder_entries, measure_ladder
    from attnfuzz.bench.kernels.run import TimingProcess
    from attnfuzz.declaration import KernelLoadError
    from attnfuzz.report import bench
    from attnfuzz.report.terminal import make_console

    console, began = make_console(), time.monotonic()
    figures = [figure for figure in FIGURES if not suites or figure.suite in suites]
    if not figures:
        raise Refusal(f"--suite: there are figures of {', '.join(dict.fromkeys(one.suite for one in FIGURES))}")
    known: dict[str, Declaration] = {}
    absent: dict[str, str] = {}
    with TimingProcess(device) as process:
        _refuse_interpreter(device, process.machine.device)
        for kernel in dict.fromkeys(step.kernel for figure in figures for step in figure.steps):
            try:
                known[kernel] = process.declarations([kernel])[0]
            except KernelLoadError as error:
                absent[kernel] = str(error)
        engines = [one for one in known.values() if one.versions]
        bench.print_machine(console, process.machine, engines, list(absent.values()))
        on_gpu = process.machine.device == "cuda"
        entries = list(ladder_entries(figures, known, on_gpu=on_gpu))
        builds = Builds(process, entries)
        try:
            if on_gpu:
                compile_ahead(process, entries, seconds=_FOR_COMPILING * budget)
                console.print(f"compiled ahead in {time.monotonic() - began:.0f} s")
            report = measure_ladder(
                builds.entries(
                    last_start=began + _LAST_BUILD[0] * budget,
                    last_end=began + _LAST_BUILD[1] * budget,
                    stopped=lambda: interrupts.count > 0,
                ),
                process,
                engines,
                suites=tuple(figure.suite for figure in figures),
                seconds=seconds,
                budget_s=budget - (time.monotonic() - began),
                report_row=bench.BenchProgress(console),
            )
        finally:
            builds.close()
    report.unreached += builds.left_out
    return report


def _write_ladder(page: Path, report: Report) -> None:
    from attnfuzz.own_files import OwnFolder, write_file
    from attnfuzz.report.ladder_page import PICTURES, ladder_page

    text, pictures = ladder_page(report)
    folder = OwnFolder(page.parent / PICTURES, below=page.parent)
    folder.make()
    for name, drawn in pictures.items():
        folder.write(name, drawn)
    write_file(page, text.encode())


_HOST_KNOWS = FEATURES[:-1]


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


_FEATURES = click.option(
    "--feature",
    "features",
    multiple=True,
    type=click.Choice(FEATURES),
    help="What a decision may depend on; by default what the host knows, so all but total_tokens.",
)
_LEAVES = click.option(
    "--leaves", type=click.IntRange(1, 64), default=8, show_default=True, help="Of the tree, at most."
)
_PYTHON = click.option(
    "--python", "python_file", type=FILE, callback=writable_file, metavar="FILE", help="Write a module."
)


@command.command("tune", epilog=KERNEL_HELP)
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
@_FEATURES
@click.option("--batches", type=click.IntRange(1, 1000), default=40, show_default=True, help="Ragged batches, at most.")
@click.option("--configurations", type=click.IntRange(1, 1000), default=48, show_default=True, help="At most.")
@_LEAVES
@click.option("--cold/--warm", "is_cold", default=True, help="Keys and values in memory, or where they fit in L2.")
@click.option("--seconds", callback=duration, default="0.02s", show_default=True, help="Of each measurement.")
@click.option("--budget", callback=duration, default="10m", show_default=True, help="After which no batch is begun.")
@_PYTHON
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
    that are wrong are left out and named; the exit status is then 1. `attnfuzz bench tree` makes the same of the JSON
    file again. Stopped by Ctrl-C or SIGTERM, it ends after the batch, and writes what it knows.
    """
    from attnfuzz.bench.kernels.run import TimingProcess
    from attnfuzz.bench.tuning import Tuning, tune
    from attnfuzz.bench.tuning_record import grown
    from attnfuzz.campaign.stopping import Interrupts
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
            tuned = grown(found[0].target, record, features or _HOST_KNOWS, leaves)
        except ValueError as error:
            raise Refusal(str(error)) from error
    _show_tuned(console, tuned, python_file, json_file)
    return Outcome(judged=len(record.batches), failed=bool(record.wrong), signal=interrupts.first)


@command.command("tree")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_FEATURES
@_LEAVES
@_PYTHON
@click.option("--json", "json_file", type=FILE, callback=writable_file, metavar="FILE", help="Write FILE anew.")
def tree_command(
    file: Path, features: tuple[str, ...], leaves: int, python_file: Path | None, json_file: Path | None
) -> Outcome:
    """Grow a tree from the times in FILE, which `attnfuzz bench tune --json` wrote, on a machine without a GPU too.

    It is the tree of that run, unless other features or leaves are asked for.
    """
    from attnfuzz.bench.tuning_record import decode_tuned, grown
    from attnfuzz.report.terminal import make_console

    try:
        read = decode_tuned(read_data_file(file, MOST_RESULT_BYTES))
    except OSError as error:
        raise Refusal(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Refusal(f"{file} is not what attnfuzz bench tune --json writes: {error}") from error
    context = click.get_current_context()
    is_asked = context.get_parameter_source("leaves") is not click.core.ParameterSource.DEFAULT
    tuned = grown(read.kernel, read.record, features or read.features, leaves if is_asked else read.max_leaves)
    _show_tuned(make_console(), tuned, python_file, json_file)
    return SHOWN


def _show_tuned(console: Console, tuned: Tuned, python_file: Path | None, json_file: Path | None) -> None:
    """Print the module with its figures, and write the files that were asked for."""
    from attnfuzz.bench.tuning_record import encode_tuned, python_source
    from attnfuzz.own_files import write_file

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
