"""What a strategy gives, one draw after the other, the same in each run."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from attnfuzz.campaign.draw.sampling import run_round
from attnfuzz.problems.cases import Problem
from attnfuzz.strategies import case_lists

_TOGETHER = 20


def drawn_from(strategy: st.SearchStrategy[Any], draws: int = 400) -> list[Any]:
    found: list[Any] = []

    @settings(
        max_examples=draws,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def drawn_cases(problem: Problem, draws: int = 400, *, seed: int = 1, **limits: Any) -> list[Any]:
    """Cases as a search draws them: lists of them, which take a third of the time."""
    found: list[Any] = []

    def visit(cases: list[Any]) -> bool:
        found.extend(cases)
        return len(found) < _TOGETHER + draws

    run_round(case_lists(problem, length=_TOGETHER, **limits), visit, seed_value=seed, until=math.inf, max_draws=draws)
    return found[_TOGETHER:][:draws]  # Hypothesis begins with a list of the simplest
