"""``attnfuzz doctor``: whether this machine can run kernels."""

from __future__ import annotations

import click

__all__ = ["command"]

_STYLE = {"ok": "green", "note": "yellow", "problem": "bold red"}


@click.command()
def command() -> int:
    """Check Python, packages, device, Triton's interpreter and caches. The exit status is 2 if anything is wrong."""
    from rich.text import Text

    from attnfuzz.doctor import examine
    from attnfuzz.report.terminal import make_console

    console = make_console()
    problems = 0
    for part in examine():
        problems += part.status == "problem"
        console.print(
            Text(f"{part.status:<8}", style=_STYLE[part.status]).append(f"{part.name}: {part.text}", "default")
        )
        if part.remedy:
            console.print(Text(f"        {part.remedy}"))
    return 2 if problems else 0
