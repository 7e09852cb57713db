"""Where a worker's cases come from: rounds of Hypothesis, within a working set of formats on a GPU.

*A round* is a run of Hypothesis through its public interface, as a source of cases. Hypothesis never sees a failure. A
failing case ends the round, because shrinking is done by `attnfuzz.minimise`, which knows what simpler means for a case
and can be stopped at any time; so there is nothing to replay and nothing flaky. A round is short, since one run begins
with the smallest cases (a tenth of ``max_examples``) and then mutates its own.

*Formats* on a GPU: a new one costs hundreds of milliseconds of compilation, a case in one that is compiled about one.
So the search stays within a working set and refreshes it: a bounded part of a kernel's time goes into compiling, and
what is left of it into *scouting*, which compiles formats that nobody has; each is published, so that the other workers
find it in Triton's cache on disk. The first formats of a kernel are the same in every campaign, for the same reason.
While there are few, another one shows more than hundreds of cases in those: half of the time may go into compilers
then, and nearly all of it until there are three. Of open problems nobody knows the format of a case; what decides is
learned (`attnfuzz.campaign.draw.compiled_fields`)."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.strategies import SearchStrategy

from attnfuzz.campaign.draw.compiled_fields import CompiledFields, CompiledValues
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.formats import Format, format_key, format_of
from attnfuzz.problems.open_cases import OpenCase, OpenProblem

_FIRST_SLICE_S = 1.0
_LATER_SLICE_S = 3.0
_PRICE_OF_FATAL = 2.0
_PRICE_BELOW_FLOOR = 0.25


@dataclass(slots=True)
class _Share:
    seconds: float = 0.0
    cases: int = 0
    rounds: int = 0
    floor: int = 0

    @property
    def due(self) -> float:
        """Seconds, of which those count less that went by before there were enough cases to say anything."""
        return self.seconds * (_PRICE_BELOW_FLOOR if self.cases < self.floor else 1.0)


class Schedule:
    """Slices of time for the kernels named by ``targets``.

    Worker ``worker`` of ``num_workers`` begins with its own part of the list and goes on with the end of the part
    before it, so that together they reach each kernel soon, whoever of them is slow.
    """

    def __init__(self, targets: Sequence[str], *, worker: int = 0, num_workers: int = 1) -> None:
        first, end = ((worker + i) * len(targets) // max(1, num_workers) for i in range(2))
        others = (*targets[end:], *targets[:first])
        self._shares = {target: _Share() for target in (*targets[first:end], *reversed(others))}
        self._prices = dict[str, float]()

    def add(self, target: str, *, floor: int = 0) -> None:
        """A kernel can be searched, which is preferred until ``floor`` cases of it have been judged."""
        self._shares.setdefault(target, _Share()).floor = floor

    def next_target(self) -> str:
        """The kernel that had the least time; among those with the same, the one with fewer cases."""
        return min(self._shares, key=lambda target: (self._shares[target].due, self._shares[target].cases))

    def slice_s(self, target: str, remaining_s: float) -> float:
        """Seconds for the next round on ``target``: short while other kernels wait for their first.

        A round judges a case, however short it is.
        """
        if self._shares[target].rounds:
            return min(_LATER_SLICE_S, remaining_s)
        fair = remaining_s / (2 * len(self._shares))
        return min(_FIRST_SLICE_S, fair)

    def record(self, target: str, *, seconds: float, cases: int) -> None:
        """Charge a round to ``target``."""
        share = self._shares[target]
        share.seconds += self._prices.get(target, 1.0) * seconds
        share.cases += cases
        share.rounds += 1

    def charge(self, target: str, seconds: float) -> None:
        """Charge what was done about a failure of ``target`` to it."""
        self._shares[target].seconds += self._prices.get(target, 1.0) * seconds

    def is_fatal(self, target: str) -> None:
        """From now on ``target`` gets half of what others get."""
        self._prices[target] = _PRICE_OF_FATAL


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
    _case_s: float = math.inf

    def went_well(self, seconds: float, cases: int) -> None:
        """Learn from ``cases`` that ended by themselves, ``seconds`` in all, compilations left out.

        Of those that were faster than any before it is believed at once: what a process does but once, as loading
        code for the first case of each kind, and what a batch takes besides its cases, says nothing about the next.
        """
        newest_s = seconds / cases
        if newest_s < self._case_s:
            self._case_s = newest_s
        else:
            self._case_s += (newest_s - self._case_s) * _WEIGHT_OF_NEWEST
        fitting = int(_LONGEST_BATCH_S / self._case_s) if self._case_s else self.most
        self.size = max(1, min(2 * self.size if cases >= self.size else self.size, self.most, fitting))

    def went_wrong(self) -> None:
        """After a crash, a hang or a finding: the next case is judged alone."""
        self.size = 1


DRAWS_PER_ROUND = 100
T = TypeVar("T")


class _RoundOver(KeyboardInterrupt):
    """Ends a run: Hypothesis passes a KeyboardInterrupt on at once and takes it for no failure."""


def run_round(
    strategy: SearchStrategy[T],
    visit: Callable[[T], bool],
    *,
    seed_value: int,
    until: float,
    max_draws: int = DRAWS_PER_ROUND,
) -> None:
    """Draw values for ``visit`` until it returns False, ``until`` on the monotonic clock or ``max_draws``.

    What ``visit`` raises is raised here, unseen by Hypothesis.
    """
    raised: list[BaseException] = []

    # deriving the seed from the round makes each a different sample, and one that can be drawn again
    @seed(seed_value)
    @settings(
        max_examples=max_draws,
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
    )
    @given(strategy)
    def draw(value: T) -> None:
        try:
            go_on = time.monotonic() < until and visit(value)
        except BaseException as error:  # handed to the caller below
            raised.append(error)
            raise _RoundOver from error
        if not go_on:
            raise _RoundOver

    try:
        draw()
    except _RoundOver:
        if raised:
            raise raised[0] from None


def derive_seed(*parts: object) -> int:
    """A 64-bit seed that depends on all of ``parts``."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


