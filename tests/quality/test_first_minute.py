"""tests.quality.first_minute: the table of what a person sees first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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
