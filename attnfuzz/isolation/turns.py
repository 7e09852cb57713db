"""Turns at what processes do no faster side by side: a few do it at a time, and the others wait.

Sixteen processes that start CUDA on one GPU at the same moment are all done after four to five seconds, none of them
much earlier, and one by itself after a fifth of a second. With turns the first is as early as if it were alone.
"""

import contextlib
import fcntl
import os
import tempfile
import zlib
from collections.abc import Iterator

__all__ = ["Turns"]

_PLACES = 1 << 20
"""Bytes of the file that are locked for one name."""


class Turns:
    """Turns among all processes that are forked from the one that makes this, ``at_once`` of them at a time.

    Locks of parts of a file: the system lets go of those of a process that is killed.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        with tempfile.TemporaryFile() as file:
            self._file = os.dup(file.fileno())  # open for as long as there are processes

    @contextlib.contextmanager
    def turn(self, at: str) -> Iterator[None]:
        """Wait for a turn at what ``at`` names; others' turns at anything else do not count."""
        first = _PLACES * zlib.crc32(at.encode())
        place = next((one for one in range(first, first + self._at_once) if self._takes(one)), None)
        if place is None:
            place = first + os.getpid() % self._at_once
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, place)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

    def _takes(self, place: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except BlockingIOError:  # somebody else's turn
            return False
        return True
