"""Planted bugs are found in time, shrunk to the boundary that triggers them, and absent from the correct kernel.

One or two of every kind are hunted to the end here, the others only found; all of them are hunted by
`python -m tests.quality`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnfuzz.judging.runner import Runner
from tests.quality.catalogue import catalogue
from tests.quality.hunting import NotFound, flaws, hunt
from tests.quality.mutants import MUTANTS, Mutant, mutant_named
from tests.quality.planting import lay_over
from tests.quality.searching import Search, searcher

_SEED = 3
"""With which none takes long: a bug that one relation alone sees waits for a case that shows it and draws that one."""
_PATIENCE_S = 300.0
"""A seed always draws the same cases. The slowest bug takes 254 of them: 54 s alone, over 120 beside other tests."""


@pytest.fixture(scope="module")
def search() -> Iterator[Search]:
    with searcher(MUTANTS, seed=_SEED, budget_s=_PATIENCE_S) as search:
        yield search


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS if mutant.in_suite])
@pytest.mark.night  # by day: tests/oracles, and tests/house/test_readme.py for a search
def test_found_shrunk_and_absent_from_the_correct_kernel(name: str, tmp_path: Path, runner: Runner) -> None:
    """A bug of a kind that has shipped in public kernels would be missed, reported large, or blamed on a right one."""
    mutant = mutant_named(name)
    once = hunted(mutant, tmp_path / "once", runner, seed=1)
    again = hunted(mutant, tmp_path / "again", runner, seed=2) if once else []
    assert not again, [*once, *again]


def hunted(mutant: Mutant, folder: Path, runner: Runner, *, seed: int) -> list[str]:
    """What is wrong with one hunt.

    A bug has several symptoms. Which of them shows first, and so what its smallest case is, is up to chance and to how
    far a worker gets in a second: now and then to the one that is hardest to shrink, but not twice.
    """
    folder.mkdir()
    try:
        return flaws(mutant, hunt(mutant, folder, seed=seed, workers=1), runner)
    except NotFound as missed:
        return [str(missed)]


@pytest.mark.night
@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS if not mutant.in_suite])
def test_found(name: str, search: Search) -> None:
    """A bug of a kind that has shipped in public kernels would be missed, or an oracle would no longer see it."""
    mutant = mutant_named(name)
    kill = search(mutant).kill
    assert kill is not None
    assert mutant.oracle in ("any", kill.by)


def test_all_fit_the_kernels(tmp_path: Path) -> None:
    """A mutant that no longer fits the kernels, or is no Python, would drop out of the score unnoticed."""
    for mutant in MUTANTS:
        folder = tmp_path / mutant.name
        folder.mkdir()
        lay_over(mutant, folder)
        for path in folder.glob("*.py"):
            compile(path.read_text(), str(path), "exec")


def test_the_page_has_all_of_them() -> None:
    """A reader would be shown bugs that are planted no longer, or not be shown those that are."""
    assert (Path(__file__).parents[2] / "docs" / "quality.md").read_text(encoding="utf-8") == catalogue()


def test_mutants_differ_from_the_kernels_and_from_each_other() -> None:
    """Two mutants with one edit, or one without, would count a single bug twice or none at all."""
    edits = {(mutant.kernel, mutant.edits) for mutant in MUTANTS}
    assert len(edits) == len(MUTANTS) == len({mutant.name for mutant in MUTANTS})
    assert all(edit.old != edit.new for mutant in MUTANTS for edit in mutant.edits)


def test_the_historical_set_is_large_and_says_where_its_bugs_are_described() -> None:
    """A reader could not look up a re-created bug, or the set would be smaller than it is said to be."""
    references = [mutant.reference for mutant in MUTANTS if mutant.reference]
    assert len(references) >= 40
    assert [
        text for text in references if not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+(, ([\w.-]+/[\w.-]+)?#\d+)*", text)
    ] == []
