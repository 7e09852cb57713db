"""attnfuzz.mutation.hunting: which oracles see a case."""

from __future__ import annotations

from typing import cast

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.judging.runner import Runner
from attnfuzz.mutation.hunting import seen_by
from attnfuzz.mutation.outcomes import Kill
from attnfuzz.oracles.verdict import DEFAULT_ORACLES, Failure, OracleName, Verdict
from attnfuzz.problems.cases import MergeStatesCase, encode_case

CASE = MergeStatesCase(num_q_heads=1, head_size=8, num_tokens=1)
DECLARATION = Declaration(name="kernel", problem="merge_states")


class Executor:
    """In place of a runner: a wrong number, and more if asked for relations."""

    def __init__(self) -> None:
        self.oracles: tuple[OracleName, ...] = DEFAULT_ORACLES
        self.runs = 0

    def judge(self, declaration: Declaration, case: object, *, relations: tuple[OracleName, ...]) -> Verdict:
        del declaration, case
        self.runs += 1
        seen = [name for name in self.oracles if name in ("accuracy", "merge_laws")]
        del relations
        return Verdict(failure=Failure(oracle=seen[0], kind="out", message="out is wrong")) if seen else Verdict()


def found(executor: Executor, by: OracleName) -> tuple[OracleName, ...]:
    kill = Kill(by=by, seconds=1.0, kernel=DECLARATION.target, case=msgspec.Raw(encode_case(CASE)))
    return seen_by(cast(Runner, executor), [DECLARATION], kill, DEFAULT_ORACLES)


def test_each_oracle_is_asked_alone() -> None:
    """The one that comes first would have the merit of all."""
    executor = Executor()
    assert found(executor, "dead_memory") == tuple(
        name for name in DEFAULT_ORACLES if name in ("accuracy", "dead_memory", "merge_laws")
    )
    assert executor.oracles == DEFAULT_ORACLES


def test_a_hang_is_not_waited_for_by_each_oracle() -> None:
    """A mutant that never ends would take ten minutes where it may take half of one."""
    executor = Executor()
    assert found(executor, "hang") == ("hang",)
    assert executor.runs == 0
