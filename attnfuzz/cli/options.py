"""Options, types and checks that commands share; ``[tool.attnfuzz]`` in pyproject.toml can set their defaults."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from attnfuzz.campaign.stopping import parse_duration
from attnfuzz.cli.output import Refusal, refusing
from attnfuzz.config import DEVICES, MAX_WORKERS
from attnfuzz.data_files import why_unusable
from attnfuzz.oracles.registry import KNOWN, NAME_PATTERN, ORACLES

if TYPE_CHECKING:
    from attnfuzz.campaign.result import Earlier
    from attnfuzz.config import Settings
    from attnfuzz.declaration import Declaration
    from attnfuzz.problems.declared_numerics import FixedTolerance, Tolerance


KERNEL_HELP = (
    "KERNEL is a bundled name or glob (paged_*), an engine's (vllm:*), module:name, or path/to/file.py[:name]."
)
DEVICE = click.Choice(DEVICES)


class _Oracle(click.Choice[str]):
    """One of attnfuzz's; another name may be of an oracle in a kernel's file, which nobody has loaded yet."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        is_own = value not in KNOWN and re.match(NAME_PATTERN, value) is not None
        return value if is_own else super().convert(value, param, ctx)


ORACLE = _Oracle(ORACLES)

_SHOWN_CHARACTERS = 100


class _PathName(click.Path):
    """A path of which the system does not say at once that nothing can be there: too long, links in a circle."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if (reason := why_unusable(path)) is not None:
            text = str(path)
            shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
            self.fail(f"{shown!r} cannot be read or written ({reason}); name another path", param, ctx)
        return path


FILE = _PathName(path_type=Path)
"""Or a folder."""
TRUST = click.option(
    "--trust", is_flag=True, help="Run the kernels that the files name even if they lie outside this project."
)
Command = TypeVar("Command", bound=Callable[..., Any])

PYTHON = click.option(
    "--python",
    "pythons",
    type=FILE,
    multiple=True,
    metavar="PATH",
    help="Run kernels in this virtual environment (its folder or its interpreter); repeatable, to compare.",
)


_MOST_SHARDS = 100_000
_SCHEDULERS = (
    ("BUILDKITE_PARALLEL_JOB", "BUILDKITE_PARALLEL_JOB_COUNT", ""),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("JOB_COMPLETION_INDEX", "", ""),
    ("CI_NODE_INDEX", "CI_NODE_TOTAL", ""),
)
"""Which job of several this one is, how many there are, and the number of the first: variables of Buildkite, Slurm,
Kubernetes (which does not say how many), and GitLab and others, who count from 1."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one machine, by its ``number`` from 1 on, ``of`` so many: None where a scheduler does not say."""

    number: int
    of: int | None
    said_by: str = "--shard"

    def own(self, seed: int) -> int:
        """The seed of this machine, where all are given ``seed``, which the first one keeps."""
        return seed if self.number == 1 else zlib.crc32(f"{seed} {self.number}".encode())

    def __str__(self) -> str:
        return f"shard {self.number}/{self.of or '?'} ({self.said_by})"


def shard_of(environment: Mapping[str, str]) -> Shard | None:
    """The shard that the variables of a scheduler make of this job; None where they say that it is the only one."""
    for index, count, first in _SCHEDULERS:
        number, of, lowest = (_number_in(environment, name) for name in (index, count, first))
        if number is None or (count and of is None):
            continue
        one = number - (1 if index == "CI_NODE_INDEX" else lowest or 0) + 1
        if of is not None and not 1 <= one <= of:  # an array with gaps in its numbers: distinct, and no more
            one, of = number + 1, None
        return Shard(one, of, index) if of != 1 else None
    return None


def _number_in(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "")
    return int(value) if re.fullmatch("[0-9]{1,9}", value) else None


def _shard(ctx: click.Context, param: click.Parameter, value: str | None) -> Shard | None:
    if value is None:
        return None if ctx.resilient_parsing else shard_of(os.environ)
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", value)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= _MOST_SHARDS:
        raise click.BadParameter(f"{value!r} must be I/N, the machine's number from 1 to N and how many", ctx, param)
    return Shard(int(match[1]), int(match[2]))


SHARD = click.option(
    "--shard",
    callback=_shard,
    metavar="I/N",
    help="Be machine I of N  [default: as Buildkite, Slurm, Kubernetes or GitLab say]",
)


