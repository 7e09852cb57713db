"""The command line: the only place that parses arguments. Each command is imported when it is used."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence

import click

from attnfuzz.cli.output import detach_output, flush_output, is_gone, while_anyone_reads

__all__ = ["main"]

_COMMANDS = {
    "explore": "attnfuzz.cli.explore",
    "replay": "attnfuzz.cli.replay",
    "list": "attnfuzz.cli.listing",
    "show": "attnfuzz.cli.show",
    "explain": "attnfuzz.cli.explain",
    "repro": "attnfuzz.cli.repro",
    "merge": "attnfuzz.cli.merge",
    "mutants": "attnfuzz.cli.mutants",
    "bench": "attnfuzz.cli.bench",
    "doctor": "attnfuzz.cli.doctor",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(_COMMANDS[cmd_name]).command
        return command


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="attnfuzz", message="%(prog)s %(version)s")
def _attnfuzz() -> None:
    """Find bugs in LLM decode-attention kernels: draw hard cases, compare with a float64 reference, shrink, replay."""


def _check_encoding(arguments: Sequence[str]) -> None:
    """Raise UsageError for what could be neither printed, nor saved as JSON, nor sent to another process."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise click.UsageError(f"{argument!r} is not UTF-8, so it names nothing here; rename the file") from None


def _show(error: click.ClickException) -> None:
    """One sentence, without the lines on usage that click puts before it, unless help is all there is to say."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        error.show()
    else:
        click.ClickException.show(error)


def main() -> None:
    """Run a command; the process ends with its exit status.

    0: nothing found. 1: findings. 2: wrong usage or environment. 128 + N: interrupted by signal N, so 130 after Ctrl-C.
    """
    try:
        _check_encoding(sys.argv[1:])
        status = _attnfuzz.main(prog_name="attnfuzz", standalone_mode=False)
    except click.exceptions.Abort as abort:  # Ctrl-C, or another signal that a campaign counts like it
        status = 128 + getattr(abort.__cause__, "number", signal.SIGINT)
    except click.ClickException as error:
        with while_anyone_reads():
            _show(error)
        status = error.exit_code
    except OSError as error:
        if not is_gone(error):
            raise
        detach_output()
        status = 1
    flush_output()
    sys.exit(status if isinstance(status, int) else 0)
