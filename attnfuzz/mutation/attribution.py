"""Which oracles see the case that killed a mutant, each asked alone."""

from __future__ import annotations

from collections.abc import Sequence

from attnfuzz.declaration import Declaration
from attnfuzz.isolation.outcomes import ServiceError
from attnfuzz.judging.runner import Runner
from attnfuzz.mutation.outcomes import Kill
from attnfuzz.oracles.verdict import RELATION_ORACLES, OracleName, Relations
from attnfuzz.problems.cases import Case, decode_case
from attnfuzz.problems.limits import CaseTooLarge

__all__ = ["oracles_that_see", "seen_by"]

_DEATHS = ("crash", "hang")
_SECOND_RUN: tuple[OracleName, ...] = ("determinism",)
"""Asked beside the oracles of deaths: a kernel may die in the second run, which these alone would not have."""


def seen_by(
    runner: Runner, kernels: Sequence[Declaration], kill: Kill, oracles: Sequence[OracleName]
) -> tuple[OracleName, ...]:
    """The oracles of ``oracles`` that see the case of a kill of one of ``kernels``.

    Nothing but the hang is to be seen of a case that hangs, and each oracle would wait for it.
    """
    if kill.by == "hang":
        return ("hang",)
    declaration = next(one for one in kernels if one.target == kill.kernel)
    case = decode_case(declaration.problem, bytes(kill.case))
    seen = {kill.by, *oracles_that_see(runner, declaration, case, oracles)}
    return tuple(oracle for oracle in oracles if oracle in seen)


def oracles_that_see(
    runner: Runner, declaration: Declaration, case: Case, oracles: Sequence[OracleName]
) -> tuple[OracleName, ...]:
    """Those of ``oracles`` that object to ``case`` when no other is asked; ``runner`` asks all of them afterwards."""
    found: list[OracleName] = []
    before = runner.oracles
    try:
        for oracle in oracles:
            relations: Relations = (oracle,) if oracle in RELATION_ORACLES else ()
            runner.oracles = (oracle, *_SECOND_RUN) if oracle in _DEATHS else (oracle,)
            if _objecting(runner, declaration, case, relations) == oracle:
                found.append(oracle)
    finally:
        runner.oracles = before
    return tuple(found)


def _objecting(runner: Runner, declaration: Declaration, case: Case, relations: Relations) -> OracleName | None:
    try:
        failure = runner.judge(declaration, case, relations=relations).failure
    except (ServiceError, CaseTooLarge):  # nothing is known of the kernel then
        return None
    return None if failure is None else failure.oracle
