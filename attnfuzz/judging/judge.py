"""The verdict on a case, or on many with one wait for the device: the oracles asked for, the most specific cause first.

`judge` is for one case, by itself: it waits for the device after each run, so that a fault is this case's, and tells a
lost CUDA context or exhausted memory as a verdict. `judge_batch` launches everything before it looks at anything, and
looks closer where that is due: by the same oracles, on the runs that were made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

import msgspec
import torch

from attnfuzz.declaration import Kernel
from attnfuzz.inputs.registry import problem_of
from attnfuzz.judging.batch import Batch, BatchLost, Candidate
from attnfuzz.judging.misuse import misuse_of
from attnfuzz.memory.guarded import Guard
from attnfuzz.memory.image import plan_of
from attnfuzz.oracles import asking_own, exception, registry, unwritten
from attnfuzz.oracles.exception import context_lost
from attnfuzz.oracles.own import OwnOracle
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName, oracle_of
from attnfuzz.oracles.relations.catalogue import chosen
from attnfuzz.oracles.relations.guard_page import GUARD_PAGE, guard_of
from attnfuzz.oracles.relations.relation import NothingRunError, NotInThisProcessError, Relation, runs_of
from attnfuzz.problems.cases import Case
from attnfuzz.problems.declared_numerics import Tolerance
from attnfuzz.problems.limits import DEFAULT_LIMIT_BYTES, case_nbytes, check_size
from attnfuzz.trials.observation import KernelRaised
from attnfuzz.trials.run_checks import RunChecks
from attnfuzz.trials.trial import Trial
from attnfuzz.untrusted_text import text_of
from attnfuzz.values.tokens import values_on
from attnfuzz.verdict import Failure, Relations, Timing, Verdict

Check = Callable[[Trial], Failure | None]

_OF_BOTH_RUNS: Mapping[OracleName, Check] = {
    name: one.load() for name, one in registry.KNOWN.items() if one.code and not one.is_relation
}
"""Those that need no further runs, where nothing is wrong. The most specific cause comes first."""

_TOLD_OF_A_RUN = frozenset({registry.ACCURACY.name, registry.DEAD_MEMORY.name})
"""Which of them say what a wrong run of a relation, judged by itself, points to."""

_IMAGE_BYTES = 1 << 28
_BATCH_BYTES = 1 << 30
"""Most memory of the cases of a batch together: small ones on the host, large ones on the device."""

_SMALL_BYTES = 1 << 23
"""Most memory for both runs of a small case. Above, the host takes longer to fill and compare it than a GPU that
several processes share."""

_MOST_RELATED = 24
"""Times the memory of a case that it may take together with the runs of a relation: two of it, and for call_sequence as
many others as there are respects in which calls differ, of which strides may take up to twice as much."""


class Judging(TypedDict, total=False):
    """How cases are judged: what `judge` and `judge_batch` take beside the kernel, the cases and the device.

    - ``oracles``: those asked for; ``relations``: which of them, among these, have a word on a case that passes
      otherwise.
    - ``tolerance``: how far results may be off.
    - ``size_limit``: bytes that a case may need.
    - ``run_twice``: without, a first run that is right in every respect is believed, at half the price: missed are
      results that are nondeterministic, or depend on dead memory, and yet are right where that memory holds NaN.
    - ``inquire``: the mistakes that give a wrong result are told apart by runs on neighbouring cases; without, none is
      told.
    - ``catch_interrupt``: a KeyboardInterrupt is the kernel's own doing, as it is where no keyboard can reach.
    - ``compile_clock``: see `observe`.
    """

    oracles: Sequence[OracleName]
    tolerance: Tolerance
    size_limit: int
    run_twice: bool
    inquire: bool
    relations: Relations
    catch_interrupt: bool
    compile_clock: Callable[[], float]


def judge(kernel: Kernel, case: Case, *, device: str, **how: Unpack[Judging]) -> Verdict:
    """Run `kernel` on `case` in this process, twice if nothing fails, and apply the oracles.

    `device`: "cpu" or "cuda". A crash or hang ends or blocks this process; `attnfuzz.judging.runner` survives both.
    The verdict's `fatal` says that the process must not use the GPU again. Raises `CaseTooLarge` if the case needs more
    than its limit, and `EnvironmentProblem` where the installed libraries cannot run any kernel.
    """
    return _Judge(kernel=kernel, device=device, **how).alone(case)


def judge_batch(kernel: Kernel, cases: Sequence[Case], *, device: str, **how: Unpack[Judging]) -> list[Verdict]:
    """As `judge` for each of `cases`, in their order; everything is launched before anything is looked at.

    A failure that was seen counts, even if it would not be seen again. Raises `BatchLost` after a CUDA error that
    outlives its launch, and where memory ran out: the process must not be used again, and `judge` in another one tells
    whose doing it was. Otherwise raises as `judge` does.
    """
    return _Judge(kernel=kernel, device=device, **how).together(cases)


def _survived(verdict: Verdict) -> Verdict:
    """`verdict`, after which this process can go on. Raises `BatchLost`."""
    if verdict.fatal:
        raise BatchLost(verdict.failure.message if verdict.failure else "the GPU's context or memory is lost")
    return verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """See `Judging`."""

    kernel: Kernel
    device: str
    oracles: Sequence[OracleName] = DEFAULT_ORACLES
    tolerance: Tolerance = "bound"
    size_limit: int = DEFAULT_LIMIT_BYTES
    run_twice: bool = True
    inquire: bool = True
    relations: Relations = None
    catch_interrupt: bool = False
    compile_clock: Callable[[], float] = lambda: 0.0

    def alone(self, case: Case) -> Verdict:
        """The verdict on `case` from runs of its own."""
        started = time.perf_counter()
        check_size(case, self.size_limit)
        trial = Trial(
            self.kernel,
            case,
            device=self.device,
            tolerance=self.tolerance,
            twice=self._runs_twice,
            guard=self._guard_of(case),
            inquire=self.inquire,
            compile_clock=self.compile_clock,
        )
        verdict = self._of_trial(trial, self._relations_of(case))
        total_s = time.perf_counter() - started
        return msgspec.structs.replace(verdict, timing=msgspec.structs.replace(verdict.timing, total_s=total_s))

    def together(self, cases: Sequence[Case]) -> list[Verdict]:
        """Verdicts on `cases`, from runs that were made together as far as memory and their problem allow."""
        for case in cases:
            check_size(case, self.size_limit)
        candidates = [Candidate(case, plan_of(case), self._along_with(case), self._guard_of(case)) for case in cases]
        small = [i for i, one in enumerate(candidates) if one.plan.nbytes <= _SMALL_BYTES]
        large = sorted(set(range(len(cases))) - set(small))
        sizes = [candidates[i].plan.nbytes * (_MOST_RELATED if candidates[i].relations else 1) for i in small]
        verdicts: dict[int, Verdict] = {}
        for batch in _batches(small, sizes, _IMAGE_BYTES):
            verdicts |= zip(batch, self._at_home([candidates[i] for i in batch], "cpu"), strict=True)
        if large and problem_of(cases[0]).targets is not None:  # which are made on the host
            return [verdicts[i] if i in verdicts else _survived(self.alone(cases[i])) for i in range(len(cases))]
        for batch in _batches(large, [case_nbytes(cases[i]) for i in large], _BATCH_BYTES):
            verdicts |= zip(batch, self._at_home([candidates[i].by_itself() for i in batch], self.device), strict=True)
        return [verdicts[i] for i in range(len(cases))]

    @property
    def _runs_twice(self) -> bool:
        """Whether an oracle asked for compares runs."""
        return self.run_twice and any(map(_compares_runs, self.oracles))

    @property
    def _own_oracles(self) -> list[OwnOracle]:
        """The oracles of the kernel's own file that are asked."""
        return [one for one in self.kernel.oracles if {registry.OWN.name, one.name} & set(self.oracles)]

    def _guard_of(self, case: Case) -> Guard | None:
        """Which edge of each tensor is guarded in the second run of `case`."""
        if not self.run_twice:
            return None
        return guard_of(self.kernel.declaration, case, self.oracles, self.relations, device=self.device)

    def _relations_of(self, case: Case) -> list[Relation]:
        """The relations that have a word on `case` if all else is well."""
        return chosen(self.kernel.declaration, case, self.oracles, self.relations, device=self.device)

    def _along_with(self, case: Case) -> list[Relation]:
        """The relations of `case`; one that must run alone on this device has no runs along with the case's."""
        return [replace(one, further=None) if self.device in one.alone_on else one for one in self._relations_of(case)]

    def _of_trial(self, trial: Trial, relations: Sequence[Relation]) -> Verdict:
        """The word of all oracles on `trial`: on its runs, then those of the kernel's own file, then `relations`."""
        try:
            verdict = self._of_all(trial, relations)
        except KernelRaised as raised:
            verdict = self._raised(raised)
        return msgspec.structs.replace(verdict, timing=trial.timing)

    def _of_runs(self, trial: Trial) -> Verdict:
        """The oracles' verdict on the runs of `trial`, and on further ones where a check fails.

        A kernel that never writes its LSE has one complaint in every case: what is wrong with its output goes before
        it. Raises `KernelRaised` if a run ends that way.
        """
        compares_runs = any(map(_compares_runs, self.oracles))
        if not trial.twice and compares_runs and trial.checks.any():
            trial.look_closer()
        failure = self._most_specific(trial)
        if failure is not None and failure.oracle == registry.UNWRITTEN.name and unwritten.lacks_lse(trial):
            failure = self._most_specific(trial.without_lse()) or failure
        return Verdict(failure=failure, error_ratio=trial.checks.error_ratio)

    def _most_specific(self, trial: Trial) -> Failure | None:
        failures = (check(trial) for name, check in _OF_BOTH_RUNS.items() if name in self.oracles)
        return next(filter(None, failures), None)

    def _of_all(self, trial: Trial, relations: Sequence[Relation]) -> Verdict:
        """As `_of_trial`; each is asked where those before it are content, relations also where it lacks but an LSE.

        Raises `KernelRaised`.
        """
        verdict = self._of_runs(trial)
        if verdict.failure is not None and verdict.failure.oracle == registry.DETERMINISM.name:
            return self._unless_outside(verdict, trial)
        if verdict.failure is None and trial.guard is not None:
            if trial.alone.any():  # so its second run was not guarded
                verdict = self._of_relation(verdict, trial, GUARD_PAGE.looking_closer())
            else:
                verdict = _after(verdict, GUARD_PAGE.name, None)
        if verdict.failure is None and (own := self._own_oracles):
            verdict = msgspec.structs.replace(verdict, failure=asking_own.check(own, trial))
        if verdict.failure is None or _lacks_lse(verdict, trial):
            for relation in relations:
                found = self._of_relation(verdict, trial, relation)
                if found.failure is not verdict.failure or found.fatal:
                    return found
                verdict = found
        return verdict

    def _unless_outside(self, verdict: Verdict, trial: Trial) -> Verdict:
        """`verdict`, that runs on the same memory differ, unless they read what nobody owns: that is not the same."""
        if GUARD_PAGE.name not in self.oracles or not GUARD_PAGE.applies(trial.kernel.declaration, trial.case):
            return verdict
        found = self._of_relation(msgspec.structs.replace(verdict, failure=None), trial, GUARD_PAGE.looking_closer())
        return verdict if found.failure is None else found

    def _of_relation(self, verdict: Verdict, trial: Trial, relation: Relation) -> Verdict:
        """`verdict`, that of all other oracles, or that of a relation that objects.

        Where the `verdict` is that an LSE is lacking, the relation looks at the output alone.
        """
        try:
            failure = relation.check(trial if verdict.failure is None else trial.without_lse())
            failure = self._as_seen_alone(trial, relation, failure)
        except NotInThisProcessError:
            return verdict
        except NothingRunError:
            return msgspec.structs.replace(verdict, untried=(*verdict.untried, relation.name))
        except KernelRaised as raised:
            return self._relation_raised(verdict, relation.name, raised)
        if failure is None and not relation.applies(trial.kernel.declaration, trial.case):
            return verdict  # as has been seen in the meantime
        return _after(verdict, relation.name, failure)

    def _as_seen_alone(self, trial: Trial, relation: Relation, failure: Failure | None) -> Failure | None:
        """`failure`, with what is wrong with a run of the `relation` by itself, and the mistakes that give that.

        Nothing follows where each run is within its bounds: then it is only beside another one that it is wrong.
        Raises `KernelRaised` where the process is lost.
        """
        if failure is None or failure.causes or failure.maybe:
            return failure
        for changed in runs_of(relation, trial):
            if changed.values is None:  # another case, whose mistakes are not this one's
                continue
            reference = trial.reference_of(changed.case, values_on(changed.values, trial.device))
            alone = trial.beside(
                case=changed.case, reference=reference, placement=changed.placement, inquire=trial.inquire
            )
            try:
                found = self._most_specific(alone)
            except KernelRaised as raised:
                if raised.fatal:
                    raise
                return failure  # it has objected to something else, which no longer shows
            if found is None or found.oracle not in _TOLD_OF_A_RUN:
                continue
            details = (*failure.details, f"{changed.words}, {found.message}") if found.causes else failure.details
            return msgspec.structs.replace(failure, causes=found.causes, maybe=found.maybe, details=details)
        return failure

    def _relation_raised(self, verdict: Verdict, relation: OracleName, raised: KernelRaised) -> Verdict:
        """`verdict`, and an objection of `relation`: by itself the case does not raise.

        Memory may run out where one takes more.
        """
        found = self._raised(raised, (registry.EXCEPTION.name, registry.CRASH.name))
        seen = {"error_ratio": verdict.error_ratio, "related": verdict.related, "untried": verdict.untried}
        found = msgspec.structs.replace(found, **seen)
        if found.failure is None or raised.is_a(torch.OutOfMemoryError):
            return msgspec.structs.replace(found, failure=None, not_runnable="")
        changed = f"{raised.changed}: " if raised.changed else ""
        failure = msgspec.structs.replace(
            found.failure,
            oracle=relation,
            kind=f"raised {found.failure.kind}",
            message=f"{changed}{found.failure.message}",
            tensor=raised.tensor or found.failure.tensor,
            maybe=raised.maybe,
            remedy=raised.remedy,
        )
        return _after(found, relation, failure)

    def _raised(self, raised: KernelRaised, oracles: Sequence[OracleName] | None = None) -> Verdict:
        """The verdict where a run `raised`; a KeyboardInterrupt is passed on unless told to catch it."""
        if raised.is_a(KeyboardInterrupt) and not self.catch_interrupt:
            raise raised.error from None
        found = exception.verdict(raised, self.oracles if oracles is None else oracles)
        if found.failure is None or not (misuse := misuse_of(raised.error, self.kernel)):
            return found
        return msgspec.structs.replace(found, failure=msgspec.structs.replace(found.failure, misuse=misuse))

    def _at_home(self, candidates: Sequence[Candidate], home: str) -> list[Verdict]:
        """Verdicts on `candidates`, filled and looked at on the device `home`."""
        started = time.perf_counter()
        batch = Batch(
            self.kernel,
            candidates,
            device=self.device,
            home=home,
            tolerance=self.tolerance,
            twice=self._runs_twice,
            compile_clock=self.compile_clock,
        )
        try:
            batch.launch()
            batch.expect()
            verdicts = [self._of_case(batch, i, found) for i, found in enumerate(batch.checks())]
        except torch.OutOfMemoryError as error:  # a kernel's own, or for want of what other cases hold
            raise BatchLost(text_of(error).strip().partition("\n")[0]) from error
        except RuntimeError as error:
            if (lost := context_lost(error)) is not None:
                raise BatchLost(lost) from error
            raise
        shared_s = time.perf_counter() - started - sum(verdict.timing.total_s for verdict in verdicts)
        share = Timing(total_s=shared_s / len(candidates))
        return [msgspec.structs.replace(verdict, timing=verdict.timing + share) for verdict in verdicts]

    def _of_case(self, batch: Batch, case: int, found: RunChecks | KernelRaised) -> Verdict:
        """The verdict on a case of a batch; only one that a look at its runs does not settle has a trial."""
        started = time.perf_counter()
        candidate = batch.candidates[case]
        if isinstance(found, KernelRaised):
            verdict = self._raised(found)
        elif any(found.damaged):  # perhaps by another case, whose memory lies beside
            verdict = self.alone(candidate.case)
        elif found.any() or candidate.guard is not None or batch.asked[case] or self._own_oracles:
            verdict = self._of_trial(batch.trial(case), batch.relations(case))
            batch.drop_trial(case)
        else:
            return Verdict(error_ratio=found.error_ratio, timing=batch.timing(case))
        launched = batch.timing(case)
        timing = launched + verdict.timing
        total_s = launched.total_s + time.perf_counter() - started
        return msgspec.structs.replace(_survived(verdict), timing=msgspec.structs.replace(timing, total_s=total_s))


def _compares_runs(oracle: OracleName) -> bool:
    return oracle_of(oracle).compares_runs


def _after(verdict: Verdict, relation: OracleName, failure: Failure | None) -> Verdict:
    """`verdict` once `relation` has had its word, an objection or none."""
    related = (*verdict.related, relation)
    failure = verdict.failure if failure is None else failure
    return msgspec.structs.replace(verdict, failure=failure, related=related)


def _lacks_lse(verdict: Verdict, trial: Trial) -> bool:
    """Whether the `verdict` on `trial` is no more than that the kernel never writes its LSE."""
    failure = verdict.failure
    if failure is None or failure.oracle != registry.UNWRITTEN.name or failure.tensor not in ("lse", "output_lse"):
        return False
    return unwritten.lacks_lse(trial)


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
