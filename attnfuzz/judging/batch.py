"""Runs of a kernel on many cases, filled and looked at together: on the device, or on the host beside it.

Told one by one, a GPU that several processes share takes longer to fill and compare small tensors than to run kernels
on them. So the numbers, poison, expected results and bounds of small cases are made on the host, while the GPU runs
what was launched before: it gets one copy, the kernels' launches and one copy back (see `attnfuzz.memory.image`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.inputs.registry import Contents, problem_of
from attnfuzz.memory.allocations import TrackedAllocations, WorkspacePool
from attnfuzz.memory.arena import Arena
from attnfuzz.memory.guarded import Guard
from attnfuzz.memory.image import RUNS, Fetch, Image, Plan, plan_of
from attnfuzz.oracles.relations.relation import Changed, FurtherRuns, Relation
from attnfuzz.problems.cases import Case
from attnfuzz.problems.declared_numerics import Tolerance
from attnfuzz.trials.checksums import CHANGED, checksum
from attnfuzz.trials.comparison import Reference
from attnfuzz.trials.expectations import DistantExpectations, expectations
from attnfuzz.trials.observation import KernelRaised, Observation, Times, call
from attnfuzz.trials.run_checks import HostResults, RunChecks, look
from attnfuzz.trials.trial import Trial
from attnfuzz.verdict import Timing


@dataclass(frozen=True, slots=True)
class Candidate:
    """A case to be judged, the plan of its memory, and the relations that have a word on it if all else is well.

    Their runs are made along with it, in which case a batch is filled on the host. `guard`: see `guard_of`; of a case
    that has one, only the first run is made along with the others, and the second by its `trial`.
    """

    case: Case
    plan: Plan
    relations: Sequence[Relation] = ()
    guard: Guard | None = None

    def by_itself(self) -> Candidate:
        """With relations that make their runs one by one."""
        return replace(self, relations=[replace(relation, further=None) for relation in self.relations])


@dataclass(frozen=True, slots=True)
class Entry:
    """A case to be run so many times. `is_drawn`: its numbers are its own, and so accuracy has a word on it."""

    case: Case
    plan: Plan
    contents: Contents
    runs: int
    words: str = ""
    is_drawn: bool = True


@dataclass(frozen=True, slots=True)
class RelationRequest:
    """A relation that has a word on a case, and the entries that it wants to see; None to be asked by itself."""

    relation: Relation
    further: FurtherRuns | None
    entries: range


def relation_requests(
    declaration: Declaration, candidates: Sequence[Candidate], contents: Sequence[Contents]
) -> list[list[RelationRequest]]:
    """For each candidate what its relations want run; those entries are numbered from the number of candidates on."""
    asked: list[list[RelationRequest]] = [[] for _ in candidates]
    number = len(candidates)
    for of_case, one, in_it in zip(asked, candidates, contents, strict=True):
        for relation in one.relations:
            if relation.further is None:
                of_case.append(RelationRequest(relation, None, range(0)))
                continue
            further = relation.further(declaration, one.case, in_it)
            if further is not None:
                entries = range(number, number + len(further.runs))
                of_case.append(RelationRequest(relation, further, entries))
                number = entries.stop
    return asked


def entries_of(declaration: Declaration, asked: Sequence[Sequence[RelationRequest]]) -> list[Entry]:
    """The entries that `asked` want, in the order of their numbers; on the host."""
    wanted = (one.further for of_case in asked for one in of_case)
    runs = [changed for further in wanted if further is not None for changed in further.runs]
    drawn = [changed.case for changed in runs if changed.values is None]
    their_own = iter(problem_of(drawn[0]).contents(drawn, "cpu", declaration.supports) if drawn else ())
    placed = iter(_placed([changed for changed in runs if changed.values is not None]))
    return [
        Entry(
            changed.case,
            plan_of(changed.case),
            contents=next(placed if changed.values is not None else their_own),
            runs=1,
            words=changed.words,
            is_drawn=changed.values is None,
        )
        for changed in runs
    ]


def _placed(runs: Sequence[Changed]) -> list[Contents]:
    """Values with their places, where the case says but for those that are given others."""
    contents = [Contents(changed.values, changed.placement) for changed in runs]
    if unplaced := {i: changed.case for i, changed in enumerate(runs) if changed.placement is None}:
        cases = list(unplaced.values())
        for i, placement in zip(unplaced, problem_of(cases[0]).placements(cases, "cpu"), strict=True):
            contents[i] = replace(contents[i], placement=placement)
    return contents


class ReferenceChanged(Exception):  # noqa: N818 - says what happened
    """A run has changed what the expected results come from, perhaps those of another case."""


@dataclass
class _Run:
    """The results of a run, left on the device."""

    results: dict[str, Tensor]
    allocated: Arena
    compile_s: float
    kernel_s: float


@dataclass
class _Attempt:
    """The runs of one entry, as far as they came."""

    runs: list[_Run] = field(default_factory=list)
    raised: KernelRaised | None = None


class Batch:
    """In order: `launch`, `expect`, `checks`, which waits for the device, and `trial` where there are any.

    Its entries are its cases, two runs each, and after them those that relations ask for, with one run.
    """

    _image: Image

    def __init__(
        self,
        kernel: Kernel,
        candidates: Sequence[Candidate],
        *,
        device: str,
        home: str,
        tolerance: Tolerance,
        twice: bool,
        compile_clock: Callable[[], float],
    ) -> None:
        """`home`: where cases are filled and looked at, `device` or "cpu". All else as for `Trial`."""
        self.kernel = kernel
        self.candidates = candidates
        self.device = device
        self.home = home
        self.tolerance = tolerance
        self.twice = twice
        self._compile_clock = compile_clock
        self._problem = problem_of(candidates[0].case)
        self.asked: list[list[RelationRequest]] = []
        self._entries: list[Entry] = []
        self._damaged: list[tuple[bool, ...]] = []
        self._found: dict[int, RunChecks] = {}
        self._trials: dict[int, Trial] = {}
        self._pools = [WorkspacePool(device, fill) for fill in RUNS]
        self._fetch = Fetch(home)
        self._attempts: list[_Attempt] = []
        self._expectations: dict[int, Any] = {}  # of a problem that says itself what is right, its targets
        self._distant: DistantExpectations | None = None
        self._build_s = self._expect_s = 0.0
        self._before = 0

    def launch(self) -> None:
        """Build the inputs of all entries, run the kernel on each, start to copy back."""
        started = time.perf_counter()
        self._entries = self._list_entries()
        self._image = Image([entry.plan for entry in self._entries], self.device, home=self.home)
        for i, entry in enumerate(self._entries):
            tensors = self._image.tensors(i)
            if entry.runs == 1:
                tensors = {name: tensor[:1] for name, tensor in tensors.items()}
            self._problem.write(entry.case, tensors, entry.contents.values, entry.contents.placement)
            for name, where in self._problem.only_changes(entry.case, entry.contents.values).items():
                self._image.only_changes(i, name, where)
        self._image.send()
        self._before = self._checksum()
        self._build_s = time.perf_counter() - started
        self._attempts = [_Attempt() for _ in self._entries]
        for i in range(len(self.candidates)):
            self._attempt_with_relations(i)
        self._start_copies()

    def expect(self) -> None:
        """Work out what should come back, beside the device's work. Raises `ReferenceChanged`."""
        started = time.perf_counter()
        if self._checksum() != self._before:
            raise ReferenceChanged(CHANGED)
        if self._problem.targets is not None:
            values = {i: self._entries[i].contents.values for i in self._drawn}
            self._expectations = {i: self._problem.targets(one, self.tolerance) for i, one in values.items()}
            self._expect_s = time.perf_counter() - started
            return
        entries = (self._entries[i] for i in self._drawn)
        requests = [(self.kernel.declaration, entry.case, entry.contents.values) for entry in entries]
        one_copy = self.device == "cpu"
        if self.home == self.device:
            found = expectations(requests, tolerance=self.tolerance, one_copy=one_copy)
            self._expectations = dict(zip(self._drawn, found, strict=True))
        else:
            self._distant = DistantExpectations(requests, self.device, self.tolerance, one_copy, self._fetch)
        self._expect_s = time.perf_counter() - started

    def checks(self) -> list[RunChecks | KernelRaised]:
        """The checks of each case, or what a run raised."""
        if self.home == "cpu":
            if self.device != "cpu":
                torch.cuda.synchronize()
            if self._distant is not None:
                self._expectations = dict(zip(self._drawn, self._distant.at_home(), strict=True))
            self._found = self._look_on_host()
        else:
            self._found = self._look_on_device()
        return [self._attempts[i].raised or self._found[i] for i in range(len(self.candidates))]

    def trial(self, entry: int) -> Trial:
        """The trial of a drawn entry, with its runs, none of which raised; the same one each time."""
        if entry not in self._trials:
            self._trials[entry] = made = self._trial(entry)
            guard = self.candidates[entry].guard if entry < len(self.candidates) else None
            if guard is None:
                made.checks = self._found[entry]
            else:
                made.guard_second(guard, alone=self._found[entry])
        return self._trials[entry]

    def drop_trial(self, entry: int) -> None:
        """Let go of the memory of further runs, if any were made."""
        self._trials.pop(entry, None)

    def results(self, entry: int) -> dict[str, Tensor]:
        """The results of an entry's first run, at home."""
        runs = self._attempts[entry].runs
        return self._at_home(runs[0]) if runs else {}

    def raised(self, entry: int) -> KernelRaised | None:
        """The exception that ended an entry's runs."""
        return self._attempts[entry].raised

    def is_damaged(self, entry: int) -> bool:
        """Whether memory that may not change did in an entry's runs, or beside it in those of another one."""
        return any(self._damaged[entry])

    def is_wrong(self, entry: int) -> bool:
        """Whether an entry is beyond its error bound, as far as it has one."""
        return entry in self._found and self._found[entry].error_ratio > 1

    def timing(self, case: int) -> Timing:
        """The timing of case number `case`, those of its relations included; the total is left to the caller."""
        entries = [case, *(entry for asked in self.asked[case] for entry in asked.entries)]
        runs: list[_Run | Times] = [run for entry in entries for run in self._attempts[entry].runs]
        later = self._trials[case].times[self._entries[case].runs :] if case in self._trials else []
        return Timing(
            build_s=self._build_s / len(self.candidates) + sum(seen.build_s for seen in later),
            compile_s=sum(run.compile_s for run in runs + later),
            kernel_s=sum(run.kernel_s for run in runs + later),
            reference_s=self._expect_s / len(self.candidates),
        )

    def _checksum(self) -> int:
        """Checksum of what the expected results are computed from; 0 on a GPU, where it would wait for the kernel."""
        if self.device == "cuda":
            return 0
        return checksum(entry.contents.values for entry in self._entries)

    def _look_on_host(self) -> dict[int, RunChecks]:
        chosen = [i for i in self._drawn if self._attempts[i].runs and self._attempts[i].raised is None]
        self._damaged = damaged = self._damage()
        runs = {i: [list(self._at_home(run).values()) for run in self._attempts[i].runs] for i in chosen}
        seen = [HostResults(self._entries[i].case, runs[i], self._expected(i), damaged[i]) for i in chosen]
        return dict(zip(chosen, look(self.kernel.declaration, seen), strict=True))

    def _look_on_device(self) -> dict[int, RunChecks]:
        trials = {i: self._trial(i) for i, attempt in enumerate(self._attempts) if attempt.raised is None}
        if not trials:
            return {}
        flags = torch.stack([trial.flags for trial in trials.values()]).tolist()
        found = {}
        to_inputs = self._image.input_damage(self._fetch)
        for (i, trial), numbers in zip(trials.items(), flags, strict=True):
            checks = RunChecks.read(numbers, runs=len(trial.runs))
            damaged = tuple(map(any, zip(checks.damaged, to_inputs[i], strict=False)))
            found[i] = replace(checks, damaged=damaged)
        return found

    @property
    def _drawn(self) -> list[int]:
        """Entries that have a right result."""
        return [i for i, entry in enumerate(self._entries) if entry.is_drawn]

    def _list_entries(self) -> list[Entry]:
        declaration, candidates = self.kernel.declaration, self.candidates
        all_contents = self._problem.contents([one.case for one in candidates], self.home, declaration.supports)
        self.asked = relation_requests(declaration, candidates, all_contents)
        entries = [
            Entry(one.case, one.plan, contents, runs=1 + (self.twice and one.guard is None))
            for one, contents in zip(candidates, all_contents, strict=True)
        ]
        return entries + entries_of(declaration, self.asked)

    def _expected(self, entry: int) -> Any:
        """The results expected of an entry; targets in the order of its results."""
        found = self._expectations[entry]
        if not isinstance(found, list):
            return found
        by_name = {one.name: one for one in found}
        return [by_name[name] for name in self._attempts[entry].runs[0].results]

    def _damage(self) -> list[tuple[bool, ...]]:
        """The damage of each entry, for each of its runs."""
        given = self._image.damage(self._fetch)
        whole = [
            pool.is_whole(
                [attempt.runs[i].allocated for attempt in self._attempts if i < len(attempt.runs)], self._fetch
            )
            for i, pool in enumerate(self._pools)
        ]
        return [
            tuple(
                given[entry][i] or not (whole[i] or not run.allocated.on_host(self._fetch.at_home).damage())
                for i, run in enumerate(attempt.runs)
            )
            for entry, attempt in enumerate(self._attempts)
        ]

    def _at_home(self, run: _Run) -> dict[str, Tensor]:
        return {name: self._fetch.at_home(result) for name, result in run.results.items()}

    def _attempt_with_relations(self, case: int) -> None:
        """The runs of a case, and right after them those that compare with it, unless one of them raises."""
        self._attempt(case)
        for asked in self.asked[case]:
            for entry in asked.entries:
                if self._attempts[case].raised is None:
                    self._attempt(entry)

    def _attempt(self, number: int) -> None:
        entry, attempt = self._entries[number], self._attempts[number]
        both_runs = self._image.on_device(number)
        try:
            for i in range(entry.runs):
                tensors = {name: tensor[i] for name, tensor in both_runs.items()}
                # One run of each batch is waited for: it shows work in a stream that nobody waits for.
                attempt.runs.append(self._run(entry.case, tensors, i, wait=number == i == 0))
        except KernelRaised as raised:
            raised.changed = entry.words
            attempt.raised = raised

    def _run(self, case: Case, tensors: dict[str, Tensor], i: int, *, wait: bool) -> _Run:
        inputs = self._problem.inputs(case, tensors)
        allocations = TrackedAllocations(self.device, poison=RUNS[i], prefill=RUNS[i], source=self._pools[i].take)
        started, compiled = time.perf_counter(), self._compile_clock()
        results = call(self.kernel, case, inputs, allocations, wait=wait)
        compile_s = self._compile_clock() - compiled
        kernel_s = time.perf_counter() - started - compile_s
        return _Run(results, allocations.arena, compile_s, kernel_s)

    def _start_copies(self) -> None:
        self._image.start(self._fetch)
        for pool in self._pools:
            pool.start(self._fetch)
        runs = [run for attempt in self._attempts for run in attempt.runs]
        self._fetch.start([result for run in runs for result in run.results.values()])

    def _trial(self, number: int) -> Trial:
        entry = self._entries[number]
        reference = Reference(self.kernel.declaration, entry.case, device=self.home, tolerance=self.tolerance)
        reference.values = entry.contents.values
        if self._problem.targets is None:
            reference.expectation = self._expectations[number]
        reference.seconds = self._expect_s / len(self.candidates)
        trial = Trial(
            self.kernel,
            entry.case,
            device=self.device,
            tolerance=self.tolerance,
            reference=reference,
            twice=entry.runs > 1,
            compile_clock=self._compile_clock,
        )
        trial.adopt([self._observation(number, i, run) for i, run in enumerate(self._attempts[number].runs)])
        return trial

    def _observation(self, entry: int, i: int, run: _Run) -> Observation:
        return Observation(
            RUNS[i],
            RUNS[i],
            inputs=None,
            given=self._image.arena(entry, i, self._fetch),
            allocated=run.allocated if self.home == self.device else run.allocated.on_host(self._fetch.at_home),
            results=self._at_home(run),
            build_s=self._build_s / len(self.candidates) / self._entries[entry].runs,
            compile_s=run.compile_s,
            kernel_s=run.kernel_s,
        )
