"""Verdicts on many cases of a kernel with one wait for the device: a look at all, and a closer one where it is due."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from attnfuzz.declaration import Kernel
from attnfuzz.judging.batch import Batch
from attnfuzz.judging.judge import (
    judge,
    judge_raised,
    judge_trial,
    judge_unguarded,
    lacks_lse,
    needs_two_runs,
)
from attnfuzz.judging.observation import KernelRaised
from attnfuzz.judging.related import judge_related
from attnfuzz.judging.trial import Symptoms
from attnfuzz.memory.guarded import Guard
from attnfuzz.memory.image import Plan, plan_of
from attnfuzz.oracles.exception import context_lost
from attnfuzz.oracles.relations.catalogue import chosen as chosen_relations
from attnfuzz.oracles.relations.guard_page import guard_of
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.oracles.verdict import DEFAULT_ORACLES, OracleName, Relations, Timing, Verdict
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import DEFAULT_LIMIT_BYTES, case_nbytes, check_size
from attnfuzz.problems.registry import problem_of
from attnfuzz.problems.tolerance import Tolerance
from attnfuzz.said import text_of

__all__ = ["BatchLost", "judge_many"]

_IMAGE_BYTES = 1 << 28
_BATCH_BYTES = 1 << 30
"""What the cases of a batch may take together: small ones on the host, large ones on the device."""

_SMALL_BYTES = 1 << 23
"""Of the memory for both runs. Above, the host takes longer to fill and compare it than a GPU that several processes
share."""

_MOST_RELATED = 6
"""Times the memory of a case that it may take together with the runs of a relation: two of it and two others for
call_sequence, the longer of which is up to twice as large."""


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
    if cases and not problem_of(cases[0]).in_parts:
        return [
            _alive(
                judge(
                    kernel,
                    case,
                    device=device,
                    oracles=oracles,
                    tolerance=tolerance,
                    size_limit=size_limit,
                    thorough=thorough,
                    relations=relations,
                    catch_interrupt=catch_interrupt,
                    compile_clock=compile_clock,
                )
            )
            for case in cases
        ]
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
    candidates = [
        _Candidate(case, plan_of(case), together.relations_of(case), together.guard_of(case)) for case in cases
    ]
    small = [i for i, one in enumerate(candidates) if _is_small(one.plan)]
    large = sorted(set(range(len(cases))) - set(small))
    sizes = [candidates[i].plan.nbytes * (_MOST_RELATED if candidates[i].relations else 1) for i in small]
    verdicts: dict[int, Verdict] = {}
    for batch in _batches(small, sizes, _IMAGE_BYTES):
        verdicts |= zip(batch, together.judge([candidates[i] for i in batch], "cpu"), strict=True)
    for batch in _batches(large, [case_nbytes(cases[i]) for i in large], _BATCH_BYTES):
        verdicts |= zip(batch, together.judge([candidates[i].by_itself() for i in batch], device), strict=True)
    return [verdicts[i] for i in range(len(cases))]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A case, the plan of its memory, the relations that have a word on it if all else is well, and see `guard_of`."""

    case: Case
    plan: Plan
    relations: list[Relation]
    guard: Guard | None

    def by_itself(self) -> "_Candidate":
        """With relations that make their runs one by one."""
        return replace(self, relations=[replace(relation, further=None) for relation in self.relations])


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

    def relations_of(self, case: Case) -> list[Relation]:
        """Those that have a word on `case` if all else is well."""
        chosen = chosen_relations(self.kernel.declaration, case, self.oracles, self.relations, device=self.device)
        return [replace(one, further=None) if self.device in one.alone_on else one for one in chosen]

    def guard_of(self, case: Case) -> Guard | None:
        """Which edge of each tensor is guarded in the second run of `case`."""
        if not self.thorough:
            return None
        return guard_of(self.kernel.declaration, case, self.oracles, self.relations, device=self.device)

    def judge(self, candidates: Sequence[_Candidate], home: str) -> list[Verdict]:
        """Verdicts on `candidates`, filled and looked at on the device `home`."""
        started = time.perf_counter()
        try:
            verdicts = self._judge(candidates, home)
        except torch.OutOfMemoryError as error:  # a kernel's own, or for want of what other cases hold
            raise BatchLost(text_of(error).strip().partition("\n")[0]) from error
        except RuntimeError as error:
            if (lost := context_lost(error)) is not None:
                raise BatchLost(lost) from error
            raise
        shared_s = time.perf_counter() - started - sum(verdict.timing.total_s for verdict in verdicts)
        return [_with_share(verdict, shared_s / len(candidates)) for verdict in verdicts]

    def _judge(self, candidates: Sequence[_Candidate], home: str) -> list[Verdict]:
        """Verdicts with the time that each case took for itself."""
        batch = Batch(
            self.kernel,
            [one.case for one in candidates],
            plans=[one.plan for one in candidates],
            device=self.device,
            home=home,
            tolerance=self.tolerance,
            twice=self.thorough and needs_two_runs(self.oracles),
            compile_clock=self.compile_clock,
            relations=[one.relations for one in candidates],
            guards=[one.guard for one in candidates],
        )
        batch.launch()
        batch.expect()
        return [self._verdict(batch, i, found) for i, found in enumerate(batch.symptoms())]

    def _verdict(self, batch: Batch, case: int, found: Symptoms | KernelRaised) -> Verdict:
        launched = batch.timing(case)
        launched_s = launched.compile_s + launched.kernel_s
        is_done = batch.guards[case] is None and not batch.asked[case]
        if isinstance(found, Symptoms) and not found.any() and is_done:
            return Verdict(error_ratio=found.error_ratio, timing=msgspec.structs.replace(launched, total_s=launched_s))
        started = time.perf_counter()
        verdict = self._closer_look(batch, case, found)
        _alive(verdict)
        timing, alone = batch.timing(case), verdict.timing
        batch.drop_trial(case)
        timing = Timing(
            build_s=timing.build_s + alone.build_s,
            compile_s=timing.compile_s + alone.compile_s,
            kernel_s=timing.kernel_s + alone.kernel_s,
            reference_s=timing.reference_s + alone.reference_s,
            total_s=launched_s + time.perf_counter() - started,
        )
        return msgspec.structs.replace(verdict, timing=timing)

    def _closer_look(self, batch: Batch, case: int, found: Symptoms | KernelRaised) -> Verdict:
        """The oracles' word on a case with symptoms, or that a relation is to judge."""
        try:
            if isinstance(found, KernelRaised):
                raise found
            if any(found.damaged):  # perhaps by another case, whose memory lies beside
                return self._alone(batch.cases[case])
            guarded = batch.guards[case] is not None
            if not found.any() and not (guarded and batch.trial(case).symptoms.any()):
                verdict = Verdict(error_ratio=found.error_ratio)
            else:
                verdict = judge_trial(batch.trial(case), self.oracles)
            if verdict.failure is None and guarded:
                verdict = judge_unguarded(verdict, batch.trial(case), catch_interrupt=self.catch_interrupt)
            if verdict.failure is None or lacks_lse(verdict, batch.trial(case)):
                verdict = judge_related(verdict, batch, case, catch_interrupt=self.catch_interrupt)
            return verdict
        except KernelRaised as raised:
            return judge_raised(raised, self.oracles, catch_interrupt=self.catch_interrupt)

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


def _alive(verdict: Verdict) -> Verdict:
    """`verdict`, after which this process can go on. Raises `BatchLost`."""
    if verdict.fatal:
        raise BatchLost(verdict.failure.message if verdict.failure else "the GPU's context or memory is lost")
    return verdict


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
