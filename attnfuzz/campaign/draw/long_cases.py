"""Cases far longer than a search on a CPU draws: some, of kernels that are fast enough, as measured.

Triton's interpreter takes milliseconds for a tile, so cases there are of a few hundred tokens at most, and a kernel
that is right up to there would pass whatever it does beyond. On a GPU long cases are drawn like any others.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from attnfuzz.campaign.draw.sampling import CaseSource
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case
from attnfuzz.strategies.sizes import CPU_SIZES, Sizes

__all__ = ["LONG_SIZES", "RUNGS", "LongCases", "longest_sequence"]

RUNGS = (1200, 4800)
"""Tokens of the longest sequence. The first is beyond the usual limits of tiles and splits, the second beyond the 2,048
and 4,096 to which models and buffers are often cut."""
_TILE = 16
_ITS_HEADS = 4
LONG_SIZES: tuple[Sizes, ...] = tuple(
    replace(
        CPU_SIZES,
        max_seqs=2,
        max_seq_len=tokens,
        max_tokens=tokens + tokens // 4,
        max_heads=_ITS_HEADS,
        max_cache_elements=1 << 21,
        work=(_ITS_HEADS * (tokens + tokens // 4) // _TILE,),
    )
    for tokens in RUNGS
)
"""Few heads and sequences, so that what there is of work goes into length."""

_USUAL_TOKENS = 150
"""Of a usual case, roughly: by it the time of a long one is estimated before any has been run."""
_LONGEST_S = 2.0
"""What a long case may be expected to take."""
_SHARE = 0.1
"""Part of a kernel's time that may go into them."""
_AT_ONCE = 2


@dataclass(slots=True)
class _Climb:
    """How far one kernel has come. ``case_s``: what its slowest case on the last rung took."""

    rung: int = 0
    case_s: float = 0.0
    seconds: float = 0.0


class LongCases:
    """Draws long cases of kernels when it is time for some. ``sources`` draw for each of ``RUNGS``.

    A kernel begins on the first rung, if its usual cases let one expect that it is fast enough, and climbs when it has
    passed there fast enough for the next.
    """

    def __init__(self, sources: tuple[CaseSource, ...], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._sources = sources
        self._clock = clock
        self._climbs = defaultdict[str, _Climb](_Climb)

    def due(self, declaration: Declaration, *, seconds: float, cases: int, until: float) -> list[Case]:
        """Long cases to judge now, none where it is not time for any; ``cases`` took ``seconds`` so far."""
        climb = self._climbs[declaration.target]
        if not cases or (climb.case_s and climb.seconds > _SHARE * seconds):
            return []
        expected_s = climb.case_s or seconds / cases * RUNGS[climb.rung] / _USUAL_TOKENS
        if expected_s > _LONGEST_S or self._clock() + _AT_ONCE * expected_s > until:
            return []
        return self._drawn(declaration, climb.rung, until)

    def judged(self, declaration: Declaration, longest: int, seconds: float, *, passed: bool) -> None:
        """A case whose longest sequence has so many tokens took ``seconds``."""
        climb = self._climbs[declaration.target]
        climb.seconds += seconds
        climb.case_s = max(climb.case_s, seconds)
        if passed and climb.rung + 1 < len(self._sources) and 2 * longest > RUNGS[climb.rung]:
            further_s = seconds * RUNGS[climb.rung + 1] / longest
            if further_s <= _LONGEST_S:
                climb.rung += 1
                climb.case_s = further_s

    def _drawn(self, declaration: Declaration, rung: int, until: float) -> list[Case]:
        least = CPU_SIZES.max_seq_len if rung == 0 else RUNGS[rung - 1]
        found: list[Case] = []

        def keep(case: Case) -> bool:
            if longest_sequence(case) > least:
                found.append(case)
            return len(found) < _AT_ONCE

        self._sources[rung].round(declaration, keep, until=until)
        return found


def longest_sequence(case: Case) -> int:
    """Tokens of its longest sequence; 0 of a case that has none."""
    return max(getattr(case, "seq_lens", ()), default=0)
