"""What relations want run for the cases of a batch, and in which order."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

import attnfuzz
from attnfuzz.inputs.registry import problem_of
from attnfuzz.judging.batch import Candidate, asked_of, entries_of
from attnfuzz.memory.image import plan_of
from attnfuzz.oracles.relations.batch_invariance import BATCH_INVARIANCE
from attnfuzz.oracles.relations.block_table_slack import BLOCK_TABLE_SLACK
from attnfuzz.oracles.relations.call_sequence import CALL_SEQUENCE, relatives_of
from attnfuzz.oracles.relations.guard_page import GUARD_PAGE
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.problems.block_table import block_table_rows
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.recipes import Pages


def test_runs_are_numbered_after_the_cases(plant: Any, paged: PagedDecodeCase) -> None:
    """A relation would compare with the run of another one."""
    declaration = plant("paged_decode", supports=attnfuzz.Supports(batch_invariant=True)).declaration
    full = msgspec.structs.replace(paged, seq_lens=(8,), pages=Pages())
    cases = [paged, full, paged]
    contents = problem_of(paged).contents(cases, "cpu", declaration.supports)
    in_full = CALL_SEQUENCE.looking_closer()
    relations: list[list[Relation]] = [[GUARD_PAGE, BATCH_INVARIANCE], [], [in_full, BLOCK_TABLE_SLACK]]
    candidates = [Candidate(case, plan_of(case), of_case) for case, of_case in zip(cases, relations, strict=True)]
    asked = asked_of(declaration, candidates, contents)
    calls = len(relatives_of(declaration, paged))  # and the case once more
    assert [[one.entries for one in of_case] for of_case in asked] == [
        [range(0), range(3, 7)],  # the batch with other numbers, and each of its sequences
        [],
        [range(7, 8 + calls), range(8 + calls, 9 + calls)],
    ]
    assert asked[0][0].further is None
    entries = entries_of(declaration, asked)
    assert [entry.case.num_seqs for entry in entries[:4] if isinstance(entry.case, PagedDecodeCase)] == [4, 1, 1, 1]
    assert [entry.is_drawn for entry in entries] == [False] * 4 + [True] * calls + [False] + [False]


def test_what_is_in_the_tensors_of_a_run(plant: Any, paged: PagedDecodeCase) -> None:
    """A relative would be called with another's numbers, or a table name pages on which no token lies."""
    declaration = plant("paged_decode").declaration
    (contents,) = problem_of(paged).contents([paged], "cpu", declaration.supports)
    asked = asked_of(declaration, [Candidate(paged, plan_of(paged), [CALL_SEQUENCE, BLOCK_TABLE_SLACK])], [contents])
    longer, *_, same, other_table = entries_of(declaration, asked)
    alone = problem_of(paged).contents([relatives_of(declaration, paged)[0].case], "cpu", declaration.supports)[0]
    assert torch.equal(longer.contents.values.k, alone.values.k)
    assert same.contents.values is contents.values
    assert same.contents.placement is contents.placement
    assert other_table.contents.values is contents.values
    placement = other_table.contents.placement
    assert placement is not None
    assert placement.block_table is not None
    assert isinstance(other_table.case, PagedDecodeCase)
    assert placement.block_table.tolist() == [list(row) for row in block_table_rows(other_table.case)]
    assert placement.block_table.tolist() != [list(row) for row in block_table_rows(paged)]


def test_a_relation_that_changes_nothing_wants_no_run(plant: Any, paged: PagedDecodeCase) -> None:
    """A case would be compared with itself, at the price of a run."""
    declaration = plant("paged_decode").declaration
    full = msgspec.structs.replace(paged, seq_lens=(8,), pages=Pages())
    contents = problem_of(full).contents([full], "cpu", declaration.supports)
    assert asked_of(declaration, [Candidate(full, plan_of(full), [BLOCK_TABLE_SLACK])], contents) == [[]]
