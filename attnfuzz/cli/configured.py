"""Options whose defaults ``[tool.attnfuzz]`` in pyproject.toml can set, for every command that has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from attnfuzz.cli.parameters import FILE
from attnfuzz.cli.refusal import refusing

if TYPE_CHECKING:
    from attnfuzz.campaign.result import Earlier
    from attnfuzz.config import Settings
    from attnfuzz.problems.tolerance import FixedTolerance, Tolerance

__all__ = ["AGAINST", "TOLERANCE", "configured", "profile_option"]

Command = TypeVar("Command", bound=Callable[..., Any])

_NAMES = {"regressions": "save_dir", "on": "others"}
"""Of settings whose option is called differently."""
_NOT_SHARED = _AGAINST_NOTHING = "none"


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
    from attnfuzz.problems.tolerance import FixedTolerance

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
    """What the summary tells, read before anything is searched."""
    if value is None or str(value) == _AGAINST_NOTHING or ctx.resilient_parsing:
        return None
    from attnfuzz.campaign.result import EarlierError, load_earlier

    try:
        return load_earlier(value)
    except EarlierError as error:
        raise click.BadParameter(str(error), ctx, param) from error


AGAINST = click.option(
    "--against",
    type=FILE,
    callback=_earlier,
    metavar="SUMMARY.json",
    help="An earlier --json: only findings that it does not tell (by kernel and cause) fail. 'none' for no comparison.",
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
