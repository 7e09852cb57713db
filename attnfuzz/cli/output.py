"""Output that may be gone: a closed terminal, a pipe without a reader, a log on a full disk."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["detach_output", "flush_output", "is_gone", "while_anyone_reads"]

_GONE = (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF)


def is_gone(error: OSError) -> bool:
    """Whether ``error`` is of writing to an output that takes no more."""
    return error.errno in _GONE


def detach_output() -> None:
    """Have what is still to be printed go nowhere, so that the interpreter's own flush at its end does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with suppress(OSError):  # one that is closed already
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def flush_output() -> None:
    """Print what is buffered, if anybody takes it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            detach_output()


@contextmanager
def while_anyone_reads() -> Iterator[None]:
    """Print, and go on if that fails: the exit status and the files say the same."""
    try:
        yield
    except OSError as error:
        if not is_gone(error):
            raise
        detach_output()
