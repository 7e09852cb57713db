"""Where a worker's cases come from: rounds of Hypothesis, within a working set of formats on a GPU."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from hypothesis.strategies import SearchStrategy

from attnfuzz.campaign.formats import WorkingSets
from attnfuzz.campaign.generation import derive_seed, run_round
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.formats import Format

__all__ = ["Drawing", "StrategyFor"]

StrategyFor = Callable[[Declaration, Sequence[Format], int], SearchStrategy[list[Case]]]
"""Draws lists of so many cases of a kernel, each in one of the given formats if there are any."""

_CASES_PER_LIST = 8
"""Drawn at once: what Hypothesis does for a draw takes several times as long as making a case of it."""
_LISTS_PER_ROUND = 25
_CASES_PER_SCOUTED_FORMAT = 2
"""The first that a round draws is always the simplest."""
_MAX_REMEMBERED = 100_000


class Drawing:
    """Draws each case once. ``seeds`` decide what is drawn; without ``formats``, the format of each case is too."""

    def __init__(
        self, strategy_for: StrategyFor, *, seeds: tuple[object, ...], formats: WorkingSets | None = None
    ) -> None:
        self._strategy_for = strategy_for
        self._seeds = seeds
        self._formats = formats
        self._rounds: Counter[str] = Counter()
        self._seen: dict[str, set[int]] = {}

    def round(self, declaration: Declaration, visit: Callable[[Case], bool], *, until: float) -> None:
        """Draw cases for ``visit`` until it returns False or ``until`` on the monotonic clock; some 200 at most."""
        formats = self._formats.to_draw_from(declaration) if self._formats is not None else ()

        def visit_all(cases: list[Case]) -> bool:
            for case in cases:
                if time.monotonic() >= until or (self._is_new(declaration, case) and not visit(case)):
                    return False
            return True

        run_round(
            self._strategy_for(declaration, formats, _CASES_PER_LIST),
            visit_all,
            seed_value=self._next_seed(declaration),
            until=until,
            max_draws=_LISTS_PER_ROUND,
        )

    def scout(self, declaration: Declaration) -> list[Case]:
        """Cases in formats that are to be compiled now."""
        formats = self._formats.to_scout(declaration) if self._formats is not None else ()
        drawn = [case for format_ in formats for case in self._in_format(declaration, format_)]
        return [case for case in drawn if self._is_new(declaration, case)]

    def _in_format(self, declaration: Declaration, format_: Format) -> list[Case]:
        drawn: list[Case] = []

        def keep(cases: list[Case]) -> bool:
            drawn.extend(cases)
            return True

        run_round(
            self._strategy_for(declaration, [format_], 1),
            keep,
            seed_value=self._next_seed(declaration),
            until=math.inf,
            max_draws=_CASES_PER_SCOUTED_FORMAT,
        )
        return drawn

    def _next_seed(self, declaration: Declaration) -> int:
        """Of the kernel's name, not of its path: elsewhere the same seeds draw the same cases."""
        self._rounds[declaration.target] += 1
        return derive_seed(*self._seeds, declaration.name, self._rounds[declaration.target])

    def _is_new(self, declaration: Declaration, case: Case) -> bool:
        seen, fingerprint = self._seen.setdefault(declaration.target, set()), hash(encode_case(case))
        if fingerprint in seen:
            return False
        if len(seen) >= _MAX_REMEMBERED:  # of a campaign of hours: repetitions of long ago do no harm
            seen.clear()
        seen.add(fingerprint)
        return True
