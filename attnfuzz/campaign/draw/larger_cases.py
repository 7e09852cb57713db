"""Cases larger than Triton's interpreter has time for, on a CPU: as many as a kernel's own speed permits, as measured.

Triton's interpreter takes milliseconds for a tile, so usual cases there are small, and of a few hundred tokens at most:
a kernel that is right up to there would pass whatever it does beyond. One in plain torch takes hardly longer for a case
of several times the size. So there are rungs above the usual cases, and the less their cases cost in comparison, the
more of a kernel's time goes into them. On a GPU cases of all sizes are drawn alike, but for those that a user asks for.

A rung is *roomy*, with more of everything, and judged in batches as usual cases are; or it is *long*, for few sequences
of thousands of tokens, each judged alone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from attnfuzz.campaign.draw.sampling import CaseSource
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case
from attnfuzz.strategies.sizes import CPU_SIZES, Sizes

RUNGS = (1200, 4800)
"""Tokens of the longest sequence. The first is beyond the usual limits of tiles and splits, the second beyond the 2,048
and 4,096 to which models and buffers are often cut."""
_TILE = 16
_ITS_HEADS = 4
_MORE_THAN_LIMIT = 1.125
"""Times a limit in the kernel's source that lies beyond all of `RUNGS`."""
_ROOM = 4
"""Times the work of the largest usual case that a roomy one may have."""
_PARTS_OF_ROOM = (4, 2, 1)
_ROOMY_HEADS = 8
"""With more, that would go into heads."""

_USUAL_TOKENS = 150
"""Tokens of a usual case, roughly: by it the time of a long one is estimated before any has been run."""
_LONGEST_S = 2.0
"""Seconds that a long case may be expected to take."""
_LONGEST_ASKED_S = 8.0
"""And one that a user asks for: with more, it would be taken for one that hangs."""
_LONGEST_ROOMY_S = 0.25
"""And a roomy one: with more, there would be too few of them to say anything."""
_LEAST_SHARE, _MOST_SHARE = 0.1, 0.3
"""Parts of a kernel's time that may go into a rung: the most where its cases cost no more than usual ones."""
_AT_ONCE, _MOST_AT_ONCE = 2, 16
_FORGETTING = 0.8
"""Factor by which a slow case counts less after each one that was faster: the machine may have been busy."""
SourceOf = Callable[[Sizes], CaseSource]


def asked_sizes(sizes: Sizes, *, max_seq_len: int | None, max_seqs: int | None) -> Sizes:
    """``sizes`` as a user wants them: no longer sequences than that, and as many."""
    if max_seq_len is not None:
        sizes = replace(sizes, max_seq_len=min(max_seq_len, sizes.max_seq_len))
    if max_seqs is None:
        return sizes
    tokens, work = max(sizes.max_tokens, 2 * max_seqs), (*sizes.work, max(*sizes.work, 2 * max_seqs))
    return replace(sizes, max_seqs=max_seqs, max_tokens=tokens, work=work)


