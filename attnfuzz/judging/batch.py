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
from attnfuzz.oracles import accuracy
from attnfuzz.oracles.relations.relation import Changed, FurtherRuns, Relation
from attnfuzz.problems.cases import Case
from attnfuzz.problems.declared_numerics import Tolerance
from attnfuzz.trials.checksums import CHANGED, checksum
from attnfuzz.trials.comparison import Reference
from attnfuzz.trials.expectations import DistantExpectations
from attnfuzz.trials.observation import KernelRaised, Observation, call
from attnfuzz.trials.run_checks import CaseRuns, RunChecks, look
from attnfuzz.trials.trial import Trial
from attnfuzz.verdict import Failure, Timing


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
            further = None if relation.further is None else relation.further(declaration, one.case, in_it)
            if relation.further is None or further is not None:
                first, number = number, number + (0 if further is None else len(further.runs))
                of_case.append(RelationRequest(relation, further, range(first, number)))
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


class BatchLost(Exception):  # noqa: N818 - says what happened
    """This process has lost the GPU's context or memory, or the reference, and it cannot be told which case did it."""


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
        self._references: dict[int, Reference] = {}
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
        """Work out what should come back, beside the device's work. Raises `BatchLost` if a run has changed it."""
        started = time.perf_counter()
        if self._checksum() != self._before:
            raise BatchLost(CHANGED)
        how: dict[str, Any] = {"device": self.home, "tolerance": self.tolerance}
        self._references = {
            i: Reference(self.kernel.declaration, one.case, **how, values=one.contents.values)
            for i, one in enumerate(self._entries)
            if one.is_drawn
        }
        if any(one.targets is None for one in self._references.values()):
            requests = [(one.declaration, one.case, one.values) for one in self._references.values()]
            one_copy = self.device == "cpu"
            self._distant = DistantExpectations(requests, self.device, self.tolerance, one_copy, self._fetch)
        self._expect_s = time.perf_counter() - started

    def checks(self) -> list[RunChecks | KernelRaised]:
        """The checks of each case, or what a run raised."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        if self._distant is not None:
            for reference, expectation in zip(self._references.values(), self._distant.at_home(), strict=True):
                reference.expectation = expectation
        self._found = self._look()
        return [self._attempts[i].raised or self._found[i] for i in range(len(self.candidates))]

    def trial(self, number: int) -> Trial:
        """The trial of a drawn entry, with its runs, none of which raised; the same one each time."""
        if number not in self._trials:
            entry, runs = self._entries[number], self._attempts[number].runs
            trial = self._trials[number] = Trial(
                self.kernel,
                entry.case,
                device=self.device,
                tolerance=self.tolerance,
                reference=self._references[number],
                twice=entry.runs > 1,
                guard=self.candidates[number].guard if number < len(self.candidates) else None,
                compile_clock=self._compile_clock,
            )
            trial.adopt([self._observation(number, i, run) for i, run in enumerate(runs)], self._found[number])
        return self._trials[number]

    def drop_trial(self, entry: int) -> None:
        """Let go of the memory of further runs, if any were made."""
        self._trials.pop(entry, None)

    def relations(self, case: int) -> list[Relation]:
        """The relations that have a word on a case, which take the runs that were made along with it.

        Where what became of a run may come from memory that others of the batch wrote to, or hold, they make their own.
        """
        return [self._with_runs(case, asked) for asked in self.asked[case]]

    def _with_runs(self, case: int, asked: RelationRequest) -> Relation:
        further, attempts = asked.further, [self._attempts[entry] for entry in asked.entries]
        full = [one.raised for one in attempts if one.raised is not None and one.raised.is_a(torch.OutOfMemoryError)]
        if further is None or full or any(any(self._damaged[entry]) for entry in asked.entries):
            return asked.relation

        def check(trial: Trial) -> Failure | None:
            if trial is not self.trial(case):  # it lacks but an LSE, and its runs are made again without
                return asked.relation.check(trial)
            for changed, one in zip(further.runs, attempts, strict=True):
                if one.raised is not None and (changed.values is not None or one.raised.is_a(KeyboardInterrupt)):
                    raise one.raised
            for run, (entry, one) in enumerate(zip(asked.entries, attempts, strict=True)):
                is_wrong = entry in self._found and self._found[entry].error_ratio > 1
                wrong = one.raised or (accuracy.check(self.trial(entry)) if is_wrong else None)
                failure = None if wrong is None else further.blame(trial, run, wrong)
                if failure is not None:
                    return failure
            return further.objection(trial, [self._at_home(one.runs[0]) if one.runs else {} for one in attempts])

        return replace(asked.relation, check=check)

    def timing(self, case: int) -> Timing:
        """The timing of the runs made for a case together, its relations' included; the total is that of the calls."""
        entries = [case, *(entry for asked in self.asked[case] for entry in asked.entries)]
        runs = [run for entry in entries for run in self._attempts[entry].runs]
        compile_s, kernel_s = sum(run.compile_s for run in runs), sum(run.kernel_s for run in runs)
        return Timing(
            build_s=self._build_s / len(self.candidates),
            compile_s=compile_s,
            kernel_s=kernel_s,
            reference_s=self._expect_s / len(self.candidates),
            total_s=compile_s + kernel_s,
        )

    def _checksum(self) -> int:
        """Checksum of what the expected results are computed from; 0 on a GPU, where it would wait for the kernel."""
        if self.device == "cuda":
            return 0
        return checksum(entry.contents.values for entry in self._entries)

    def _look(self) -> dict[int, RunChecks]:
        self._damaged = self._damage()
        chosen = [i for i in self._references if self._attempts[i].runs and self._attempts[i].raised is None]
        runs = {i: [self._at_home(run) for run in self._attempts[i].runs] for i in chosen}
        seen = [CaseRuns(self._references[i], runs[i], self._damaged[i]) for i in chosen]
        return dict(zip(chosen, look(self.kernel.declaration, seen), strict=True))

    def _list_entries(self) -> list[Entry]:
        declaration, candidates = self.kernel.declaration, self.candidates
        all_contents = self._problem.contents([one.case for one in candidates], self.home, declaration.supports)
        self.asked = relation_requests(declaration, candidates, all_contents)
        entries = [
            Entry(one.case, one.plan, contents, runs=1 + (self.twice and one.guard is None))
            for one, contents in zip(candidates, all_contents, strict=True)
        ]
        return entries + entries_of(declaration, self.asked)

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

    def _observation(self, entry: int, i: int, run: _Run) -> Observation:
        return Observation(
            RUNS[i],
            RUNS[i],
            inputs=None,
            given=self._image.arena(entry, i, self._fetch),
            allocated=run.allocated if self.home == self.device else run.allocated.on_host(self._fetch.at_home),
            results=self._at_home(run),
        )
