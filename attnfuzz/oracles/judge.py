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
    catch_interrupt: bool = False,
) -> Verdict:
    """Run `kernel` on `case` in this process, twice if nothing fails, and apply `oracles`.

    `device`: "cpu" or "cuda". A crash or hang ends or blocks this process; `attnfuzz.execution.runner` survives both.
    The verdict's `fatal` says that the process must not use the GPU again. With `catch_interrupt` a KeyboardInterrupt
    is the kernel's own doing, as it is where no keyboard can reach. Raises `CaseTooLarge` if the case needs more than
    `size_limit` bytes, and `EnvironmentProblem` where the installed libraries cannot run any kernel.
    """
    started = time.perf_counter()
    check_size(case, size_limit)
    twice = not _NEED_TWO_RUNS.isdisjoint(oracles)
    trial = Trial(kernel, case, device=device, tolerance=tolerance, twice=twice)
    verdict = _verdict(trial, oracles, catch_interrupt=catch_interrupt)
    return msgspec.structs.replace(verdict, timing=_timing(trial, time.perf_counter() - started))


def _verdict(trial: Trial, oracles: Sequence[OracleName], *, catch_interrupt: bool) -> Verdict:
    try:
        failures = (check(trial) for name, check in _BY_SPECIFICITY.items() if name in oracles)
        failure = next(filter(None, failures), None)
        return Verdict(failure=failure, error_ratio=trial.symptoms.error_ratio)
    except KernelRaised as raised:
        if isinstance(raised.error, KeyboardInterrupt) and not catch_interrupt:
            raise raised.error from None
        return exception.verdict(raised, oracles)


def _timing(trial: Trial, total_s: float) -> Timing:
    return Timing(
        build_s=sum(seen.build_s for seen in trial.observations),
        kernel_s=sum(seen.kernel_s for seen in trial.observations),
        reference_s=trial.reference.seconds,
        total_s=total_s,
    )
