"""What a newcomer is told of a kernel that declares nothing, and of its bug."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plain.one_line_bugs import BUGS, OneLineBug, findings, source_with
from tests.plain.pairs import PAIRS, Pair, explore


@pytest.mark.night
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.correct)
def test_a_plain_kernel_is_silent_and_its_bug_is_one_finding(pair: Pair, tmp_path: Path) -> None:
    """The first report would be about nothing that an engine does, or tell one bug several times."""
    targets = [f"{pair.file}:{name}" for name in (pair.correct, pair.wrong)]
    told, printed = explore(tmp_path, *targets, budget="60s", options=("--fail-fast", "--seed", "1"))
    right, wrong = told[pair.correct], told[pair.wrong]
    assert not right.counted, printed
    assert right.cases, printed
    (found,) = wrong.findings
    assert found["in_contract"], printed
    assert pair.says in printed, printed
    assert right.inferred == pair.supports
    assert (wrong.inferred or "nothing") == (pair.wrong_supports or pair.supports)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_kernel_of_the_first_page_can_have_each_bug(bug: OneLineBug) -> None:
    """The table of what a newcomer is told would be of other kernels than it says."""
    compile(source_with(*bug.edits), "my_decode.py", "exec")


@pytest.mark.night
@pytest.mark.parametrize("bug", [BUGS[0], BUGS[4], BUGS[8], BUGS[11]], ids=lambda bug: bug.name)
def test_a_bug_of_one_line_is_one_finding(bug: OneLineBug) -> None:
    """A newcomer would read of one mistake three times, twice with another cause."""
    number, printed = findings(bug, budget="25s", seed=1)
    assert number == 1, printed
    assert re.search(bug.says, printed.partition("\n1. ")[2]), printed
