"""What an earlier campaign's summary told: for a search in which only what is new counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from attnfuzz.campaign.elsewhere import FoundElsewhere
from attnfuzz.campaign.finding import Finding
from attnfuzz.data_files import MOST_RESULT_BYTES, read_data_file

__all__ = ["FORMAT", "Earlier", "EarlierError", "load_earlier"]

FORMAT = "attnfuzz.summary/1"
"""Of the summaries that are written and read; ``report.summary`` writes more fields than are read here."""

_Bug = tuple[str, str, str, str]
"""How a kernel is named and its name, how a bug is named and its name."""


class EarlierError(ValueError):
    """A file cannot serve as an earlier summary; the message is one sentence."""


class _Bugs(msgspec.Struct, frozen=True):
    signature: str
    cause: str = ""


class _Kernel(msgspec.Struct, frozen=True):
    name: str
    findings: tuple[_Bugs, ...]
    target: str = ""


class _Elsewhere(msgspec.Struct, frozen=True):
    kernel: str
    signature: str


class _Summary(msgspec.Struct, frozen=True):
    format: str
    kernels: tuple[_Kernel, ...]
    elsewhere: tuple[_Elsewhere, ...] = ()


@dataclass(frozen=True, slots=True)
class Earlier:
    """The bugs that the summary called ``name`` tells.

    A bug is known by its kernel and its cause. Where the summary is of a version that wrote no causes, and where only
    another machine has found it, the signature stands for the cause; in a summary without files of kernels, the name
    of a kernel stands for all of that name.
    """

    name: str
    bugs: frozenset[_Bug] = field(default_factory=frozenset)

    def knows(self, found: Finding | FoundElsewhere) -> bool:
        """Whether ``found`` was told."""
        return any(one in self.bugs for one in _names_of(found))


def load_earlier(path: Path) -> Earlier:
    """Read a summary, of this or an older version. Raises EarlierError."""
    try:
        data = read_data_file(path, MOST_RESULT_BYTES)
    except OSError as error:
        raise EarlierError(f"{str(path)!r} cannot be read ({error.strerror}); {_REMEDY}") from error
    try:
        summary = msgspec.json.decode(data, type=_Summary)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EarlierError(f"{str(path)!r} is no summary of attnfuzz ({error}); {_REMEDY}") from error
    if summary.format != FORMAT:
        is_told = f"its format is {summary.format[:_SHOWN_CHARACTERS]!r}, not {FORMAT!r}"
        raise EarlierError(f"{str(path)!r} is no summary that can be read here ({is_told}); {_REMEDY}")
    return Earlier(path.name, frozenset(_bugs_in(summary)))


_REMEDY = "name what attnfuzz explore --json has written"
_SHOWN_CHARACTERS = 60


def _bugs_in(summary: _Summary) -> Iterator[_Bug]:
    for kernel in summary.kernels:
        of_kernel = ("target", kernel.target) if kernel.target else ("name", kernel.name)
        for bug in kernel.findings:
            yield (*of_kernel, *(("cause", bug.cause) if bug.cause else ("signature", bug.signature)))
            yield (*of_kernel, "told elsewhere", bug.signature)
    for found in summary.elsewhere:
        yield "target", found.kernel, "signature", found.signature
        yield "target", found.kernel, "told elsewhere", found.signature


def _names_of(found: Finding | FoundElsewhere) -> Iterator[_Bug]:
    """All that a summary may call it."""
    if isinstance(found, FoundElsewhere):
        yield "target", found.signature.symptom.kernel, "told elsewhere", str(found.signature)
        return
    declaration = found.declaration
    for kernel in (("target", declaration.target), ("name", declaration.name)):
        yield (*kernel, "cause", found.cause)
        yield (*kernel, "signature", str(found.signature))