_KEPT = 32
_SCOUTED_AT_ONCE = 4
"""But the first of a kernel alone: until it is compiled there are no cases, and other kernels wait for their turn."""
_MOST_JOINING = 8
"""Most cases of other workers that join at one turn of a kernel."""
_VERY_FEW, _FEW = 3, 8
_SHARE_AT_FIRST, _SHARE_WHILE_FEW, _SHARE_OF_COMPILING = 0.9, 0.5, 0.1
_SHARE_OF_JOINING = 0.05
"""Parts of a worker's time with a kernel: compiling, and loading what others have compiled."""
_TRIES = 64
FormatSource = Callable[[Declaration], Iterator[Format]]
"""Formats of a kernel in the order in which they are to be compiled; endless, and repetitions do no harm."""


@dataclass(slots=True)
class _Formats:
    """The formats of one kernel. ``known`` holds the keys of all that have been compiled or offered somewhere;
    ``before``: so many of them when it became known what the kernel takes. Seconds are those since. ``has_more``:
    whether any was new of those that came last from ``source``.

    ``costs_s``: what so many of these took (``num_costs``). ``turn``: see `WorkingSets`.
    """

    source: Iterator[Format]
    turn: float
    active: deque[Format] = field(default_factory=lambda: deque(maxlen=_KEPT))
    offered: deque[Format] = field(default_factory=lambda: deque(maxlen=_KEPT))
    known: set[bytes] = field(default_factory=set)
    before: int = 0
    has_more: bool = True
    joining: set[bytes] = field(default_factory=set)
    seconds: float = 0.0
    compiling_s: float = 0.0
    joining_s: float = 0.0
    costs_s: float = 0.0
    num_costs: int = 0

    @property
    def is_few(self) -> bool:
        """Whether another one shows more than hundreds of cases."""
        return len(self.known) - self.before < _FEW

    @property
    def at_once(self) -> int:
        """How many to scout now: as many as what is left of the compilers' share has room for."""
        if not self.active and not self.offered:
            return 1
        known = len(self.known) - self.before
        share = _SHARE_AT_FIRST if known < _VERY_FEW else _SHARE_WHILE_FEW if self.is_few else _SHARE_OF_COMPILING
        cost_s = self.costs_s / max(1, self.num_costs)
        left_s = share * self.seconds - self.compiling_s - self.turn * cost_s
        if left_s <= 0.0:
            return 0
        return max(1, min(int(left_s / cost_s) if cost_s else 1, _SCOUTED_AT_ONCE))


