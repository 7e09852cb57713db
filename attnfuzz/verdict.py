"""Verdicts of oracles on a case: the data that travels from the executor to the driver. Torch-free."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec

from attnfuzz.mistake import (
    common_to,
    mistake_of,
)
from attnfuzz.oracles.registry import ACCURACY, OracleName, oracle_of
from attnfuzz.untrusted_text import NAME_BYTES, code_line, printable, printable_lines

REPLACED = " replaced"
"""The end of the kind of "red_zone" where a kernel has replaced what judges it: no process that does so tells more."""

RESULT = "result"
"""The kind of "exception" where attnfuzz objects to what a kernel returned, and the kernel itself to nothing."""

MOST_PLACES = 256
_FEW = msgspec.Meta(max_length=MOST_PLACES)


class Drawn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One relation, where those ``without`` are left out: the one that a case draws, or, where it is the ``turn`` of
    those that are costly, the one among these that comes as the ``turn``-th, counted round and round."""

    without: tuple[OracleName, ...] = ()
    turn: int | None = None


Relations = tuple[OracleName, ...] | Literal["all"] | Drawn | None
"""Which relations judge a case that all other oracles are content with: the one that the case draws (None), one with
conditions, those named, or all. Only those among the oracles asked for, and that apply to the case."""


def make_printable(said: msgspec.Struct) -> None:
    """Make the words of ``said``, which a kernel or a stranger chose, fit to be shown and kept."""
    message, details = said.message, said.details  # type: ignore[attr-defined]  # of Failure and FindingRecord
    for name in ("kind", "tensor"):
        msgspec.structs.force_setattr(said, name, printable(getattr(said, name), NAME_BYTES))
    msgspec.structs.force_setattr(said, "message", printable(message))
    msgspec.structs.force_setattr(said, "details", printable_lines(details))


class Blame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Where in a case something is wrong: ``tokens`` as (sequence, position), ``seqs`` by number, ``rows`` as (row of
    the result, head)."""

    tokens: Annotated[tuple[tuple[int, int], ...], _FEW] = ()
    seqs: Annotated[tuple[int, ...], _FEW] = ()
    rows: Annotated[tuple[tuple[int, int], ...], _FEW] = ()

    def __or__(self, other: Blame) -> Blame:
        """Both, as far as there is room."""
        return Blame(
            tokens=tuple(dict.fromkeys((*self.tokens, *other.tokens)))[:MOST_PLACES],
            seqs=tuple(dict.fromkeys((*self.seqs, *other.seqs)))[:MOST_PLACES],
            rows=tuple(dict.fromkeys((*self.rows, *other.rows)))[:MOST_PLACES],
        )


class SourceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of a kernel, from 1 on, with its text, empty if that cannot be read.

    ``file`` is relative to the working directory, or to where modules are found, if it lies there.
    """

    file: str
    line: Annotated[int, msgspec.Meta(ge=1)]
    text: str = ""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "file", printable(self.file))
        msgspec.structs.force_setattr(self, "text", printable(self.text))

    @classmethod
    def at(cls, file: str, line: int) -> SourceLine:
        """Line ``line`` of ``file``, which is called as code under test calls it."""
        path = Path(file)
        folders = sorted({Path(folder) for folder in sys.path if folder}, key=lambda one: -len(one.parts))
        with contextlib.suppress(OSError):  # somebody has removed it
            folders.insert(0, Path.cwd())
        folder = next((one for one in folders if path.is_relative_to(one)), None)
        shortest = file if folder is None else str(path.relative_to(folder))
        return cls(file=shortest, line=line, text=code_line(file, line))

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        return f"{place}: `{self.text}`" if self.text else place

    def is_that_of(self, other: SourceLine) -> bool:
        """Whether both are one line: processes that find modules in other folders call its file by more of its path."""
        short, long = sorted((self.file, other.file), key=len)
        return self.line == other.line and f"/{long}".endswith(f"/{short}")


def where_to_look(sources: Iterable[SourceLine]) -> tuple[str, ...]:
    """The lines that a cause comes from, in words; none where none is known."""
    return tuple(f"look at {source}" for source in sources)


def finding_name(oracle: str, kind: str, cause: str = "") -> str:
    """The name of a finding wherever it is told: its oracle and kind, and its ``cause`` where that says more.

    An oracle of a user's own tells no kinds apart.
    """
    what = cause if mistake_of(cause).is_everywhere else kind
    return f"{oracle}/{what}" if what else oracle


