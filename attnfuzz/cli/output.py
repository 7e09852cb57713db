"""Output that may be gone, and what a command refuses to do: one sentence on stderr, exit status 2, no traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from attnfuzz.cli.outcome import NOT_JUDGED
from attnfuzz.untrusted_text import only_printable

_GONE = (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF)


def is_gone(error: OSError) -> bool:
    """Whether ``error`` is of writing to an output that takes no more."""
    return error.errno in _GONE


def detach_output(*, but_stderr: bool = False) -> None:
    """Have what is still to be printed go nowhere, so that the interpreter's own flush at its end does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1,) if but_stderr else (1, 2):
        with suppress(OSError):  # one that is closed already
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def open_missing_streams() -> None:
    """Give a process that was started with closed standard streams something in their place.

    The next file or socket that is opened would else take their descriptors, and be printed into. What is written to a
    closed stdout goes on failing, so that nobody takes output for delivered; what goes to a closed stderr is dropped.
    """
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, flags)
            os.dup2(opened, descriptor)  # inheritable, as standard streams are
            if opened != descriptor:
                os.close(opened)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "w" if descriptor else "r"
            setattr(sys, name, open(descriptor, mode, errors="replace", closefd=False))  # noqa: SIM115 - for good


def flush_output() -> OSError | None:
    """Print what is buffered; what went wrong, if it could not be."""
    failed = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            failed = error
            detach_output(but_stderr=stream is sys.stdout)
    return failed


@contextmanager
def while_anyone_reads() -> Iterator[None]:
    """Print, and go on if that fails: the exit status and the files say the same."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if not is_gone(error):
            raise
        detach_output()


def show_error(error: click.ClickException) -> None:
    """One sentence, without the lines on usage that click puts before it, unless help is all there is to say."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        error.show()
    else:
        click.echo(f"Error: {only_printable(error.format_message())}", err=True)


def print_document(text: bytes) -> None:
    """Print what is the whole point of a command. Raises Undelivered if it cannot be: then nobody has it."""
    try:
        click.echo(text, nl=False)
        sys.stdout.flush()
    except OSError as error:
        if not is_gone(error):
            raise
        detach_output(but_stderr=True)
        raise Undelivered(f"the document cannot be written: {error.strerror}; print it where there is room") from error


class Refusal(click.ClickException):
    """Wrong usage or environment."""

    exit_code = NOT_JUDGED


class Undelivered(Refusal):
    """The output takes no document."""


@contextmanager
def refusing() -> Iterator[None]:
    """Turn what the user or the machine got wrong into a Refusal; bugs of the framework are `main`'s to tell."""
    from attnfuzz.campaign.saved.state import StateError
    from attnfuzz.config import ConfigurationError
    from attnfuzz.corpus import RegressionError
    from attnfuzz.declaration import KernelLoadError
    from attnfuzz.internal_errors import in_one_sentence
    from attnfuzz.isolation.outcomes import ExecutorUnavailable
    from attnfuzz.isolation.pythons import PythonError
    from attnfuzz.oracles.own import OracleError
    from attnfuzz.own_files import LinkError
    from attnfuzz.problems.limits import CaseTooLarge

    try:
        yield
    except (
        ConfigurationError, RegressionError, KernelLoadError, OracleError, CaseTooLarge, StateError, PythonError,
        LinkError,
    ) as error:  # fmt: skip
        raise Refusal(str(error)) from error
    except ExecutorUnavailable as error:  # with the last output of a process that could not be started
        raise Refusal(in_one_sentence(str(error))) from error


def write_asked(*files: tuple[str, Path | None, Callable[[Path], object]]) -> None:
    """Write the files that options ask for: option, path or None, and what writes there.

    One that cannot be written keeps none of the others from it. Raises Refusal.
    """
    refused = []
    for option, path, write in files:
        if path is not None:
            try:
                write(path)
            except OSError as error:
                refused.append(f"{option} {str(path)!r} cannot be written: {error.strerror}")
    if refused:
        raise Refusal("; ".join(refused))
