"""Explanations name what the planted bugs get wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnfuzz.campaign.triage.explanation import explain_failure
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import KNOWN, oracle_of
from attnfuzz.problems.cases import decode_case
from attnfuzz.verdict import Failure
from tests.quality.explanations import EXPLANATIONS, Expectation
from tests.quality.mutants import mutant_named
from tests.quality.planting import plant

SAID_BY_THE_VERDICT = {"crash", "exception", "guard_page", "hang", "red_zone"} | {
    one.name for one in KNOWN.values() if one.is_relation
}
"""Failures about more than weights: the oracle's own sentence is the best that there is to say."""
LEAST_SHARE = 0.9
WEIGHING_S = 60.0
TOTAL_S = 90.0

NAMED = sorted(name for name, expectation in EXPLANATIONS.items() if expectation.names)


def explained(name: str, expectation: Expectation, runner: Runner, folder: Path) -> list[str]:
    """What is told of the mutant's case, and all lines on it; of a crash or a hang also what makes it pass."""
    (declaration,) = runner.declarations([plant(mutant_named(name), folder)])
    case = decode_case(declaration.problem, expectation.case.encode())
    relations = oracle_of(expectation.oracle).relations
    failure = runner.judge(declaration, case, relations=relations).failure
    assert isinstance(failure, Failure)
    total_s = TOTAL_S if expectation.oracle in SAID_BY_THE_VERDICT else 0.0
    found = explain_failure(runner, declaration, case, failure, weighing_s=WEIGHING_S, total_s=total_s)
    return [(found.told or failure).message, *found.all_lines]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.by_day(
    "block_table_row_stride",
    "empty_split_finite_lse",
    "merge_both_empty",
    "merge_prefix_strides_for_suffix",
    "v_not_masked",
)
def test_the_explanation_names_what_is_wrong(name: str, runner: Runner, tmp_path: Path) -> None:
    """Whoever has to repair the kernel would be sent to the wrong token, page, head or tensor, or nowhere."""
    expectation = EXPLANATIONS[name]
    lines = explained(name, expectation, runner, tmp_path)
    assert any(re.search(expectation.names, line) for line in lines), "\n".join(lines)


def test_nine_of_ten_are_named() -> None:
    """Explanations would be right about a chosen few."""
    applicable = [name for name, expectation in EXPLANATIONS.items() if not expectation.nothing]
    assert len(NAMED) / len(applicable) >= LEAST_SHARE
    assert all(sum(map(bool, (e.names, e.nothing, e.missed))) == 1 for e in EXPLANATIONS.values())
