"""The table of what each oracle adds."""

from __future__ import annotations

from typing import cast

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.judging.runner import Runner
from attnfuzz.mutation.mutants import Kill
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName
from attnfuzz.problems.cases import MergeStatesCase, encode_case
from attnfuzz.verdict import Failure, Verdict
from tests.quality.alone import Told, page, seen_by
from tests.quality.mutants import MUTANTS


class Executor:
    """In place of a runner: a wrong number, which two oracles see."""

    def __init__(self) -> None:
        self.oracles: tuple[OracleName, ...] = DEFAULT_ORACLES
        self.runs = 0

    def judge(self, declaration: Declaration, case: object, *, relations: tuple[OracleName, ...]) -> Verdict:
        del declaration, case, relations
        self.runs += 1
        seen = [name for name in self.oracles if name in ("accuracy", "merge_laws")]
        return Verdict(failure=Failure(oracle=seen[0], kind="out", message="out is wrong")) if seen else Verdict()


def test_each_oracle_is_asked_by_itself() -> None:
    """The one that comes first would have the merit of all, and each would wait for a hang."""
    executor, case = Executor(), MergeStatesCase(num_q_heads=1, head_size=8, num_tokens=1)
    for by, found in (("dead_memory", {"accuracy", "dead_memory", "merge_laws"}), ("hang", {"hang"})):
        executor.runs = 0
        kill = Kill(by=by, seconds=1.0, case=msgspec.Raw(encode_case(case)))
        told = seen_by(cast(Runner, executor), Declaration(name="kernel", problem="merge_states"), kill)
        assert (set(told), executor.runs == 0) == (found, by == "hang")


def told(number: int, by: OracleName, *others: OracleName, alone: bool = False) -> Told:
    return Told(MUTANTS[number], Kill(by=by, seconds=1.0), (by, *others), alone)


def test_only_what_nothing_else_finds_counts_for_an_oracle_alone() -> None:
    """An oracle that another one stands in for would look indispensable, or one that nothing replaces idle."""
    outcomes = (
        told(0, "page_relocation", alone=True),
        told(1, "accuracy"),  # other cases showed it to another oracle
        told(2, "dead_memory", "accuracy"),
        Told(MUTANTS[3]),
    )
    lines = list(page(outcomes))
    assert "| page_relocation | 1 | 1 | 1 | 1 |" in lines
    assert "| accuracy | 1 | 2 | 1 | 0 |" in lines
    assert "| dead_memory | 1 | 1 | 0 | 0 |" in lines
    assert [line for line in lines if line.endswith("| page_relocation |")] == [
        f"| {MUTANTS[0].name}: {MUTANTS[0].bug} | page_relocation |"
    ]
    assert "No planted bug shows to " in "".join(lines)
    assert lines[-1] == f"Not found: {MUTANTS[3].name}."
