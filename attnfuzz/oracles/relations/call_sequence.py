"""The same call again after other calls: the same bits. And the other calls in turn do not depend on this one.

Kernels keep things between calls: workspaces that grow, plans and launch settings by shape, counters. One call, or the
same call twice, tells nothing of what is left over from another one with more tokens or other rows.
"""

from __future__ import annotations

import msgspec

from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.oracles import accuracy
from attnfuzz.oracles.observation import KernelRaised
from attnfuzz.oracles.relations.fresh_copy import fresh_copy
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.oracles.relations.relatives import Relative, relatives_of
from attnfuzz.oracles.relations.transformed import Changed, as_it_is, results_of, unequal_bits
from attnfuzz.oracles.trial import Trial
from attnfuzz.oracles.verdict import Failure, OracleName
from attnfuzz.problems.cases import Case

__all__ = ["CALL_SEQUENCE"]

_NAME: OracleName = "call_sequence"
_REASONS = "the result depends on an earlier call: a workspace not cleared, a cache keyed by too little, a counter"


def _applies(declaration: Declaration, case: Case) -> bool:
    del case
    return declaration.supports.deterministic


def _check(trial: Trial) -> Failure | None:
    for relative in relatives_of(trial.kernel.declaration, trial.case):
        failure = _of_relative(trial, relative) or _again(trial, relative)
        if failure is not None:
            return failure
    return None


def _of_relative(trial: Trial, relative: Relative) -> Failure | None:
    """The call of another case right after this one: wrong, and right in a fresh copy of the kernel."""
    failure = _judged(trial, trial.kernel, relative)
    if failure is None:
        return None
    fresh = fresh_copy(trial.kernel)
    if fresh is None or _judged(trial, fresh, relative) is not None:
        return None  # it is wrong by itself, or nobody can tell
    return msgspec.structs.replace(
        failure,
        oracle=_NAME,
        kind=f"next call: {failure.kind}",
        message=f"{relative.words} after this case gives {failure.message}; before any other call it is right",
        details=(*failure.details, _REASONS),
    )


def _judged(trial: Trial, kernel: Kernel, relative: Relative) -> Failure | None:
    other = Trial(
        kernel,
        relative.case,
        device=trial.device,
        tolerance=trial.reference.tolerance,
        twice=False,
        compile_clock=trial.compile_clock,
    )
    try:
        failure = accuracy.check(other)
    except KernelRaised as raised:
        name = type(raised.error).__name__
        return Failure(oracle="exception", kind=name, message=f"{name}: {str(raised.error).partition(chr(10))[0]}")
    trial.observations.extend(other.observations)
    return failure


def _again(trial: Trial, relative: Relative) -> Failure | None:
    """The call of this case after that of another one."""
    words = f"after {relative.words}"
    values = trial.reference.values_on(trial.device)
    found = results_of(trial, Changed(words, trial.case, values))
    details = (_REASONS,)
    return unequal_bits(_NAME, trial.case, as_it_is(trial), found, words, details=details, as_it_was="at first")


CALL_SEQUENCE = Relation("call_sequence", _applies, _check)