def duration(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Seconds, from ``1h30m``; None of an option that may be left out."""
    if value is None:
        return None
    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def number_of_workers(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """A number, or None for ``auto``."""
    if value == "auto":
        return None
    if not value.isdecimal() or not 1 <= int(value) <= MAX_WORKERS:
        raise click.BadParameter(f"{value!r} must be an integer between 1 and {MAX_WORKERS}, or 'auto'", ctx, param)
    return int(value)


WORKERS = click.option(
    "--workers", callback=number_of_workers, default="auto", show_default=True, help="Processes that judge cases."
)


def budget_option(default: str, help: str) -> Callable[[Command], Command]:
    """``--budget``, a duration, which the command gets as ``budget_s``."""
    return click.option("--budget", "budget_s", callback=duration, default=default, show_default=True, help=help)


def writable_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """A path that can be written, so that this does not fail only when all the work is done."""
    if value is None:
        return None
    can_write = os.access(value if value.exists() else value.parent, os.W_OK)
    if value.is_dir() or not value.parent.is_dir() or not can_write:
        raise click.BadParameter(
            f"{str(value)!r} cannot be written; name a file in a folder that exists and can be written", ctx, param
        )
    return value


def of_engines(load: Callable[[Sequence[str]], list[Declaration]]) -> tuple[list[Declaration], list[str]]:
    """The kernels of all engines that are installed, and a sentence for each that is not."""
    from attnfuzz.adapters import engines
    from attnfuzz.declaration import KernelLoadError

    found: list[Declaration] = []
    absent: list[str] = []
    for engine in engines():
        try:
            found += load([f"{engine}:*"])
        except KernelLoadError as error:
            absent.append(str(error))
    return found, absent


def refuse_untyped_links(folder: Path, parameter: str, option: str) -> None:
    """Raise Refusal for a link on the way to ``folder``, which is to be written to, unless the user typed its name.

    ``parameter`` is what the present command calls the value of ``option``.
    """
    from attnfuzz.own_files import LinkError, refuse_links

    if click.get_current_context().get_parameter_source(parameter) is ParameterSource.COMMANDLINE:
        return
    try:
        refuse_links(folder)
    except LinkError as error:
        raise Refusal(f"{error}, or name a folder with {option}") from error


_NAMES = {"budget": "budget_s", "regressions": "save_folder", "on": "others"}
"""Settings whose option is called differently."""
_AGAINST_NOTHING = "none"


def configured() -> Settings:
    """The settings of the project that the present command was given. Only for commands with ``--profile``."""
    settings: Settings = click.get_current_context().obj
    return settings


def profile_option(*names: str) -> Callable[[Command], Command]:
    """``--profile``, for a command whose options take the settings called ``names`` as their defaults."""

    def configure(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if ctx.resilient_parsing:  # completing a command line
            return
        from attnfuzz.config import load_settings

        with refusing():
            settings = ctx.obj = load_settings(profile=value)
        values = {name: getattr(settings, name) for name in names}
        ctx.default_map = {_NAMES.get(name, name): value for name, value in values.items() if value is not None}

    return click.option(
        "--profile",
        metavar="NAME",
        is_eager=True,  # so that the defaults are there when the other options are read
        expose_value=False,
        callback=configure,
        help="Take defaults from [tool.attnfuzz.profiles.NAME] in pyproject.toml.",
    )


def _tolerance(ctx: click.Context, param: click.Parameter, value: str | FixedTolerance) -> Tolerance:
    """``bound``, or a FixedTolerance from ``ATOL,RTOL`` or from the settings."""
    from attnfuzz.problems.declared_numerics import FixedTolerance

    if isinstance(value, FixedTolerance):
        return value
    if value == "bound":
        return "bound"
    try:
        atol, rtol = (float(number) for number in value.split(","))
        return FixedTolerance(atol=atol, rtol=rtol)
    except ValueError as error:
        text = f"{value!r} must be 'bound' or two finite numbers >= 0 such as 1e-2,1e-2"
        raise click.BadParameter(text, ctx, param) from error


def _earlier(ctx: click.Context, param: click.Parameter, value: Path | None) -> Earlier | None:
    """The summary of an earlier campaign, read before anything is searched."""
    if value is None or str(value) == _AGAINST_NOTHING or ctx.resilient_parsing:
        return None
    from attnfuzz.campaign.result import Earlier, EarlierError, load_earlier

    if value.is_dir():
        from attnfuzz.campaign.saved.merging import tell_apart
        from attnfuzz.cli.replay import read_saved
        from attnfuzz.corpus import regression_files

        saved = [one for one in read_saved(regression_files([value])) if one.regression.status == "open"]
        bugs = [bug for bug in tell_apart(saved) if not bug.stands_alone]
        issues = [next(filter(None, (file.regression.issue for file in bug.files)), "") for bug in bugs]
        return Earlier(value.name, saved=tuple(zip(bugs, issues, strict=True)))
    try:
        return load_earlier(value)
    except EarlierError as error:
        raise click.BadParameter(str(error), ctx, param) from error


AGAINST = click.option(
    "--against",
    type=FILE,
    callback=_earlier,
    metavar="SUMMARY.json|DIR",
    help="An earlier --json, or a folder of saved cases, whose open ones count: findings of the same kernel and cause "
    "are known, and only new ones fail. 'none' for no comparison.",
)
TOLERANCE = click.option(
    "--tolerance",
    type=click.UNPROCESSED,
    callback=_tolerance,
    default="bound",
    metavar="bound|ATOL,RTOL",
    show_default=True,
    help="The derived error bounds, or a fixed tolerance to match another suite.",
)
