"""Every planted bug is found in time, shrunk to the boundary that triggers it, and absent from the correct kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from attnfuzz.execution.runner import Runner
from attnfuzz.problems.cases import MergeStatesCase, encode_case
from tests.quality.hunting import hunt
from tests.quality.mutants import MUTANTS, mutant_named


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(device="cpu") as runner:
        yield runner


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_found_shrunk_and_absent_from_the_correct_kernel(name: str, tmp_path: Path, runner: Runner) -> None:
    """A bug of a kind that has shipped in public kernels would be missed, reported large, or blamed on a right one."""
    mutant = mutant_named(name)
    catch = hunt(mutant, tmp_path, seed=1, workers=1)
    case = catch.case
    if mutant.oracle != "any":
        assert catch.regression.finding.oracle == mutant.oracle
    rows = case.num_tokens if isinstance(case, MergeStatesCase) else case.num_seqs
    assert rows <= 2
    fields = msgspec.json.decode(encode_case(case))
    assert {field: fields[field] for field in mutant.minimal} == mutant.minimal
    (correct,) = runner.declarations([mutant.kernel])
    assert runner.judge(correct, case).failure is None


def test_mutants_differ_from_the_kernels_and_from_each_other() -> None:
    """Two mutants with one edit, or one without, would count a single bug twice or none at all."""
    edits = {(mutant.kernel, mutant.edits) for mutant in MUTANTS}
    assert len(edits) == len(MUTANTS) == len({mutant.name for mutant in MUTANTS})
    assert all(edit.old != edit.new for mutant in MUTANTS for edit in mutant.edits)
