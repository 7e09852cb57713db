"""The cases that mutants of a kernel are hunted with: drawn as a campaign draws them, but once for all mutants."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from attnfuzz.campaign.draw.drawing import derive_seed, run_round
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.formats import Format
from attnfuzz.strategies.cases import case_lists
from attnfuzz.strategies.formats import first_formats
from attnfuzz.strategies.sizes import CPU_SIZES, GPU_SIZES

__all__ = ["CaseStream"]

_CASES_PER_LIST = 8
_LISTS_PER_ROUND = 25
_MAX_EMPTY_ROUNDS = 3
_FORMATS = 16
"""On a GPU, where each costs a compilation: the first rounds have few of them, later ones all."""


class CaseStream:
    """All different cases of one kernel, in an order that ``seed`` decides; for several threads."""

    def __init__(self, declaration: Declaration, *, seed: int, device: str) -> None:
        self._declaration = declaration
        self._seed = seed
        self._sizes = GPU_SIZES if device == "cuda" else CPU_SIZES
        self._formats = self._first_formats() if device == "cuda" else []
        self._lock = threading.Lock()
        self._cases: list[Case] = []
        self._seen: set[bytes] = set()
        self._rounds = 0
        self._empty_rounds = 0

    def take(self, start: int, count: int) -> Sequence[Case]:
        """Cases ``start`` to ``start + count``; fewer where there are no more."""
        with self._lock:
            while len(self._cases) < start + count and self._empty_rounds < _MAX_EMPTY_ROUNDS:
                self._draw()
            return self._cases[start : start + count]

    def _draw(self) -> None:
        """A round of at most 200 cases. The first that a round draws are the simplest."""
        before = len(self._cases)
        self._rounds += 1
        run_round(
            case_lists(
                self._declaration.problem,
                length=_CASES_PER_LIST,
                supports=self._declaration.supports,
                options=self._declaration.options,
                sizes=self._sizes,
                formats=self._formats[: 2 * self._rounds],
            ),
            self._keep,
            seed_value=derive_seed(self._seed, self._declaration.name, self._rounds),
            until=math.inf,
            max_draws=_LISTS_PER_ROUND,
        )
        self._empty_rounds = 0 if len(self._cases) > before else self._empty_rounds + 1

    def _keep(self, cases: list[Case]) -> bool:
        for case in cases:
            encoded = encode_case(case)
            if encoded not in self._seen:
                self._seen.add(encoded)
                self._cases.append(case)
        return True

    def _first_formats(self) -> list[Format]:
        declaration = self._declaration
        return list(
            first_formats(
                declaration.problem,
                count=_FORMATS,
                supports=declaration.supports,
                options=declaration.options,
                sizes=self._sizes,
            )
        )
