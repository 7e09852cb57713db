"""Verdicts on many cases of a kernel with one wait for the device: a look at all, and a closer one where it is due."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from attnfuzz.declaration import Kernel
from attnfuzz.memory.image import Plan, plan_of
from attnfuzz.oracles.batch import Batch
from attnfuzz.oracles.exception import context_lost
from attnfuzz.oracles.judge import judge, judge_raised, judge_relations, judge_trial, needs_two_runs
from attnfuzz.oracles.observation import KernelRaised
from attnfuzz.oracles.relations.catalogue import chosen as chosen_relations
from attnfuzz.oracles.trial import Symptoms, Trial
from attnfuzz.oracles.verdict import DEFAULT_ORACLES, OracleName, Relations, Timing, Verdict
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import DEFAULT_LIMIT_BYTES, case_nbytes, check_size
from attnfuzz.problems.tolerance import Tolerance

__all__ = ["BatchLost", "judge_many"]

_IMAGE_BYTES = 1 << 28
_BATCH_BYTES = 1 << 30
"""What the cases of a batch may take together: small ones on the host, large ones on the device."""

_SMALL_BYTES = 1 << 23
"""Of the memory for both runs. Above, the host takes longer to fill and compare it than a GPU that several processes
share."""


class BatchLost(Exception):  # noqa: N818 - says what happened
    """The GPU's context or memory is lost to this process, and it cannot be told which case did it."""


