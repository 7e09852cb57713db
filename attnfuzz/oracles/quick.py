"""Verdicts on many cases of a kernel with one wait for the device: a look at all, and a closer one where it is due."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from attnfuzz.declaration import Kernel
from attnfuzz.oracles.exception import context_lost
from attnfuzz.oracles.judge import judge_raised, judge_trial, needs_two_runs, with_timing
from attnfuzz.oracles.observation import KernelRaised
from attnfuzz.oracles.trial import Symptoms, Trial
from attnfuzz.oracles.verdict import DEFAULT_ORACLES, OracleName, Verdict
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import DEFAULT_LIMIT_BYTES, case_nbytes, check_size
from attnfuzz.problems.tolerance import Tolerance

__all__ = ["BatchLost", "judge_many"]

_BATCH_BYTES = 1 << 30
"""Runs are kept until a batch is over. A case that needs more is a batch of its own."""


class BatchLost(Exception):  # noqa: N818 - says what happened
    """The GPU's context or memory is lost to this process, and it cannot be told which case did it."""


@dataclass
class _Entry:
    trial: Trial
    seconds: float = 0.0
    raised: KernelRaised | None = None


@dataclass(frozen=True)
class _Settings:
    oracles: Sequence[OracleName]
    catch_interrupt: bool = field(kw_only=True)


def judge_many(
    kernel: Kernel,
    cases: Sequence[Case],
    *,
    device: str,
    oracles: Sequence[OracleName] = DEFAULT_ORACLES,
    tolerance: Tolerance = "bound",
    size_limit: int = DEFAULT_LIMIT_BYTES,
    thorough: bool = True,
    catch_interrupt: bool = False,
    compile_clock: Callable[[], float] = lambda: 0.0,
) -> list[Verdict]:
    """As `judge` for each of `cases`, in their order; everything is launched before anything is looked at.

    Raises `BatchLost` after a CUDA error that outlives its launch, and where memory ran out: the process must not be
    used again, and `judge` in another one tells whose doing it was. Otherwise raises as `judge` does.
    """
    settings = _Settings(oracles, catch_interrupt=catch_interrupt)
    twice = thorough and needs_two_runs(oracles)
    verdicts: list[Verdict] = []
    for batch in _batches(cases, size_limit):
        trials = [
            Trial(
                kernel, case, device=device, tolerance=tolerance, twice=twice, wait=False, compile_clock=compile_clock
            )
            for case in batch
        ]
        verdicts += _judge_batch(trials, settings)
    return verdicts


def _batches(cases: Sequence[Case], size_limit: int) -> Iterator[list[Case]]:
    for case in cases:
        check_size(case, size_limit)
    batch: list[Case] = []
    total = 0
    for case in cases:
        nbytes = case_nbytes(case)
        if batch and total + nbytes > _BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(case)
        total += nbytes
    if batch:
        yield batch


def _judge_batch(trials: Sequence[Trial], settings: _Settings) -> list[Verdict]:
    started = time.perf_counter()
    entries = [_Entry(trial) for trial in trials]
    try:
        _look(entries)
        verdicts = [_verdict(entry, settings) for entry in entries]
    except torch.OutOfMemoryError as error:  # a kernel's own, or for want of what other cases hold
        raise BatchLost(str(error).strip().partition("\n")[0]) from error
    except RuntimeError as error:
        if (lost := context_lost(error)) is not None:
            raise BatchLost(lost) from error
        raise
    shared_s = (time.perf_counter() - started - sum(entry.seconds for entry in entries)) / len(entries)
    return [
        with_timing(verdict, entry.trial, entry.seconds + shared_s)
        for verdict, entry in zip(verdicts, entries, strict=True)
    ]


def _look(entries: Sequence[_Entry]) -> None:
    """Run and compare everything, then read all symptoms at once."""
    for entry in entries:
        started = time.perf_counter()
        try:
            entry.trial.flags  # noqa: B018 - computed and kept
        except KernelRaised as raised:
            entry.raised = raised
        entry.seconds = time.perf_counter() - started
    seen = [entry for entry in entries if entry.raised is None]
    if seen:
        flags = torch.stack([entry.trial.flags for entry in seen]).tolist()
        for entry, numbers in zip(seen, flags, strict=True):
            entry.trial.symptoms = Symptoms.read(numbers, runs=len(entry.trial.runs))


def _verdict(entry: _Entry, settings: _Settings) -> Verdict:
    """The oracles' word on a case with symptoms; without any they have none."""
    started = time.perf_counter()
    try:
        verdict = _closer_look(entry, settings)
    finally:
        entry.seconds += time.perf_counter() - started
    if verdict.fatal:
        raise BatchLost(verdict.failure.message if verdict.failure else "a kernel lost the GPU's context or memory")
    return verdict


def _closer_look(entry: _Entry, settings: _Settings) -> Verdict:
    try:
        if entry.raised is not None:
            raise entry.raised
        if not entry.trial.symptoms.any():
            return Verdict(error_ratio=entry.trial.symptoms.error_ratio)
        entry.trial.wait = True
        return judge_trial(entry.trial, settings.oracles)
    except KernelRaised as raised:
        return judge_raised(raised, settings.oracles, catch_interrupt=settings.catch_interrupt)
