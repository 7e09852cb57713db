"""The verdict on one case: every oracle asked for, the most specific cause first."""

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from attnfuzz.declaration import Kernel
from attnfuzz.judging.observation import KernelRaised
from attnfuzz.judging.trial import Trial
from attnfuzz.oracles import accuracy, dead_memory, determinism, exception, red_zone, unwritten
from attnfuzz.oracles.relations.catalogue import chosen
from attnfuzz.oracles.relations.guard_page import GUARD_PAGE, guard_of
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.oracles.verdict import DEFAULT_ORACLES, Failure, OracleName, Relations, Timing, Verdict
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import DEFAULT_LIMIT_BYTES, check_size
from attnfuzz.problems.tolerance import Tolerance

__all__ = [
    "judge",
    "judge_raised",
    "judge_relation",
    "judge_relations",
    "judge_trial",
    "judge_unguarded",
    "lacks_lse",
    "needs_two_runs",
    "relation_raised",
    "with_timing",
]

Oracle = Callable[[Trial], Failure | None]

_BY_SPECIFICITY: Mapping[OracleName, Oracle] = {
    "red_zone": red_zone.check,
    "unwritten": unwritten.check,
    "dead_memory": dead_memory.check,
    "determinism": determinism.check,
    "accuracy": accuracy.check,
}
_NEED_TWO_RUNS: frozenset[OracleName] = frozenset({"red_zone", "unwritten", "dead_memory", "determinism"})


def judge(
    kernel: Kernel,
    case: Case,
    *,
    device: str,
    oracles: Sequence[OracleName] = DEFAULT_ORACLES,
    tolerance: Tolerance = "bound",
    size_limit: int = DEFAULT_LIMIT_BYTES,
    thorough: bool = True,
    relations: Relations = None,
    catch_interrupt: bool = False,
    compile_clock: Callable[[], float] = lambda: 0.0,
) -> Verdict:
    """Run `kernel` on `case` in this process, twice if nothing fails, and apply `oracles`.

    `relations`: which of them, among `oracles`, have a word on a case that passes otherwise.

    Without `thorough` a first run that is right in every respect is believed, at half the price: missed are results
    that are nondeterministic, or depend on dead memory, and yet are right where that memory holds NaN.

    `device`: "cpu" or "cuda". A crash or hang ends or blocks this process; `attnfuzz.judging.runner` survives both.
    The verdict's `fatal` says that the process must not use the GPU again. With `catch_interrupt` a KeyboardInterrupt
    is the kernel's own doing, as it is where no keyboard can reach. `compile_clock`: see `observe`. Raises
    `CaseTooLarge` if the case needs more than `size_limit` bytes, and `EnvironmentProblem` where the installed
    libraries cannot run any kernel.
    """
    started = time.perf_counter()
    check_size(case, size_limit)
    guard = guard_of(kernel.declaration, case, oracles, relations, device=device) if thorough else None
    trial = Trial(
        kernel,
        case,
        device=device,
        tolerance=tolerance,
        twice=(needs_two_runs(oracles) and thorough) or guard is not None,
        guard=guard,
        compile_clock=compile_clock,
    )
    try:
        verdict = judge_trial(trial, oracles)
        if verdict.failure is None:
            verdict = judge_unguarded(verdict, trial, catch_interrupt=catch_interrupt)
        if verdict.failure is None or lacks_lse(verdict, trial):
            output = trial if verdict.failure is None else trial.without_lse()
            verdict = judge_relations(verdict, output, oracles, relations, catch_interrupt=catch_interrupt)
    except KernelRaised as raised:
        verdict = judge_raised(raised, oracles, catch_interrupt=catch_interrupt)
    return with_timing(verdict, trial, time.perf_counter() - started)


def needs_two_runs(oracles: Sequence[OracleName]) -> bool:
    """Whether one of `oracles` compares runs."""
    return not _NEED_TWO_RUNS.isdisjoint(oracles)