class Sight(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Another way in which a bug shows: what an oracle says of another case, and what that still needs, if known."""

    oracle: OracleName
    kind: str
    message: str
    features: Annotated[tuple[str, ...], _FEW] = ()

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "kind", printable(self.kind, NAME_BYTES))
        msgspec.structs.force_setattr(self, "message", printable(self.message))

    @property
    def name(self) -> str:
        """Name of a finding that shows in this way."""
        return finding_name(self.oracle, self.kind)


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A mistake of a kernel that gives what came out of a case.

    ``mistake`` and ``way`` say which, in short, stable words: the same in every case and every campaign. A mistake may
    be made in several ways ("window": "left out", "one too long"). ``words`` is a clause on this case; ``rule`` says
    which part of any case it is about ("the last token of each page"), where that is not all of it; ``tokens``, as
    (sequence, position), are those that it is about. ``numerics``: the fields of `Numerics`, with their
    values, that a kernel declares which rounds so on purpose.
    """

    mistake: str
    way: str = ""
    words: str = ""
    rule: str = ""
    tokens: Annotated[tuple[tuple[int, int], ...], _FEW] = ()
    numerics: dict[str, str] = {}

    def __post_init__(self) -> None:
        for name in ("mistake", "way"):
            msgspec.structs.force_setattr(self, name, printable(getattr(self, name), NAME_BYTES))
        msgspec.structs.force_setattr(self, "words", printable(self.words))
        msgspec.structs.force_setattr(self, "rule", printable(self.rule, NAME_BYTES))

    @property
    def rounding(self) -> bool:
        """Whether it loses bits."""
        return mistake_of(self.mistake).rounds


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Why a case failed.

    ``kind`` is a short, stable word that keeps different bugs of one oracle apart ("out:value", "lse:nan", "SIGSEGV",
    an exception's type, "write after out"). ``message`` is one sentence for an engineer; ``details`` are further lines:
    which element, got and expected, error over bound, the token or page it points to. Sentences are for people; what
    attnfuzz itself goes by is in the other fields:

    - ``tensor``: the tensor that is concerned, if one is known;
    - ``causes``: every mistake known to attnfuzz that gives this very result, the likeliest first
      (`attnfuzz.explaining.diagnose`); none if no one does. Only where one is left is it known to be the cause;
    - ``maybe``: mistakes that would give errors of such a size, if they are known of the kernel;
    - ``blame``: what it points to;
    - ``remedy``: the fields of `Supports` that a kernel declares which is meant to do this, with their values;
    - ``sources``: the lines of the kernel that its cause comes from, if they are known;
    - ``raised_at``: the line of the kernel that raised, of an exception;
    - ``misuse``: what to write instead, where the kernel cannot be called as it is written, whatever the case.

    Wherever one is made, or read from what another process sent, what a kernel said in it is fit to be shown and kept.
    """

    oracle: OracleName
    kind: str
    message: str
    details: tuple[str, ...] = ()
    error_ratio: float | None = None
    tensor: str = ""
    causes: Annotated[tuple[Cause, ...], _FEW] = ()
    maybe: tuple[str, ...] = ()
    blame: Blame = Blame()
    remedy: dict[str, str | bool] = {}
    sources: Annotated[tuple[SourceLine, ...], _FEW] = ()
    raised_at: SourceLine | None = None
    misuse: str = ""

    def __post_init__(self) -> None:
        make_printable(self)
        msgspec.structs.force_setattr(self, "misuse", printable(self.misuse))
        msgspec.structs.force_setattr(self, "causes", self.causes[:MOST_PLACES])  # hundreds of counts give one number

    @property
    def name(self) -> str:
        """Name of a finding of this failure."""
        return finding_name(self.oracle, self.kind, self.cause)

    @property
    def cause(self) -> str:
        """The mistake of all ``causes``; empty if there is none, or no one of them is known to be it."""
        return common_to(one.mistake for one in self.causes)

    @property
    def undecided(self) -> Failure:
        """This failure before anything has been asked about its causes, which are then only possible ones.

        What memory shows needs no asking.
        """
        if self.oracle != ACCURACY.name:
            return self
        found = dict.fromkeys((*self.maybe, *(one.mistake for one in self.causes)))
        return msgspec.structs.replace(self, causes=(), maybe=tuple(found))

    @property
    def designs(self) -> tuple[dict[str, str], ...]:
        """The fields of `Numerics` that declare a cause to be none, of those that are likeliest."""
        found = list(itertools.takewhile(bool, (one.numerics for one in self.causes)))
        return tuple(one for i, one in enumerate(found) if one not in found[:i])

    @property
    def replays(self) -> tuple[str, ...]:
        """The ways of all causes."""
        return tuple(one.way for one in self.causes)


class _OfKind(Protocol):
    """Fields that tell failures apart."""

    @property
    def oracle(self) -> str: ...

    @property
    def kind(self) -> str: ...


def ends_process(failure: _OfKind | None) -> bool:
    """Whether the process that ran the case was gone after it."""
    return failure is not None and (oracle_of(failure.oracle).ends_process or is_fault(failure.oracle, failure.kind))


def is_fault(oracle: str, kind: str) -> bool:
    """Whether the run of a relation ended the process with this kind of failure: a memory fault, a failed capture."""
    return oracle_of(oracle).is_fault(kind)


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds spent on one case, by part; of what a batch spends on all its cases at once, an equal share.

    ``compile_s``: Triton's compilations and ``built_s``, which ``kernel_s`` leaves out. ``built_s``: waiting for a
    kernel that compiles itself in other processes. Where nothing waits for a GPU, ``kernel_s`` is the time of the
    launches. ``build_s`` is for making the inputs.
    """

    build_s: float = 0.0
    built_s: float = 0.0
    compile_s: float = 0.0
    kernel_s: float = 0.0
    reference_s: float = 0.0
    total_s: float = 0.0

    def __add__(self, other: Timing) -> Timing:
        return Timing(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one case on one kernel. ``failure`` is None when every oracle is content.

    ``error_ratio`` is the largest |error| / bound seen, 0.0 if nothing was compared (infinite for a wrong NaN).
    ``fatal`` is set when the process must not be used again (a sticky CUDA error, exhausted memory).
    ``not_runnable`` says why the kernel cannot run this case here, through no fault of its own: nothing was judged.
    ``related``: the relations that had a word on the case; ``untried``: those none of whose runs could be made.
    """

    failure: Failure | None = None
    error_ratio: float = 0.0
    timing: Timing = Timing()
    fatal: bool = False
    not_runnable: str = ""
    related: tuple[OracleName, ...] = ()
    untried: tuple[OracleName, ...] = ()
