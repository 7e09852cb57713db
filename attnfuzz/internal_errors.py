"""Errors of attnfuzz itself: one sentence for the user, and the traceback in a file that the sentence names.

A GPU whose memory others have filled is no such error, wherever it shows: the sentence says what to do.
"""

from __future__ import annotations

import os
import re
import tempfile
import traceback

_PREFIX = "attnfuzz-error-"
_MAX_SHOWN = 400
"""Characters of each line that is shown: a message may hold a whole document."""
_OUT_OF_GPU_MEMORY = re.compile(
    r"(?:Triton Error \[(?:CUDA|HIP)\]|CUDA error|HIP error): .*\bout of memory|(?:CUDA|HIP) out of memory"
    r"|CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)",  # which is how cuBLAS says it
    re.IGNORECASE,
)
_AFTER_FRAMES = re.compile(r"(?:.*\n)*  +\S.*\n(\S.*)")
"""The line of a traceback that says what was raised; torch has its errors followed by lines of advice."""


def own_error(error: BaseException) -> str:
    """The report of an error that nobody expected."""
    return in_one_sentence("".join(traceback.format_exception(error)))


def in_one_sentence(text: str) -> str:
    """``text`` as one line: its own if it is one, else its first and its last, and the name of a file that holds it.

    Of a bare traceback, the line after the frames says what went wrong. Where no file can be written, the whole text
    follows the sentence.
    """
    if full := gpu_memory_ran_out(text):
        return f"the GPU has no memory left ({full}); free some there, `nvidia-smi` lists who holds it"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) < 2:
        return text.strip()
    after = _AFTER_FRAMES.match(text)
    last = _cut(lines[-1] if after is None else after[1].strip())
    if lines[0].startswith("Traceback"):
        said, whole, please = f"attnfuzz itself failed: {last}", "the traceback", "; please report it with that file"
    else:
        said, whole, please = f"{_cut(lines[0]).rstrip(':')}: {last}", "all of it", ""
    try:
        path = _write(text)
    except OSError as error:
        return f"{said} ({whole} follows, as no file can be written: {error.strerror})\n{text.rstrip()}"
    return f"{said} ({whole} is in {path}{please})"


def gpu_memory_ran_out(text: str) -> str:
    """The words of an error's ``text``, or a traceback, on a GPU whose memory ran out; empty if it is another error."""
    found = _OUT_OF_GPU_MEMORY.search(text)
    return found[0].strip() if found else ""


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}..."


def _write(text: str) -> str:
    descriptor, path = tempfile.mkstemp(prefix=_PREFIX, suffix=".txt")
    try:
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:  # noqa: PTH123 - a descriptor
            file.write(text.rstrip() + "\n")
    except OSError:
        os.unlink(path)  # noqa: PTH108 - what mkstemp gave
        raise
    return path
