"""Runs of a kernel on many cases, filled and looked at together: on the device, or on the host beside it.

Told one by one, a GPU that several processes share takes longer to fill and compare small tensors than to run kernels
on them. So the numbers, poison, expected results and bounds of small cases are made on the host, while the GPU runs
what was launched before: it gets one copy, the kernels' launches and one copy back (see `attnfuzz.memory.image`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attnfuzz.declaration import Kernel
from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.arena import Arena
from attnfuzz.memory.fetch import Fetch
from attnfuzz.memory.image import RUNS, Image, Plan
from attnfuzz.memory.patterns import Fill
from attnfuzz.memory.workspaces import WorkspacePool
from attnfuzz.oracles.comparison import Reference
from attnfuzz.oracles.distant_expectations import DistantExpectations
from attnfuzz.oracles.expectations import Expectation, expectations
from attnfuzz.oracles.host_look import Seen, look
from attnfuzz.oracles.observation import KernelRaised, Observation, call
from attnfuzz.oracles.trial import Symptoms, Trial
from attnfuzz.oracles.verdict import Timing
from attnfuzz.problems.cases import Case
from attnfuzz.problems.registry import Contents, problem_of
from attnfuzz.problems.tolerance import Tolerance

__all__ = ["Batch"]


class _HostTrial(Trial):
    """A trial whose runs are looked at on the host, further ones included."""

    def _observe(self, poison: Fill, prefill: Fill) -> Observation:
        super()._observe(poison, prefill)
        self.observations[-1] = self.observations[-1].on_host()
        return self.observations[-1]


@dataclass
class _Run:
    """What a run left on the device."""

    results: dict[str, Tensor]
    allocated: Arena
    compile_s: float
    kernel_s: float


@dataclass
class _Attempt:
    """The runs of one case, as far as they came."""

    runs: list[_Run] = field(default_factory=list)
    raised: KernelRaised | None = None


class Batch:
    """In order: `launch`, `expect`, `symptoms`, which waits for the device, and `trial` where there are any."""

    def __init__(
        self,
        kernel: Kernel,
        cases: Sequence[Case],
        *,
        plans: Sequence[Plan],
        device: str,
        home: str,
        tolerance: Tolerance,
        twice: bool,
        compile_clock: Callable[[], float],
    ) -> None:
        """`plans`: of the memory of `cases`, see `plan_of`. `home`: where they are filled and looked at, `device` or
        "cpu". All else as for `Trial`.
        """
        self.kernel = kernel
        self.cases = cases
        self.device = device
        self.home = home
        self.tolerance = tolerance
        self.twice = twice
        self._compile_clock = compile_clock
        self._problem = problem_of(cases[0])
        self._image = Image(plans, device, home=home)
        self._pools = [WorkspacePool(device, fill) for fill in RUNS]
        self._fetch = Fetch(home)
        self._contents: list[Contents] = []
        self._attempts: list[_Attempt] = []
        self._expectations: list[Expectation] = []
        self._distant: DistantExpectations | None = None
        self._build_s = self._expect_s = 0.0

    def launch(self) -> None:
        """Build the inputs of all cases, run the kernel on each, start to copy back."""
        started = time.perf_counter()
        self._contents = self._problem.contents(self.cases, self.home, self.kernel.declaration.supports)
        for i, (case, contents) in enumerate(zip(self.cases, self._contents, strict=True)):
            self._problem.write(case, self._image.tensors(i), contents.values, contents.placement)
        self._image.send()
        self._build_s = time.perf_counter() - started
        self._attempts = [self._attempt(i) for i in range(len(self.cases))]
        self._start_copies()

    def expect(self) -> None:
        """Work out what should come back, beside the device's work."""
        started = time.perf_counter()
        requests = [
            (self.kernel.declaration, case, contents.values)
            for case, contents in zip(self.cases, self._contents, strict=True)
        ]
        interpreted = self.device == "cpu"
        if self.home == self.device:
            self._expectations = expectations(requests, tolerance=self.tolerance, interpreted=interpreted)
        else:
            self._distant = DistantExpectations(requests, self.device, self.tolerance, interpreted, self._fetch)
        self._expect_s = time.perf_counter() - started

    def symptoms(self) -> list[Symptoms | KernelRaised]:
        """Of each case, or what a run raised."""
        if self.home == "cpu":
            if self.device != "cpu":
                torch.cuda.synchronize()
            if self._distant is not None:
                self._expectations = self._distant.at_home()
            found = self._look_on_host()
        else:
            found = self._look_on_device()
        return [attempt.raised or found[i] for i, attempt in enumerate(self._attempts)]

    def trial(self, case: int, symptoms: Symptoms) -> Trial:
        """The trial of case number `case`, with its runs."""
        trial = self._trial(case)
        trial.symptoms = symptoms
        return trial

    def timing(self, case: int) -> Timing:
        """Of case number `case`; the total is left to the caller."""
        runs = self._attempts[case].runs
        return Timing(
            build_s=self._build_s / len(self.cases),
            compile_s=sum(run.compile_s for run in runs),
            kernel_s=sum(run.kernel_s for run in runs),
            reference_s=self._expect_s / len(self.cases),
        )

    def _look_on_host(self) -> dict[int, Symptoms]:
        chosen = [i for i, attempt in enumerate(self._attempts) if attempt.raised is None]
        seen = [Seen(self.cases[i], self._results(i), self._expectations[i]) for i in chosen]
        damaged = self._damage()
        return {
            i: Symptoms(damaged[i], summary.unwritten, summary.differs, summary.error_ratio)
            for i, summary in zip(chosen, look(self.kernel.declaration, seen), strict=True)
        }

    def _look_on_device(self) -> dict[int, Symptoms]:
        trials = {i: self._trial(i) for i, attempt in enumerate(self._attempts) if attempt.raised is None}
        if not trials:
            return {}
        flags = torch.stack([trial.flags for trial in trials.values()]).tolist()
        found = {}
        to_inputs = self._image.input_damage(self._fetch)
        for (i, trial), numbers in zip(trials.items(), flags, strict=True):
            symptoms = Symptoms.read(numbers, runs=len(trial.runs))
            damaged = tuple(map(any, zip(symptoms.damaged, to_inputs[i], strict=False)))
            found[i] = replace(symptoms, damaged=damaged)
        return found

    def _results(self, case: int) -> list[list[Tensor]]:
        """Of each run, at home."""
        return [[self._fetch.at_home(part) for part in run.results.values()] for run in self._attempts[case].runs]

    def _damage(self) -> list[tuple[bool, ...]]:
        """Of each case, for each of its runs."""
        given = self._image.damage(self._fetch)
        whole = [
            pool.is_whole(
                [attempt.runs[i].allocated for attempt in self._attempts if i < len(attempt.runs)], self._fetch
            )
            for i, pool in enumerate(self._pools)
        ]
        return [
            tuple(
                given[case][i] or not (whole[i] or self._is_whole(run.allocated)) for i, run in enumerate(attempt.runs)
            )
            for case, attempt in enumerate(self._attempts)
        ]

    def _is_whole(self, allocated: Arena) -> bool:
        return not bool(allocated.on_host(self._fetch.at_home).damage())

    def _attempt(self, case: int) -> _Attempt:
        attempt = _Attempt()
        both_runs = self._image.on_device(case)
        try:
            for i in range(1 + self.twice):
                tensors = {name: tensor[i] for name, tensor in both_runs.items()}
                attempt.runs.append(self._run(self.cases[case], tensors, i))
        except KernelRaised as raised:
            attempt.raised = raised
        return attempt

    def _run(self, case: Case, tensors: dict[str, Tensor], i: int) -> _Run:
        inputs = self._problem.inputs(case, tensors)
        allocations = TrackedAllocations(self.device, poison=RUNS[i], prefill=RUNS[i], source=self._pools[i].take)
        started, compiled = time.perf_counter(), self._compile_clock()
        results = call(self.kernel, case, inputs, allocations)
        compile_s = self._compile_clock() - compiled
        kernel_s = time.perf_counter() - started - compile_s
        for name, result in results.items():
            allocations.arena.rename(result, name)
        return _Run(results, allocations.arena, compile_s, kernel_s)

    def _start_copies(self) -> None:
        self._image.start(self._fetch)
        for pool in self._pools:
            pool.start(self._fetch)
        runs = [run for attempt in self._attempts for run in attempt.runs]
        self._fetch.start([result for run in runs for result in run.results.values()])

    def _trial(self, case: int) -> Trial:
        make = Trial if self.home == self.device else _HostTrial
        trial = make(
            self.kernel,
            self.cases[case],
            device=self.device,
            tolerance=self.tolerance,
            twice=self.twice,
            compile_clock=self._compile_clock,
        )
        trial.reference = Reference.known(
            self.kernel.declaration,
            self.cases[case],
            device=self.home,
            tolerance=self.tolerance,
            values=self._contents[case].values,
            expectation=self._expectations[case],
        )
        trial.reference.seconds = self._expect_s / len(self.cases)
        trial.adopt([self._observation(case, i, run) for i, run in enumerate(self._attempts[case].runs)])
        return trial

    def _observation(self, case: int, i: int, run: _Run) -> Observation:
        return Observation(
            RUNS[i],
            RUNS[i],
            inputs=None,
            given=self._image.arena(case, i, self._fetch),
            allocated=run.allocated if self.home == self.device else run.allocated.on_host(self._fetch.at_home),
            results={name: self._fetch.at_home(result) for name, result in run.results.items()},
            build_s=self._build_s / len(self.cases) / (1 + self.twice),
            compile_s=run.compile_s,
            kernel_s=run.kernel_s,
        )
