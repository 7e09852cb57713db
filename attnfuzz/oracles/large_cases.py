"""Runs of a kernel on a few large cases, filled and looked at on the device that runs it, with one wait at the end."""

import time
from collections.abc import Callable, Sequence

import torch

from attnfuzz.declaration import Kernel
from attnfuzz.oracles.expectations import expectations
from attnfuzz.oracles.observation import KernelRaised
from attnfuzz.oracles.trial import Symptoms, Trial
from attnfuzz.problems.cases import Case
from attnfuzz.problems.tolerance import Tolerance

__all__ = ["large_trials"]


def large_trials(
    kernel: Kernel,
    cases: Sequence[Case],
    *,
    device: str,
    tolerance: Tolerance,
    twice: bool,
    compile_clock: Callable[[], float],
) -> list[Trial]:
    """The trial of each case, its symptoms known or what a run raised; arguments as for `Trial`."""
    trials = [
        Trial(kernel, case, device=device, tolerance=tolerance, twice=twice, wait=False, compile_clock=compile_clock)
        for case in cases
    ]
    _expect(trials)
    for trial in trials:
        try:
            trial.flags  # noqa: B018 - computed and kept
        except KernelRaised as raised:
            trial.raised = raised
    seen = [trial for trial in trials if trial.raised is None]
    if seen:
        flags = torch.stack([trial.flags for trial in seen]).tolist()
        for trial, numbers in zip(seen, flags, strict=True):
            trial.symptoms = Symptoms.read(numbers, runs=len(trial.runs))
    for trial in trials:
        trial.wait = True
    return trials


def _expect(trials: Sequence[Trial]) -> None:
    """Work out what should come back, for all at once."""
    started = time.perf_counter()
    requests = [(trial.kernel.declaration, trial.case, trial.reference.values) for trial in trials]
    found = expectations(requests, tolerance=trials[0].reference.tolerance, interpreted=trials[0].device == "cpu")
    share_s = (time.perf_counter() - started) / len(trials)
    for trial, expectation in zip(trials, found, strict=True):
        trial.reference.expectation = expectation
        trial.reference.seconds += share_s
