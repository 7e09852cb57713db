"""How many cases are judged together: as many as time and trust allow."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BatchSize"]

_LONGEST_BATCH_S = 0.3
"""A worker looks at results and mail between batches, and a batch that dies costs as much again."""
_WEIGHT_OF_NEWEST = 0.3


@dataclass(slots=True)
class BatchSize:
    """The size for one kernel: begins at one, doubles while all goes well, and begins again when something goes wrong.

    ``most`` bounds it, and so does the time that a batch would take.
    """

    most: int
    size: int = 1
    _case_s: float = 0.0

    def went_well(self, seconds: float, cases: int) -> None:
        """Learn from ``cases`` that ended by themselves, ``seconds`` in all, compilations left out."""
        newest_s = seconds / cases
        self._case_s += (newest_s - self._case_s) * (_WEIGHT_OF_NEWEST if self._case_s else 1.0)
        fitting = int(_LONGEST_BATCH_S / self._case_s) if self._case_s else self.most
        self.size = max(1, min(2 * self.size if cases >= self.size else self.size, self.most, fitting))

    def went_wrong(self) -> None:
        """After a crash, a hang or a finding: the next case is judged alone."""
        self.size = 1