def judge_many(
    kernel: Kernel,
    cases: Sequence[Case],
    *,
    device: str,
    oracles: Sequence[OracleName] = DEFAULT_ORACLES,
    tolerance: Tolerance = "bound",
    size_limit: int = DEFAULT_LIMIT_BYTES,
    thorough: bool = True,
    relations: Relations = None,
    catch_interrupt: bool = False,
    compile_clock: Callable[[], float] = lambda: 0.0,
) -> list[Verdict]:
    """As `judge` for each of `cases`, in their order; everything is launched before anything is looked at.

    A failure that was seen counts, even if it would not be seen again. Raises `BatchLost` after a CUDA error that
    outlives its launch, and where memory ran out: the process must not be used again, and `judge` in another one tells
    whose doing it was. Otherwise raises as `judge` does.
    """
    for case in cases:
        check_size(case, size_limit)
    together = _Together(
        kernel=kernel,
        device=device,
        oracles=oracles,
        tolerance=tolerance,
        thorough=thorough,
        relations=relations,
        catch_interrupt=catch_interrupt,
        compile_clock=compile_clock,
    )
    plans = [plan_of(case) for case in cases]
    small = [i for i, plan in enumerate(plans) if _is_small(plan)]
    verdicts: dict[int, Verdict] = {}
    for home, chosen, limit, sizes in (
        ("cpu", small, _IMAGE_BYTES, [plans[i].nbytes for i in small]),
        (
            device,
            large := sorted(set(range(len(cases))) - set(small)),
            _BATCH_BYTES,
            [case_nbytes(cases[i]) for i in large],
        ),
    ):
        for batch in _batches(chosen, sizes, limit):
            found = together.judge([cases[i] for i in batch], [plans[i] for i in batch], home)
            verdicts |= zip(batch, found, strict=True)
    return [verdicts[i] for i in range(len(cases))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Together:
    """What is the same for all cases of a call."""

    kernel: Kernel
    device: str
    oracles: Sequence[OracleName]
    tolerance: Tolerance
    thorough: bool
    relations: Relations
    catch_interrupt: bool
    compile_clock: Callable[[], float]

    def judge(self, cases: Sequence[Case], plans: Sequence[Plan], home: str) -> list[Verdict]:
        """Verdicts on `cases`, filled and looked at on the device `home`."""
        started = time.perf_counter()
        try:
            verdicts = self._judge(cases, plans, home)
        except torch.OutOfMemoryError as error:  # a kernel's own, or for want of what other cases hold
            raise BatchLost(_first_line(error)) from error
        except RuntimeError as error:
            if (lost := context_lost(error)) is not None:
                raise BatchLost(lost) from error
            raise
        shared_s = time.perf_counter() - started - sum(verdict.timing.total_s for verdict in verdicts)
        return [_with_share(verdict, shared_s / len(cases)) for verdict in verdicts]

    def _judge(self, cases: Sequence[Case], plans: Sequence[Plan], home: str) -> list[Verdict]:
        """Verdicts with the time that each case took for itself."""
        batch = Batch(
            self.kernel,
            cases,
            plans=plans,
            device=self.device,
            home=home,
            tolerance=self.tolerance,
            twice=self.thorough and needs_two_runs(self.oracles),
            compile_clock=self.compile_clock,
        )
        batch.launch()
        batch.expect()
        return [self._verdict(batch, i, found) for i, found in enumerate(batch.symptoms())]

    def _verdict(self, batch: Batch, case: int, found: Symptoms | KernelRaised) -> Verdict:
        is_well = isinstance(found, Symptoms) and not found.any()
        if isinstance(found, Symptoms) and is_well and not self._is_related(batch.cases[case]):
            timing = batch.timing(case)
            own_s = timing.compile_s + timing.kernel_s
            return Verdict(error_ratio=found.error_ratio, timing=msgspec.structs.replace(timing, total_s=own_s))
        started = time.perf_counter()
        verdict = self._closer_look(batch, case, found)
        if verdict.fatal:
            raise BatchLost(verdict.failure.message if verdict.failure else "the GPU's context or memory is lost")
        timing, further = batch.timing(case), verdict.timing
        timing = msgspec.structs.replace(
            timing,
            compile_s=timing.compile_s + further.compile_s,
            kernel_s=timing.kernel_s + further.kernel_s,
            total_s=timing.compile_s + timing.kernel_s + time.perf_counter() - started,
        )
        return msgspec.structs.replace(verdict, timing=timing)

    def _closer_look(self, batch: Batch, case: int, found: Symptoms | KernelRaised) -> Verdict:
        """The oracles' word on a case with symptoms, or that a relation is to judge."""
        try:
            if isinstance(found, KernelRaised):
                raise found
            if any(found.damaged):  # perhaps by another case, whose memory lies beside
                return self._alone(batch.cases[case])
            trial = batch.trial(case, found)
            well = not found.any()
            verdict = Verdict(error_ratio=found.error_ratio) if well else judge_trial(trial, self.oracles)
            return verdict if verdict.failure else self._related(verdict, trial)
        except KernelRaised as raised:
            return judge_raised(raised, self.oracles, catch_interrupt=self.catch_interrupt)

    def _related(self, verdict: Verdict, trial: Trial) -> Verdict:
        """What relations say of a case that passed, with the time that their runs took."""
        before = len(trial.observations)
        verdict = judge_relations(verdict, trial, self.oracles, self.relations, catch_interrupt=self.catch_interrupt)
        further = trial.observations[before:]
        compile_s, kernel_s = (sum(getattr(seen, part) for seen in further) for part in ("compile_s", "kernel_s"))
        return msgspec.structs.replace(verdict, timing=Timing(compile_s=compile_s, kernel_s=kernel_s))

    def _is_related(self, case: Case) -> bool:
        """Whether a relation has a word on `case` if all else is well."""
        return bool(chosen_relations(self.kernel.declaration, case, self.oracles, self.relations, device=self.device))

    def _alone(self, case: Case) -> Verdict:
        return judge(
            self.kernel,
            case,
            device=self.device,
            oracles=self.oracles,
            tolerance=self.tolerance,
            thorough=self.thorough,
            relations=self.relations,
            catch_interrupt=self.catch_interrupt,
            compile_clock=self.compile_clock,
        )


def _with_share(verdict: Verdict, shared_s: float) -> Verdict:
    timing = verdict.timing
    return msgspec.structs.replace(verdict, timing=msgspec.structs.replace(timing, total_s=timing.total_s + shared_s))


def _is_small(plan: Plan) -> bool:
    return plan.nbytes <= _SMALL_BYTES


def _batches(items: Sequence[int], sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """`items` in their order, cut where their sizes add up to more than `limit`."""
    batch: list[int] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and total + size > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
