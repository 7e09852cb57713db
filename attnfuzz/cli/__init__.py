"""The command line: the only place that parses arguments. Each command is imported when it is used."""

from __future__ import annotations

import errno
import importlib
import signal
import sys
from collections.abc import Sequence

import click

from attnfuzz.cli.outcome import NOT_JUDGED, SHOWN, Outcome, interrupted_by
from attnfuzz.cli.output import (
    detach_output,
    flush_output,
    is_gone,
    open_missing_streams,
    show_error,
    while_anyone_reads,
)

_COMMANDS = {
    "explore": ("attnfuzz.cli.explore", "Search kernels for bugs."),
    "ci": ("attnfuzz.cli.ci", "Run saved cases, then search, and write reports."),
    "verify": ("attnfuzz.cli.verify", "Judge a kernel that somebody else wrote."),
    "declare": ("attnfuzz.cli.declare", "Find out what a kernel takes, and print its declaration."),
    "replay": ("attnfuzz.cli.replay", "Run saved cases again."),
    "bisect": ("attnfuzz.cli.replay:bisect_command", "Find the environment in which a saved case began to fail."),
    "list": ("attnfuzz.cli.show:list_command", "List kernels and what they declare."),
    "show": ("attnfuzz.cli.show:show_command", "Draw a saved case: sequences, pages, and where it fails."),
    "explain": ("attnfuzz.cli.explain", "Say what a kernel did wrong in a saved case."),
    "repro": ("attnfuzz.cli.show:repro_command", "Turn a saved case into one Python file without attnfuzz."),
    "conformance": ("attnfuzz.cli.conformance", "Put a fixed set of cases to kernels of engines."),
    "merge": ("attnfuzz.cli.merge", "Bring together what several machines saved."),
    "triage": ("attnfuzz.cli.show:triage_command", "List saved cases as open, flaky and fixed; mark them as fixed."),
    "mutants": ("attnfuzz.cli.mutants", "Plant small bugs in a kernel to test its tests."),
    "bench": ("attnfuzz.cli.bench", "Time kernels, or choose their options."),
    "tolerances": ("attnfuzz.cli.tolerances", "Show which bugs the tolerances of other suites let through."),
    "doctor": ("attnfuzz.cli.show:doctor_command", "Check this machine and say what to repair."),
}
"""Where each command is, and its line in the list of all: a docstring's first sentence would be cut there."""


def command_called(name: str) -> click.Command:
    """One of the commands. Raises KeyError for any other name."""
    place, short_help = _COMMANDS[name]
    module, _, function = place.partition(":")
    command: click.Command = getattr(importlib.import_module(module), function or "command")
    command.name, command.short_help = name, short_help
    return command


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return command_called(cmd_name) if cmd_name in _COMMANDS else None


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


def main() -> None:
    """Run a command; the process ends with its exit status.

    0: all was judged and nothing found. 1: findings. 2: something could not be judged, wrong usage or environment,
    output that cannot be written, or an error of attnfuzz itself. 128 + N: interrupted by signal N, so 130 after
    Ctrl-C; 141 where the reader of a pipe was gone too early.
    """
    open_missing_streams()
    status = _run()
    failed = flush_output()
    if failed is not None and failed.errno != errno.EPIPE and status == 0:
        status = _refuse(_why_unwritten(failed))  # 0 would say that somebody has it
    sys.exit(status)


def _run() -> int:
    try:
        _check_encoding(sys.argv[1:])
        outcome = _attnfuzz.main(prog_name="attnfuzz", standalone_mode=False)
        return outcome.status if isinstance(outcome, Outcome) else SHOWN.status  # of --help and --version
    except click.exceptions.Abort as abort:  # Ctrl-C, or another signal that a campaign counts like it
        number: int = getattr(abort.__cause__, "number", signal.SIGINT)
        return interrupted_by(number)
    except click.ClickException as error:
        with while_anyone_reads():
            show_error(error)
        return error.exit_code
    except (BrokenPipeError, SystemExit):  # no command ends the process; click does, for a reader that is gone
        detach_output()
        return interrupted_by(signal.SIGPIPE)  # as other tools end of that, which Python does not
    except Exception as error:  # noqa: BLE001 - whatever it is, nobody may take it for findings
        if isinstance(error, OSError) and is_gone(error):
            detach_output(but_stderr=True)
            return _refuse(_why_unwritten(error))
        from attnfuzz.internal_errors import own_error
        from attnfuzz.isolation.process import why_starved

        return _refuse(why_starved(error) or own_error(error))


def _refuse(sentence: str) -> int:
    with while_anyone_reads():
        click.echo(f"Error: {sentence}", err=True)
    return NOT_JUDGED


def _why_unwritten(error: OSError) -> str:
    what = error.filename or "the output"
    return f"{what} cannot be written: {error.strerror}; make room there, or name another place"