def roomy_sizes(usual: Sizes) -> Sizes:
    """Several times the tokens of ``usual``."""
    most = _ROOM * max(usual.work)
    return replace(
        usual,
        max_heads=_ROOMY_HEADS,
        max_seq_len=2 * usual.max_seq_len,
        max_tokens=_ROOM * usual.max_tokens,
        max_cache_elements=_ROOM * usual.max_cache_elements,
        work=tuple(most // part for part in _PARTS_OF_ROOM),
    )


def long_sizes(tokens: int) -> Sizes:
    """Few heads and sequences, so that what there is of work goes into length."""
    return replace(
        CPU_SIZES,
        max_seqs=2,
        max_seq_len=tokens,
        max_tokens=tokens + tokens // 4,
        max_heads=_ITS_HEADS,
        max_cache_elements=max(1 << 21, tokens << 9),
        work=(_ITS_HEADS * (tokens + tokens // 4) // _TILE,),
    )


@dataclass(slots=True)
class _Climb:
    """How far one kernel has come. ``case_s``: what a slow case on the last rung takes.

    ``named``: those of the ``rungs`` on which its source names a length. ``turns``: how often long cases were drawn, of
    which so many ``cases`` took so many ``seconds`` together. ``usual`` and ``roomy``: cases, and what they took.
    """

    rungs: tuple[int, ...]
    named: tuple[int, ...] = ()
    rung: int = 0
    turns: int = 0
    case_s: float = 0.0
    cases: int = 0
    seconds: float = 0.0
    usual: list[float] = field(default_factory=lambda: [0.0, 0.0])
    roomy: list[float] = field(default_factory=lambda: [0.0, 0.0])


class LargerCases:
    """Says when it is time for larger cases of a kernel, and draws them from what ``source_of`` makes for sizes.

    A kernel begins on the first long rung, if its usual cases let one expect that it is fast enough, and climbs when it
    has passed there fast enough for the next. Every second time it goes back to a rung below on which its source names
    a length: a few cases there say little of the one length that matters. ``max_seq_len``: a user asks for sequences
    as long as that, no longer. ``on_gpu``: none but those that a user asks for are larger than usual ones.
    """

    def __init__(
        self,
        source_of: SourceOf,
        *,
        usual: Sizes = CPU_SIZES,
        on_gpu: bool = False,
        max_seq_len: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source_of = source_of
        self._usual = usual
        self._on_gpu = on_gpu
        self._max_seq_len = max_seq_len
        self._clock = clock
        larger = asked_sizes(roomy_sizes(usual), max_seq_len=max_seq_len, max_seqs=None)
        self._roomy = None if on_gpu else source_of(larger)
        self._long: dict[int, CaseSource] = {}
        self._climbs: defaultdict[str, _Climb] = defaultdict(lambda: _Climb(()))

    def roomy(self, declaration: Declaration) -> CaseSource | None:
        """The sizes that the next round draws from, if it is time for larger cases in batches."""
        climb = self._climb(declaration)
        cases, seconds = climb.usual
        if not cases:
            return None
        usual_s = seconds / cases
        roomy_s = climb.roomy[1] / climb.roomy[0] if climb.roomy[0] else _ROOM * usual_s
        is_due = climb.roomy[1] <= _share(usual_s, roomy_s) * (climb.roomy[1] + seconds)
        return self._roomy if is_due and roomy_s <= _LONGEST_ROOMY_S else None

    def round_over(self, declaration: Declaration, *, roomy: bool, cases: int, seconds: float) -> None:
        """Note what a round of usual or of roomy cases took."""
        climb = self._climb(declaration)
        noted = climb.roomy if roomy else climb.usual
        noted[0] += cases
        noted[1] += seconds

    def due(self, declaration: Declaration, *, until: float) -> list[Case]:
        """Long cases to judge now, none where it is not time for any."""
        climb = self._climb(declaration)
        cases, seconds = climb.usual
        if not cases or not climb.rungs:
            return []
        usual_s, tokens = seconds / cases, climb.rungs[climb.rung]
        expected_s = climb.case_s or usual_s * tokens / _USUAL_TOKENS
        long_s = climb.seconds / climb.cases if climb.cases else expected_s
        left_s = _share(usual_s, long_s) * (seconds + climb.roomy[1]) - climb.seconds
        if climb.cases and left_s < 0:
            return []
        if expected_s > self._longest_s(tokens):
            return []
        if self._clock() + _AT_ONCE * expected_s > until:
            return []
        count = max(_AT_ONCE, min(_MOST_AT_ONCE, int(left_s / expected_s))) if climb.cases else _AT_ONCE
        return self._drawn(declaration, climb, count, until)

    def judged(self, declaration: Declaration, longest: int, seconds: float, *, passed: bool) -> None:
        """A case whose longest sequence has so many tokens took ``seconds``."""
        climb = self._climb(declaration)
        climb.cases += 1
        climb.seconds += seconds
        is_shorter = longest <= self._below(climb, climb.rung)
        climb.case_s = max(seconds, climb.case_s if is_shorter else _FORGETTING * climb.case_s)
        if passed and climb.rung + 1 < len(climb.rungs) and 2 * longest > climb.rungs[climb.rung]:
            next_tokens = climb.rungs[climb.rung + 1]
            further_s = seconds * next_tokens / longest
            if further_s <= self._longest_s(next_tokens):
                climb.rung += 1
                climb.case_s = further_s

    def _longest_s(self, tokens: int) -> float:
        return _LONGEST_ASKED_S if tokens == self._max_seq_len else _LONGEST_S

    def _climb(self, declaration: Declaration) -> _Climb:
        climb = self._climbs[declaration.target]
        if not climb.rungs:
            climb.rungs = self._rungs(declaration)
            climb.named = tuple(
                tokens
                for index, tokens in enumerate(climb.rungs)
                if any(self._below(climb, index) < number <= tokens for number in declaration.lengths)
            )
        return climb

    def _below(self, climb: _Climb, index: int) -> int:
        """Tokens that a long case of that rung has more than."""
        return climb.rungs[index - 1] if index else self._usual.max_seq_len

    def _rungs(self, declaration: Declaration) -> tuple[int, ...]:
        """The lengths that are more than usual cases have, and one past each limit in the source that they do not
        reach."""
        beyond = {int(_MORE_THAN_LIMIT * number) for number in declaration.lengths if number > RUNGS[-1]}
        most, rungs = self._max_seq_len, () if self._on_gpu else (*RUNGS, *beyond)
        within = {tokens for tokens in rungs if most is None or tokens < most}
        asked = {most} if most is not None else set()
        return tuple(sorted(tokens for tokens in within | asked if tokens > self._usual.max_seq_len))

    def _drawn(self, declaration: Declaration, climb: _Climb, count: int, until: float) -> list[Case]:
        tokens = climb.rungs[climb.rung]
        again = [named for named in climb.named if named < tokens]
        climb.turns += 1
        if again and climb.turns % 2 == 0:
            tokens = again[climb.turns // 2 % len(again)]
        least = self._below(climb, climb.rungs.index(tokens))
        if tokens not in self._long:
            self._long[tokens] = self._source_of(long_sizes(tokens))
        found: list[Case] = []

        def keep(case: Case) -> bool:
            if longest_sequence(case) > least:
                found.append(case)
            return len(found) < count

        self._long[tokens].round(declaration, keep, until=until)
        return found


def _share(usual_s: float, larger_s: float) -> float:
    """Part of the time for cases that take ``larger_s`` where usual ones take ``usual_s``."""
    return max(_LEAST_SHARE, _MOST_SHARE * min(1.0, usual_s / larger_s)) if larger_s else _MOST_SHARE


def longest_sequence(case: Case) -> int:
    """Tokens of its longest sequence; 0 of a case that has none."""
    return max(getattr(case, "seq_lens", ()), default=0)
