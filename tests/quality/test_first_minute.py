"""tests.quality.first_minute: the table of what a person sees first."""

from __future__ import annotations

from attnfuzz.bench.first_minute import FirstMinute, MinuteSummary
from tests.quality.first_minute import Measured, Row, rows, table, turns


def _campaign(cases: int, wall_s: float) -> FirstMinute:
    return FirstMinute(False, 1.0, wall_s, MinuteSummary(cases, "a GPU", (), 2.0, cases // 2, 0.5))


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