class WorkingSets:
    """One working set for each kernel; ``source`` says what to compile next.

    Each kernel has its own time: those that compile for seconds leave that of the others alone. ``turn``, from 0 to 1,
    is how much of a format's cost has to be saved up before it is compiled: another one for each worker, or all of
    them would exceed the compilers' share of a kernel by a format as soon as they have had a moment with it. There are
    ``workers`` of them.
    """

    def __init__(self, source: FormatSource, *, turn: float = 0.0, workers: int = 1) -> None:
        self._source = source
        self._turn, self._workers = turn, workers
        self._kernels: dict[str, _Formats] = {}
        self._open: dict[str, CompiledFields] = {}

    def to_scout(self, declaration: Declaration) -> list[Format]:
        """Formats to compile now. Nothing while compilers have had their share, unless there is none to draw from."""
        if isinstance(declaration.problem, OpenProblem):
            return []
        formats = self._of(declaration)
        fresh: dict[bytes, Format] = {}
        wanted = formats.at_once
        for candidate in islice(formats.source, _TRIES if wanted else 0):
            if (key := format_key(candidate)) not in formats.known:
                fresh[key] = candidate
            if len(fresh) == wanted:
                break
        if wanted:
            formats.has_more = bool(fresh)
        return list(fresh.values())

    def is_scouting_due(self, declaration: Declaration) -> bool:
        """Whether a kernel of which few formats are compiled had better have the next now than another round."""
        if isinstance(declaration.problem, OpenProblem):
            return False
        formats = self._of(declaration)
        return formats.is_few and formats.has_more and formats.at_once > 0

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
        while formats.offered and joined < _MOST_JOINING:
            if len(formats.active) >= _SCOUTED_AT_ONCE and formats.joining_s >= _SHARE_OF_JOINING * formats.seconds:
                break
            newest = formats.offered.pop()
            formats.active.append(newest)
            formats.joining.add(format_key(newest))
            joined += 1
        return list(formats.active)

    def judged(
        self, declaration: Declaration, case: Case, seconds: float, *, compile_s: float = 0.0
    ) -> Format | CompiledValues | None:
        """Note that ``case`` took ``seconds``; what of it is to be published, as its format if it is new.

        ``compile_s`` of them went into Triton's compiler, which also has work in formats that are known: some kernels
        choose by lengths what to launch, and relations change strides and options.
        """
        if isinstance(case, OpenCase):
            return self._fields_of(declaration).judged(case, seconds, compile_s)
        formats, format_ = self._of(declaration), format_of(case)
        key = format_key(format_)
        formats.seconds += seconds
        formats.compiling_s += compile_s if key in formats.known else seconds  # other compilers do not say
        if key in formats.joining:
            formats.joining.discard(key)
            formats.joining_s += seconds
        if key in formats.known:
            return None
        formats.costs_s += seconds
        formats.num_costs += 1
        formats.known.add(key)
        formats.active.append(format_)
        return format_

    def offer(self, declaration: Declaration, format_: Format | CompiledValues, seconds: float = 0.0) -> None:
        """Another worker has compiled ``format_``, which took ``seconds``, if that is known."""
        if isinstance(format_, CompiledValues):
            self._fields_of(declaration).learn(format_, seconds)
            return
        formats, key = self._of(declaration), format_key(format_)
        if key not in formats.known:
            formats.costs_s += seconds
            formats.num_costs += seconds > 0
            formats.known.add(key)
            formats.offered.append(format_)

    def joins(self, declaration: Declaration) -> None:
        """From now on new formats of the kernel are those of ``declaration``; what is compiled stays.

        Compilers have as much of the time as at first: with a contract that is no more than the first case that passed,
        they have made formats that are all alike.
        """
        if (fields := self._open.get(declaration.target)) is not None:
            fields.joins(declaration)
        if (formats := self._kernels.get(declaration.target)) is not None:
            formats.source = self._source(declaration)
            formats.before = len(formats.known)
            formats.has_more = True
            formats.seconds = formats.compiling_s = formats.joining_s = 0.0

    def fitted(self, declaration: Declaration, case: Case) -> Case:
        """``case``, which was drawn in any format; of an open problem perhaps as one for which nothing is compiled."""
        return self._fields_of(declaration).fitted(case) if isinstance(case, OpenCase) else case

    def _fields_of(self, declaration: Declaration) -> CompiledFields:
        if declaration.target not in self._open:
            self._open[declaration.target] = CompiledFields(declaration, turn=self._turn, workers=self._workers)
        return self._open[declaration.target]

    def _of(self, declaration: Declaration) -> _Formats:
        if declaration.target not in self._kernels:
            self._kernels[declaration.target] = _Formats(self._source(declaration), self._turn)
        return self._kernels[declaration.target]


StrategyFor = Callable[[Declaration, Sequence[Format], int], SearchStrategy[list[Case]]]
"""Draws lists of so many cases of a kernel, each in one of the given formats if there are any."""
_CASES_PER_LIST = 8
"""Drawn at once: what Hypothesis does for a draw takes several times as long as making a case of it."""
_LISTS_PER_ROUND = 25
_CASES_PER_SCOUTED_FORMAT = 2
"""The first that a round draws is always the simplest."""
_MAX_REMEMBERED = 100_000


class CaseSource:
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
            for drawn in cases:
                case = drawn if self._formats is None else self._formats.fitted(declaration, drawn)
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
        """The next seed, made from the kernel's name, not of its path: elsewhere the same seeds draw the same cases."""
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
