"""Which cases would crash, hang or fault as an earlier one did, and are not run, or not as far as that.

A death costs an executor, so that a kernel that crashes on some of its cases is searched slowly for the rest of them.
What cases have in common that died is put as a condition: the traits that all of them share, cut down to as few as
keep every case out that passed. Deaths that share nothing of the kind get conditions of their own. A case that fulfils
a condition is not run, but for a few: they tell whether something else hides there, and a condition that one of them
survives is learned anew. That no case that passed fulfils a condition bounds what is lost to it: of n random ones, at
most 3/n of all cases that would pass (with 95 % confidence).

A crash takes the process of every run with it, so that such cases are not worth running. An access outside in the run
of a relation does so only where memory ends, or where an offset is very large, and all other oracles still have a word
on the case: it goes on being judged, without that relation. So that no second fault hides behind a known one, such a
case is now and then judged by all of them.

A crash may hang on anything, and not only on what makes a case more than the simplest one: one head size, odd lengths,
a length that ends with a page, the *absence* of strides. So a trait is said for either side of each question.
Torch-free.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from attnfuzz.cases.features import traits
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import Bug
from attnfuzz.identity.features import case_features
from attnfuzz.oracles.registry import KNOWN, OracleName, oracle_of
from attnfuzz.problems.cases import Case
from attnfuzz.problems.feature import Feature
from attnfuzz.verdict import Drawn, Failure, Relations, is_fault

Traits = frozenset[Feature]
_PROBE_FAULTS_EVERY_S = 10.0


class KnownFaults:
    """Learns from findings of relations whose run faulted."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bugs: defaultdict[str, set[Bug]] = defaultdict(set)
        self._last_probe: dict[str, float] = {}

    def learn(self, bug: Bug) -> None:
        """Learn of a finding, here or elsewhere; of others than faults there is nothing to learn."""
        if is_fault(bug.oracle, bug.kind):
            self._bugs[bug.kernel].add(bug)
            self._last_probe[bug.kernel] = self._clock()

    def covers(self, declaration: Declaration, case: Case) -> bool:
        """Whether a known fault is expected: the case had better be judged alone."""
        return bool(self._faulting(declaration, case))

    def relations_for(self, declaration: Declaration, case: Case, *, turn: int | None = None) -> Relations:
        """Which relations are to judge a case; ``turn`` of those that are costly, see `Drawn`."""
        faulting = self._faulting(declaration, case)
        if faulting and self._clock() - self._last_probe[declaration.target] >= _PROBE_FAULTS_EVERY_S:
            self._last_probe[declaration.target] = self._clock()
            faulting = ()
        return Drawn(without=faulting, turn=turn) if faulting or turn is not None else None

    def _faulting(self, declaration: Declaration, case: Case) -> tuple[OracleName, ...]:
        """The relations that would end the process."""
        bugs = self._bugs.get(declaration.target)
        if not bugs:
            return ()
        found = case_features(declaration, case)
        names = {bug.oracle for bug in bugs if bug.features <= found}
        return tuple(name for name in KNOWN if name in names)


_MAX_DEATHS = 48
_MAX_PASSED = 300
_ENOUGH_PASSED = 100
"""Cases that must have passed before a condition is cut down: it would keep too little out."""
_ENOUGH_DEATHS = 3
_ENOUGH_FORETOLD = 2
"""Deaths that a condition must have foretold before cases are left out for it: by chance it is soon refuted."""
_MAX_CONDITIONS = 4
"""Where deaths need more, nothing that traits can say is behind them."""
_PROBE_EVERY_S = 30.0
_SHORTEST_PAUSE_S = 3.0
_SHARE_FOR_PROBES = 0.02
"""Part of a kernel's time that cases may take that are expected to die, beyond one every `_PROBE_EVERY_S`."""
_SHARE_FOR_UNFORESEEN = 0.2
"""Part of a kernel's time that deaths may take where no condition tells them from cases that pass."""


@dataclass(slots=True)
class _Group:
    """Deaths that have in common what no case that passed has."""

    shared: Traits
    deaths: int = 1


@dataclass(slots=True)
class _Lesson:
    """The deaths known of one kernel, and what their cases have in common."""

    bugs: list[Bug] = field(default_factory=list)
    deaths: deque[Traits] = field(default_factory=lambda: deque(maxlen=_MAX_DEATHS))
    passed: deque[Case] = field(default_factory=lambda: deque(maxlen=_MAX_PASSED))
    passed_traits: deque[Traits] = field(default_factory=lambda: deque(maxlen=_MAX_PASSED))
    groups: list[_Group] = field(default_factory=list)
    conditions: list[Traits] = field(default_factory=list)
    foretold: Counter[Traits] = field(default_factory=Counter)
    """Deaths that a condition was against before they happened."""
    last_probe: float = 0.0

    def all_passed(self) -> list[Traits]:
        """Traits of the cases that passed, found for each case once."""
        while self.passed:
            self.passed_traits.append(traits(self.passed.popleft()))
        return list(self.passed_traits)

    def is_trusted(self, condition: Traits) -> bool:
        """Whether cases are left out for ``condition``: one that was cut down has to have come true first."""
        if self.foretold[condition] >= _ENOUGH_FORETOLD:
            return True
        is_cut = all(group.shared != condition for group in self.groups)
        return not is_cut or any(bug.features == condition for bug in self.bugs)

    def draw_conclusions(self) -> None:
        """Make a condition of each large group, and of what a finding needs."""
        passed = self.all_passed()
        needed = [bug.features for bug in self.bugs]
        largest = sorted(self.groups, key=lambda group: -group.deaths)[:_MAX_CONDITIONS]
        found = [_condition(group, passed) for group in largest]
        if len(passed) >= _ENOUGH_PASSED:
            found += [features for features in needed if features and not _any_has(passed, features)]
        self.conditions = [condition for condition in found if condition is not None]


