"""The whole explanation of a failing case: what its runs tell, and which changes make it pass."""

from __future__ import annotations

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.execution.runner import Runner
from attnfuzz.explaining.ablation import ablate
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.oracles.verdict import RELATION_ORACLES, Failure
from attnfuzz.problems.cases import Case

__all__ = ["explain_failure"]


def explain_failure(
    runner: Runner, declaration: Declaration, case: Case, failure: Failure, *, seconds: float, until: float
) -> Explanation:
    """What is wrong with ``case``, which ``failure`` is about; at most so many ``seconds`` on weights.

    Changes of the case are tried ``until`` then (of ``time.monotonic``). Raises what ``Runner.judge`` raises.
    """
    found = runner.explain(declaration, case, seconds=seconds, oracle=failure.oracle)
    relations = (failure.oracle,) if failure.oracle in RELATION_ORACLES else ()

    def fails(changed: Case) -> bool:
        return runner.judge(declaration, changed, relations=relations).failure is not None

    changes = ablate(case, fails, supports=declaration.supports, options=declaration.options, until=until)
    return msgspec.structs.replace(found, changes=changes)
