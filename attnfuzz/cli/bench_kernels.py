"""``attnfuzz bench kernels``: times of kernels beside those of what else is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnfuzz.bench.kernels.messages import L2State, Mode
from attnfuzz.cli.bench_report import require_rasteriser, show_and_write
from attnfuzz.cli.parameters import DEVICE, FILE, KERNEL_HELP, duration, writable_file
from attnfuzz.cli.refusal import Refusal, refusing
from attnfuzz.isolation.devices import likely_device
from attnfuzz.problems.supports import OptionValue

if TYPE_CHECKING:
    from attnfuzz.bench.kernels.laboratory import Laboratory
    from attnfuzz.declaration import Declaration

__all__ = ["command", "option_values", "refuse_interpreter"]

_NONE = "none"

_SUITES = ("decode", "seeds", "merge", "mixed", "graph")
_L2: dict[str, tuple[L2State, ...]] = {"cold": ("cold",), "warm": ("warm",), "both": ("cold", "warm")}
_MODES: dict[str, tuple[Mode, ...]] = {"eager": ("eager",), "graph": ("graph",), "both": ("eager", "graph")}


def refuse_interpreter(asked: str, found: str | None = None) -> None:
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
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@click.command("kernels", epilog=KERNEL_HELP)
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
def command(
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
) -> int:
    """Time KERNELs (the bundled ones that can be captured into a CUDA graph by default) beside what is installed.

    Each is checked against float64 first; what is wrong gets no time. Times are medians of one call, launched one by
    one (eager) or from a CUDA graph, with keys and values in memory (cold) or, where they fit, in the L2 cache (warm).
    Without a GPU it needs --device cpu, which only shows that everything runs.

    The exit status is 1 if a kernel was wrong, failed or crashed, and 2 if only attnfuzz could not measure one.
    """
    from attnfuzz.bench.kernels.laboratory import Laboratory
    from attnfuzz.bench.kernels.plan import KernelBench
    from attnfuzz.bench.kernels.run import measure_kernels
    from attnfuzz.bench.kernels.selection import choose_kernels, choose_shapes
    from attnfuzz.bench.kernels.suites import smoke_suite
    from attnfuzz.report import bench
    from attnfuzz.report.terminal import make_console

    refuse_interpreter(device)
    require_rasteriser(png_file)
    console = make_console()
    with refusing(), Laboratory(device) as laboratory:
        is_smoke = laboratory.machine.device == "cpu"
        refuse_interpreter(device, laboratory.machine.device)
        chosen = choose_kernels(laboratory.declarations(kernels or ("*",)), named=bool(kernels))
        others, absent = _others(beside, laboratory)
        _check_options(options, {name for known in (chosen, others) for one in known for name in one.options})
        plan = KernelBench(
            suites={"smoke": smoke_suite()} if is_smoke else choose_shapes(suites or ("decode",), shapes),
            options=options,
            l2=("warm",) if is_smoke else _L2[l2 or "both"],
            modes=_MODES[mode],
            seconds=seconds,
            budget_s=budget,
        )
        bench.print_machine(console, laboratory.machine, others, absent)
        progress = bench.Progress(console)
        report = measure_kernels(plan, laboratory, chosen, others, progress)
    show_and_write(console, report, json_file=json_file, html_file=html_file, png_file=png_file)
    statuses = {one.status for one in report.results if not one.is_reference}
    if statuses & {"wrong", "failed", "crashed"}:
        return 1
    return 2 if "unmeasured" in statuses else 0


def _others(named: tuple[str, ...], laboratory: Laboratory) -> tuple[list[Declaration], list[str]]:
    """What to compare with, and a sentence on each engine that is not there; only of engines that nobody named."""
    from attnfuzz.adapters import engines
    from attnfuzz.bench.kernels.selection import choose_kernels
    from attnfuzz.declaration import KernelLoadError

    if named:
        wanted = [one for one in named if one != _NONE]
        return (choose_kernels(laboratory.declarations(wanted), named=True) if wanted else []), []
    found: list[Declaration] = []
    absent: list[str] = []
    for engine in engines():
        try:
            found += laboratory.declarations([f"{engine}:*"])
        except KernelLoadError as error:
            absent.append(str(error))
    return found, absent


def _check_options(asked: dict[str, tuple[OptionValue, ...]], declared: set[str]) -> None:
    for name in asked:
        if name not in declared:
            known = ", ".join(sorted(declared)) or "none"
            raise Refusal(f"--option {name}: nothing that is timed has such an option; they have {known}")
