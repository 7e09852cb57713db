"""The measuring commands of tests/quality: each runs, and prints what it says."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import cast

import msgspec
import pytest

from attnfuzz.declaration import Declaration
from attnfuzz.judging.runner import Runner
from attnfuzz.mutation.mutants import Kill
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName
from attnfuzz.problems.cases import MergeStatesCase, encode_case
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.verdict import Failure, Verdict
from tests.quality.alone import Told, page, seen_by
from tests.quality.designs import drawn_of
from tests.quality.first_minute import (
    FirstMinute,
    Measured,
    MinuteSummary,
    Row,
    measure_first_minute,
    rows,
    table,
    turns,
)
from tests.quality.hidden import SIZES, hidden
from tests.quality.identity import KERNELS, Outcome, both_empty, campaign, low_states, rules
from tests.quality.mutants import MUTANTS
from tests.quality.reach import KINDS, Kind, Wanted, explore, wanted_on
from tests.quality.tightness import MISTAKES, Mistake, cases_needed, shares


def _campaign(cases: int, wall_s: float) -> FirstMinute:
    return FirstMinute(1.0, wall_s, MinuteSummary(cases, "a GPU", (), 2.0, cases // 2, 0.5))


def test_what_could_not_run_has_no_figures() -> None:
    """A tree that does not start would look like one that is quick and finds nothing."""
    row = Row("planted", [["a"], ["b"], ["c"]], 10)
    campaigns = [_campaign(300, 10.0), _campaign(100, 30.0)]
    line = table([Measured(row, "after", campaigns, ["c: no such kernel"]), Measured(row, "before", [])]).splitlines()
    assert line[2] == "| planted | after | 1.0 s | 2.0 s | none | none | 0 of 3 | 200 | 10 | 50 % | 20.0 s, 10 s |"
    assert line[3] == "| planted | before | none | none | none | none | 0 of 3 | 0 | - | - | none, 10 s |"


def test_what_is_told_of_four_minutes_is_four_minutes_of_both_trees() -> None:
    """Cases of a minute would be compared with those of four."""
    chosen = rows([], [], quick=False)
    budgets = {(row.name, tree): row.budget_s for row, trees in turns(chosen, ["before", "after"]) for tree in trees}
    assert budgets["all bundled kernels, four minutes", "before"] == 232
    assert budgets["all bundled kernels, four minutes", "after"] == 232
    assert budgets["all bundled kernels", "before"] == 52


COMMAND = """
import json, sys
from pathlib import Path
print("asking", flush=True)
finding = {"cause": "crash", "first_seen_s": 2.5, "shrunk_s": None, "in_contract": True}
kernels = [{"target": "k.py:k", "findings": [finding, {**finding, "in_contract": False, "first_seen_s": 1.0}]}]
written = Path(sys.argv[sys.argv.index("--json") + 1])
written.write_text(json.dumps({"cases": 90, "device": "a GPU", "kernels": kernels}))
sys.exit(1)
"""


def test_a_command_is_timed_and_its_findings_read(tmp_path: Path) -> None:
    """What is possibly out of contract would count as a bug that was found first."""
    (tmp_path / "explore.py").write_text(COMMAND)
    measured = measure_first_minute(["k.py"], [sys.executable, str(tmp_path / "explore.py")])
    assert measured.first_line_s is not None
    assert 0 < measured.first_line_s <= measured.wall_s
    assert list(measured.found) == [(2.5, None, "k.py:k", "crash")]


def test_a_command_that_does_not_run_says_why(tmp_path: Path) -> None:
    """A misspelt kernel would look like a campaign without cases."""
    (tmp_path / "explore.py").write_text("print('no such kernel'); raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="status 3: no such kernel"):
        measure_first_minute(["k.py"], [sys.executable, str(tmp_path / "explore.py")])


@pytest.mark.parametrize("name", ["paged_split_k", "paged_attention_segments"])
@pytest.mark.by_day("paged_split_k")
def test_few_drawn_cases_hide_a_doubled_output(name: str) -> None:
    """A search would spend its time on cases whose bound lets anything pass."""
    found = [is_hidden for _, is_hidden in hidden(name, SIZES["CPU"], 200)]
    assert len(found) > 100
    assert sum(found) <= 1


def test_every_rule_can_be_switched_off() -> None:
    """The table of the night would end in the middle once a rule has another name."""
    for rule in rules():
        with rule.off():
            assert getattr(rule.owner, rule.attribute) is rule.instead
        assert getattr(rule.owner, rule.attribute) is not rule.instead


def test_told_and_missed_are_counted() -> None:
    """A rule that loses bugs would look like one that tells them once."""
    declaration, _ = KERNELS[MergeStatesCase]
    assert campaign(declaration, (low_states,), 300) == Outcome(bugs=1, told=1, missed=0)
    assert campaign(declaration, (low_states, both_empty), 1).missed == 0


_BUDGET_S = 120
"""On a machine that does nothing else a third of it is enough."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.name))
def test_each_kind_has_bugs_and_a_right_kernel(kind: Kind) -> None:
    """A pattern that fits nothing any more would pass for bugs that are found."""
    of_kind = [one for one in (*wanted_on("cpu"), *wanted_on("cuda")) if one.kind == kind.name]
    assert len({one.target for one in of_kind if not one.is_right}) >= 2
    assert any(one.is_right for one in of_kind)


@pytest.mark.night
@pytest.mark.parametrize("wanted", [*wanted_on("cpu")], ids=lambda one: str(one.target).rpartition(":")[2])
def test_what_is_rare_is_met_and_right_kernels_are_silent(wanted: Wanted) -> None:
    """Draws would no longer reach what they were made to reach, or accuse who is right there."""
    found = explore(wanted, budget_s=_BUDGET_S, seed=1)
    assert found.is_as_it_should_be, found.row


CASES = 12


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_share_is_counted_of_a_right_kernel(dtype: str) -> None:
    """Every share would be that of cases whose bound is too small."""
    assert shares(Mistake("right", ""), drawn_of(dtype, CASES), Numerics()) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["scale + 1 %", "last token dropped"])
def test_mistakes_show_in_some_of_few_drawn_cases(name: str) -> None:
    """Bounds would be so wide, or cases such, that a search needs hours for a plain mistake."""
    mistake = next(one for one in MISTAKES if one.name == name)
    assert max(shares(mistake, drawn_of("bfloat16", CASES), Numerics())) >= 0.25


def test_how_many_cases_a_search_needs() -> None:
    """A bug in one of a hundred cases would be told to be found by the hundredth."""
    assert [cases_needed(share) for share in (1.0, 0.9, 0.5, 0.01)] == [1, 1, 4, 230]
    assert cases_needed(0.0) == math.inf


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
