"""The formats that a worker draws from on a GPU: those that have been compiled, and now and then a new one.

A new format costs hundreds of milliseconds of compilation, a case in one that is compiled about one. So the search
stays within a working set and refreshes it: a bounded part of the time goes into *scouting*, which compiles formats
that nobody has; each is published, so that the other workers find it in Triton's cache on disk. The first formats of
a kernel are the same in every campaign, for the same reason. While there are few, another one shows more than hundreds
of cases in those: half of the time may go into scouting then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case
from attnfuzz.problems.formats import Format, format_key, format_of
from attnfuzz.problems.open_cases import OpenCase, OpenProblem

__all__ = ["FormatSource", "WorkingSets"]

_KEPT = 32
_SCOUTED_AT_ONCE = 4
"""But the first of a kernel alone: until it is compiled there are no cases, and other kernels wait for their turn."""
_MOST_JOINING = 8
"""Of what others have published, at one turn of a kernel."""
_FEW = 16
_SHARE_WHILE_FEW = 0.5
_SHARE_OF_SCOUTING = 0.1
_SHARE_OF_JOINING = 0.05
"""Parts of a worker's time: compiling formats, and loading what others have compiled."""
_TRIES = 64

FormatSource = Callable[[Declaration], Iterator[Format]]
"""Formats of a kernel in the order in which they are to be compiled; endless, and repetitions do no harm."""


@dataclass(slots=True)
class _Formats:
    """Of one kernel. ``known`` holds the keys of all that have been compiled or offered somewhere."""

    source: Iterator[Format]
    active: deque[Format] = field(default_factory=lambda: deque(maxlen=_KEPT))
    offered: deque[Format] = field(default_factory=lambda: deque(maxlen=_KEPT))
    known: set[bytes] = field(default_factory=set)
    joining: set[bytes] = field(default_factory=set)


class WorkingSets:
    """One working set for each kernel; ``source`` says what to compile next."""

    def __init__(self, source: FormatSource) -> None:
        self._source = source
        self._kernels: dict[str, _Formats] = {}
        self._seconds = 0.0
        self._scouting_s = 0.0
        self._joining_s = 0.0

    def to_scout(self, declaration: Declaration) -> list[Format]:
        """Formats to compile now. Nothing while scouting has had its share, unless there is nothing to draw from."""
        if isinstance(declaration.problem, OpenProblem):
            return []
        formats = self._of(declaration)
        is_first = not self.any_for(declaration)
        share = _SHARE_WHILE_FEW if len(formats.known) < _FEW else _SHARE_OF_SCOUTING
        if not is_first and self._scouting_s >= share * self._seconds:
            return []
        fresh: dict[bytes, Format] = {}
        for candidate in islice(formats.source, _TRIES):
            if (key := format_key(candidate)) not in formats.known:
                fresh[key] = candidate
            if len(fresh) == (1 if is_first else _SCOUTED_AT_ONCE):
                break
        return list(fresh.values())

    def any_for(self, declaration: Declaration) -> bool:
        """Whether there is anything to draw from; kernels of open problems, which have no formats, always have that."""
        if isinstance(declaration.problem, OpenProblem):
            return True
        formats = self._of(declaration)
        return bool(formats.active or formats.offered)

    def to_draw_from(self, declaration: Declaration) -> list[Format]:
        """The working set for one turn, with some of what others have published since the last."""
        if isinstance(declaration.problem, OpenProblem):
            return []
        formats = self._of(declaration)
        joined = 0
        while formats.offered and joined < _MOST_JOINING and self._may_join(formats):
            newest = formats.offered.pop()
            formats.active.append(newest)
            formats.joining.add(format_key(newest))
            joined += 1
        return list(formats.active)

    def judged(self, declaration: Declaration, case: Case, seconds: float) -> Format | None:
        """Note that ``case`` took ``seconds``; its format if it is new, to be published."""
        self._seconds += seconds
        if isinstance(case, OpenCase):
            return None
        formats, format_ = self._of(declaration), format_of(case)
        key = format_key(format_)
        if key in formats.joining:
            formats.joining.discard(key)
            self._joining_s += seconds
        if key in formats.known:
            return None
        self._scouting_s += seconds
        formats.known.add(key)
        formats.active.append(format_)
        return format_

    def offer(self, declaration: Declaration, format_: Format) -> None:
        """Another worker has compiled ``format_``."""
        formats, key = self._of(declaration), format_key(format_)
        if key not in formats.known:
            formats.known.add(key)
            formats.offered.append(format_)

    def joins(self, declaration: Declaration) -> None:
        """From now on new formats of the kernel are those of ``declaration``; what is compiled stays."""
        if (formats := self._kernels.get(declaration.target)) is not None:
            formats.source = self._source(declaration)

    def _may_join(self, formats: _Formats) -> bool:
        return len(formats.active) < _SCOUTED_AT_ONCE or self._joining_s < _SHARE_OF_JOINING * self._seconds

    def _of(self, declaration: Declaration) -> _Formats:
        if declaration.target not in self._kernels:
            self._kernels[declaration.target] = _Formats(self._source(declaration))
        return self._kernels[declaration.target]
