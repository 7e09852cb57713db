"""What ran in the present executor before a case: the cases that may have left something behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from attnfuzz.corpus import MAX_PRECEDING
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case

__all__ = ["History"]

_KEPT = 2 * MAX_PRECEDING
"""A batch is recorded as a whole, and the cases before its first one may matter too."""


class History:
    """The latest cases of each kernel that ran in one process; forgotten once another process runs one."""

    def __init__(self) -> None:
        self._process: Hashable = None
        self._cases: dict[str, deque[Case]] = {}

    def record(self, process: Hashable, declaration: Declaration, cases: Sequence[Case]) -> None:
        """Note that ``cases`` ran on a kernel in ``process``, which may have died of the last one."""
        if process != self._process:
            self._process = process
            self._cases.clear()
        self._cases.setdefault(declaration.target, deque(maxlen=_KEPT)).extend(cases)

    def of(self, declaration: Declaration) -> tuple[Case, ...]:
        """Every case of the kernel that is remembered, oldest first."""
        return tuple(self._cases.get(declaration.target, ()))

    def before(self, declaration: Declaration, case: Case) -> tuple[Case, ...]:
        """The cases that ran before the latest run of ``case``, oldest first; at most ``MAX_PRECEDING``.

        Empty if it did not run in this process.
        """
        cases = list(self._cases.get(declaration.target, ()))
        while cases:
            if cases.pop() == case:
                return tuple(cases[-MAX_PRECEDING:])
        return ()
