"""What a newcomer is told of a kernel that declares nothing, and of its bug."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plain.pairs import PAIRS, Pair, explore


@pytest.mark.night
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.correct)
def test_a_plain_kernel_is_silent_and_its_bug_is_one_finding(pair: Pair, tmp_path: Path) -> None:
    """The first report would be about nothing that an engine does, or tell one bug several times."""
    targets = [f"{pair.file}:{name}" for name in (pair.correct, pair.wrong)]
    told, printed = explore(tmp_path, *targets, budget="60s", options=("--fail-fast", "--seed", "1"))
    right, wrong = told[pair.correct], told[pair.wrong]
    assert not right.findings, printed
    assert right.cases, printed
    (found,) = wrong.findings
    assert found["in_contract"], printed
    assert pair.says in printed, printed
    assert right.inferred == pair.supports
    assert (wrong.inferred or "nothing") == (pair.wrong_supports or pair.supports)