class KnownDeaths:
    """Learns conditions per kernel; ``share_spent`` tells how much of a kernel's time went into known deaths so far."""

    def __init__(
        self,
        share_spent: Callable[[str], float] = lambda target: 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share_spent = share_spent
        self._clock = clock
        self.faults = KnownFaults(clock=clock)
        self._lessons: dict[str, _Lesson] = {}
        self._latest: tuple[Case | None, Traits] = None, frozenset()

    def learn(self, bug: Bug) -> None:
        """Learn of a finding, here or elsewhere. Crashes and hangs matter here, faults of relations to `faults`."""
        self.faults.learn(bug)
        if not oracle_of(bug.oracle).ends_process:
            return
        lesson = self._lesson(bug.kernel)
        if bug not in lesson.bugs:
            lesson.bugs.append(bug)
            lesson.last_probe = self._clock()
            lesson.draw_conclusions()

    def judged(self, declaration: Declaration, case: Case, failure: Failure | None) -> None:
        """Learn from a case by what became of it."""
        if failure is not None and oracle_of(failure.oracle).ends_process:
            self.died(declaration, case)
        else:
            self.passed(declaration, case)

    def died(self, declaration: Declaration, case: Case) -> None:
        """Learn from a case that crashed or hung."""
        lesson = self._lesson(declaration.target)
        found = self._traits(case)
        if found in lesson.deaths:
            return
        lesson.deaths.append(found)
        lesson.foretold.update(condition for condition in lesson.conditions if condition <= found)
        if _covers(lesson.conditions, found):
            return
        _group(lesson.groups, found, lesson.all_passed())
        lesson.draw_conclusions()

    def passed(self, declaration: Declaration, case: Case) -> None:
        """Learn from a case that did neither."""
        lesson = self._lesson(declaration.target)
        if lesson.conditions and _covers(lesson.conditions, found := self._traits(case)):
            lesson.passed_traits.append(found)
            lesson.conditions = [condition for condition in lesson.conditions if not condition <= found]
        else:
            lesson.passed.append(case)

    def should_skip(self, declaration: Declaration, case: Case) -> bool:
        """Whether to skip the case. Now and then the answer is no although it is expected to die."""
        lesson = self._lessons.get(declaration.target)
        if lesson is None or not lesson.bugs:
            return False
        covering = [condition for condition in lesson.conditions if condition <= self._traits(case)]
        if covering:
            return any(map(lesson.is_trusted, covering)) and not self._is_probe(declaration.target, lesson)
        if self._share_spent(declaration.target) < _SHARE_FOR_UNFORESEEN:
            return False
        found = case_features(declaration, case)
        return any(bug.features <= found for bug in lesson.bugs)

    def expects_death(self, declaration: Declaration, case: Case) -> bool:
        """Whether a condition says that the case dies: one that is run all the same had better be run alone."""
        lesson = self._lessons.get(declaration.target)
        return lesson is not None and bool(lesson.conditions) and _covers(lesson.conditions, self._traits(case))

    def _is_probe(self, target: str, lesson: _Lesson) -> bool:
        pause_s = self._clock() - lesson.last_probe
        is_due = pause_s >= _PROBE_EVERY_S
        if is_due or (pause_s >= _SHORTEST_PAUSE_S and self._share_spent(target) < _SHARE_FOR_PROBES):
            lesson.last_probe = self._clock()
            return True
        return False

    def _lesson(self, target: str) -> _Lesson:
        return self._lessons.setdefault(target, _Lesson())

    def _traits(self, case: Case) -> Traits:
        if self._latest[0] is not case:
            self._latest = case, traits(case)
        return self._latest[1]


def _group(groups: list[_Group], found: Traits, passed: Sequence[Traits]) -> None:
    """Put a death to the first group that it fits into."""
    for group in groups:
        both = group.shared & found
        if not _any_has(passed, both):
            group.shared = both
            group.deaths += 1
            return
    groups.append(_Group(found))


def _covers(conditions: Iterable[Traits], found: Traits) -> bool:
    return any(condition <= found for condition in conditions)


def _any_has(passed: Sequence[Traits], condition: Traits) -> bool:
    return any(condition <= found for found in passed)


def _condition(group: _Group, passed: Sequence[Traits]) -> Traits | None:
    """Few of the traits of the group that together keep out all who passed.

    None if even all of them keep someone in.
    """
    shared = group.shared
    lacking = [shared - found for found in passed]
    if not all(lacking):
        return None
    if len(passed) < _ENOUGH_PASSED or group.deaths < _ENOUGH_DEATHS:
        return shared
    chosen, left = set[Feature](), lacking
    while left:
        counts = Counter(trait for traits in left for trait in traits)
        best = max(sorted(counts), key=lambda trait: counts[trait])
        chosen.add(best)
        left = [traits for traits in left if best not in traits]
    return frozenset(chosen)