def judge_trial(trial: Trial, oracles: Sequence[OracleName]) -> Verdict:
    """What `oracles` say of the runs of `trial`, and of further ones where there are symptoms.

    A kernel that never writes its LSE has one complaint in every case: what is wrong with its output goes before it.
    Raises `KernelRaised` if a run ends that way.
    """
    if not trial.twice and needs_two_runs(oracles) and trial.symptoms.any():
        trial.look_closer()
    failure = _most_specific(trial, oracles)
    if failure is not None and failure.oracle == "unwritten" and unwritten.lacks_lse(trial):
        failure = _most_specific(trial.without_lse(), oracles) or failure
    return Verdict(failure=failure, error_ratio=trial.symptoms.error_ratio)


def lacks_lse(verdict: Verdict, trial: Trial) -> bool:
    """Whether the `verdict` on `trial` is no more than that the kernel never writes its LSE."""
    failure = verdict.failure
    if failure is None or failure.oracle != "unwritten" or failure.kind not in ("lse", "output_lse"):
        return False
    return unwritten.lacks_lse(trial)


def _most_specific(trial: Trial, oracles: Sequence[OracleName]) -> Failure | None:
    failures = (check(trial) for name, check in _BY_SPECIFICITY.items() if name in oracles)
    return next(filter(None, failures), None)


def judge_unguarded(verdict: Verdict, trial: Trial, *, catch_interrupt: bool) -> Verdict:
    """`verdict`, that of all oracles on a case that passed, or that of guard_page on one whose first run was not right.

    For that, of which no oracle asked for has a word, its second run was not guarded.
    """
    if trial.guard is None or not trial.alone.any():
        return verdict
    return judge_relation(verdict, trial, GUARD_PAGE, catch_interrupt=catch_interrupt)


def judge_relations(
    verdict: Verdict, trial: Trial, oracles: Sequence[OracleName], relations: Relations, *, catch_interrupt: bool
) -> Verdict:
    """`verdict`, that of all other oracles, or that of the first of `relations` that objects to the case.

    It passed, or lacks but an LSE, and `trial` has none.
    """
    for relation in chosen(trial.kernel.declaration, trial.case, oracles, relations, device=trial.device):
        found = judge_relation(verdict, trial, relation, catch_interrupt=catch_interrupt)
        if found is not verdict:
            return found
    return verdict


def judge_relation(verdict: Verdict, trial: Trial, relation: Relation, *, catch_interrupt: bool) -> Verdict:
    """As `judge_relations`, of a single one."""
    try:
        failure = relation.check(trial)
    except KernelRaised as raised:
        found = relation_raised(relation.name, raised, catch_interrupt=catch_interrupt)
        return msgspec.structs.replace(found, error_ratio=verdict.error_ratio)
    return verdict if failure is None else msgspec.structs.replace(verdict, failure=failure)


def relation_raised(relation: OracleName, raised: KernelRaised, *, catch_interrupt: bool) -> Verdict:
    """An objection of `relation`: by itself the case does not raise. Memory may run out where a relation takes more."""
    found = judge_raised(raised, ("exception", "crash"), catch_interrupt=catch_interrupt)
    if found.failure is None or raised.is_a(torch.OutOfMemoryError):
        return msgspec.structs.replace(found, failure=None, not_runnable="")
    changed = f"{raised.changed}: " if raised.changed else ""
    failure = msgspec.structs.replace(
        found.failure,
        oracle=relation,
        kind=f"raised {found.failure.kind}",
        message=f"{changed}{found.failure.message}",
        maybe=raised.maybe,
    )
    return msgspec.structs.replace(found, failure=failure)


def judge_raised(raised: KernelRaised, oracles: Sequence[OracleName], *, catch_interrupt: bool) -> Verdict:
    """What it means that a run `raised`; a KeyboardInterrupt is passed on unless told to catch it."""
    if raised.is_a(KeyboardInterrupt) and not catch_interrupt:
        raise raised.error from None
    return exception.verdict(raised, oracles)


def with_timing(verdict: Verdict, trial: Trial, total_s: float) -> Verdict:
    """`verdict` with the time that the parts of `trial` took, and `total_s` for all of it."""
    return msgspec.structs.replace(verdict, timing=_timing(trial, total_s))


def _timing(trial: Trial, total_s: float) -> Timing:
    return Timing(
        build_s=sum(seen.build_s for seen in trial.observations),
        compile_s=sum(seen.compile_s for seen in trial.observations),
        kernel_s=sum(seen.kernel_s for seen in trial.observations),
        reference_s=trial.reference.seconds,
        total_s=total_s,
    )
