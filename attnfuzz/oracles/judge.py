"""The verdict on one case: every oracle asked for, the most specific cause first."""

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from attnfuzz.declaration import Kernel
from attnfuzz.oracles import accuracy, dead_memory, determinism, exception, red_zone, unwritten
from attnfuzz.oracles.observation import KernelRaised
from attnfuzz.oracles.trial import Trial
from attnfuzz.oracles.verdict import DEFAULT_ORACLES, Failure, OracleName, Timing, Verdict
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import DEFAULT_LIMIT_BYTES, check_size
from attnfuzz.problems.tolerance import Tolerance

__all__ = ["judge"]

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
    catch_interrupt: bool = False,
) -> Verdict:
    """Run `kernel` on `case` in this process, twice if nothing fails, and apply `oracles`.

    Without `thorough` a first run that is right in every respect is believed, at half the price: missed are results
    that are nondeterministic, or depend on dead memory, and yet are right where that memory holds NaN.

    `device`: "cpu" or "cuda". A crash or hang ends or blocks this process; `attnfuzz.execution.runner` survives both.
    The verdict's `fatal` says that the process must not use the GPU again. With `catch_interrupt` a KeyboardInterrupt
    is the kernel's own doing, as it is where no keyboard can reach. Raises `CaseTooLarge` if the case needs more than
    `size_limit` bytes, and `EnvironmentProblem` where the installed libraries cannot run any kernel.
    """
    started = time.perf_counter()
    check_size(case, size_limit)
    compares_runs = not _NEED_TWO_RUNS.isdisjoint(oracles)
    trial = Trial(kernel, case, device=device, tolerance=tolerance, twice=compares_runs and thorough)
    try:
        if compares_runs and not thorough and trial.symptoms.any():
            trial.look_closer()
        verdict = _verdict(trial, oracles)
    except KernelRaised as raised:
        if isinstance(raised.error, KeyboardInterrupt) and not catch_interrupt:
            raise raised.error from None
        verdict = exception.verdict(raised, oracles)
    return msgspec.structs.replace(verdict, timing=_timing(trial, time.perf_counter() - started))


def _verdict(trial: Trial, oracles: Sequence[OracleName]) -> Verdict:
    failures = (check(trial) for name, check in _BY_SPECIFICITY.items() if name in oracles)
    return Verdict(failure=next(filter(None, failures), None), error_ratio=trial.symptoms.error_ratio)


def _timing(trial: Trial, total_s: float) -> Timing:
    return Timing(
        build_s=sum(seen.build_s for seen in trial.observations),
        kernel_s=sum(seen.kernel_s for seen in trial.observations),
        reference_s=trial.reference.seconds,
        total_s=total_s,
    )
