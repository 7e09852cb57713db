"""Types, checks and texts that the options of several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from attnfuzz.campaign.stopping import parse_duration
from attnfuzz.config_rules import DEVICES, MAX_WORKERS
from attnfuzz.data_files import why_unusable
from attnfuzz.oracles.verdict import ORACLES

__all__ = [
    "DEVICE",
    "FILE",
    "KERNEL_HELP",
    "ORACLE",
    "PYTHON",
    "TRUST",
    "duration",
    "number_of_workers",
    "writable_file",
]

KERNEL_HELP = (
    "KERNEL is a bundled name or glob (paged_*), an engine's (vllm:*), module:name, or path/to/file.py[:name]."
)
DEVICE = click.Choice(DEVICES)
ORACLE = click.Choice(ORACLES)

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
PYTHON = click.option(
    "--python",
    "pythons",
    type=FILE,
    multiple=True,
    metavar="PATH",
    help="Run kernels in this virtual environment (its folder or its interpreter); repeatable, to compare.",
)


def duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Seconds, from ``1h30m``."""
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
