"""Other numbers in the block-table entries that no sequence uses: the same bits.

An entry past a sequence's last page names nothing, so what it holds cannot reach the result, not even within its bound.
That is what this sees: entries that are followed and whose tokens enter with a small weight, as under a mask of -10000
or a weight that underflows in one dtype only. They name pages with live tokens, which poison cannot mark.

The width of the table follows the longest sequence of the batch. A kernel may choose its splits by it, and so the order
of its additions, unless it promises that a row does not depend on its batch; only then the table gets wider too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from attnfuzz.bundled.own_paged import PagedProblem, paged_case
from attnfuzz.cases.supported import supports_case
from attnfuzz.declaration import Declaration
from attnfuzz.inputs.open_module import have_same_results
from attnfuzz.inputs.registry import Contents, problem_of
from attnfuzz.oracles import registry
from attnfuzz.oracles.relations.relation import Changed, FurtherRuns, Relation, Results, fits, one_by_one, unequal_bits
from attnfuzz.problems.block_table import block_table_rows
from attnfuzz.problems.boundaries import split_count
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.choices import paddings_of
from attnfuzz.problems.open_cases import OpenCase, implementation_of
from attnfuzz.verdict import Failure

_MEANS = {"zero": "are 0", "wrong_page": "name pages of other sequences", "garbage": "are ids that do not exist"}


def _applies(declaration: Declaration, case: Any) -> bool:
    supports = declaration.supports
    if not supports.deterministic:
        return False
    if isinstance(case, OpenCase):
        return _of_own_problem(declaration, case) is not None
    has_unused = any(case.blocks_of(seq) < case.max_blocks_per_seq for seq in range(case.num_seqs))
    return supports.batch_invariant or (has_unused and len(paddings_of(supports)) > 1)


def _further(declaration: Declaration, case: Any, contents: Contents) -> FurtherRuns | None:
    is_own = isinstance(case, OpenCase)
    changed = _of_own_problem(declaration, case) if is_own else _changed(declaration, case)
    if changed is None:  # the same ids may come out of another recipe
        return None
    before: PagedDecodeCase = case
    other: Any = changed
    values = contents.values
    if is_own:
        before, other = paged_case(case), paged_case(changed)
        values = problem_of(changed).values(changed, "cpu", declaration.supports)
        if not have_same_results(contents.values, values):
            return None
    words = _words(before, other)

    def compare(one: Results, others: Sequence[Results]) -> Failure | None:
        details = (_entries(before, "were"), _entries(other, "are now"))
        return unequal_bits(registry.BLOCK_TABLE_SLACK, case, one, others[0], words, details=details)

    return FurtherRuns([Changed(words, changed, values)], compare)


def _of_own_problem(declaration: Declaration, case: OpenCase) -> OpenCase | None:
    """A case of a user's paged problem with other unused entries; None without any."""
    if not isinstance(implementation_of(case.problem), PagedProblem):
        return None
    for unused in getattr(case.problem.fields["unused_entries"], "values", ()):
        other = msgspec.structs.replace(case, unused_entries=unused)
        if block_table_rows(paged_case(other)) != block_table_rows(paged_case(case)) and supports_case(
            declaration.supports, declaration.options, other
        ):
            return other
    return None


def _changed(declaration: Declaration, case: PagedDecodeCase) -> PagedDecodeCase | None:
    """The case with other unused entries, and more of them where that is promised not to matter; None without any."""
    supports = declaration.supports
    columns = case.pages.extra_columns
    if supports.batch_invariant:
        columns += case.max_blocks_per_seq + 1
    others = [padding for padding in paddings_of(supports) if padding != case.pages.padding]
    padding = others[-1] if others else case.pages.padding
    changed = msgspec.structs.replace(
        case, pages=msgspec.structs.replace(case.pages, padding=padding, extra_columns=columns)
    )
    is_other = block_table_rows(changed) != block_table_rows(case)
    return changed if is_other and fits(changed) else None


def _words(case: PagedDecodeCase, other: PagedDecodeCase) -> str:
    what = f"unused block-table entries that {_MEANS[other.pages.padding]}"
    if other.max_blocks_per_seq == case.max_blocks_per_seq:
        return f"with {what}"
    return f"with a block table of {other.max_blocks_per_seq} instead of {case.max_blocks_per_seq} columns, {what}"


def _entries(case: PagedDecodeCase, verb: str) -> str:
    unused = {
        f"sequence {seq}": list(row[case.blocks_of(seq) :][:6])
        for seq, row in enumerate(block_table_rows(case))
        if len(row) > case.blocks_of(seq)
    }
    shown = ", ".join(f"{entries} of {seq}" for seq, entries in list(unused.items())[:4])
    return f"unused entries {verb} {shown}" if unused else "there was no unused entry"


def _weight(declaration: Declaration, case: Any) -> int:
    """With more splits than columns a split count that follows the table changes, which nothing else shows as often."""
    if isinstance(case, OpenCase) or not declaration.supports.batch_invariant:
        return 1
    return 4 if split_count(case.options) > case.max_blocks_per_seq else 1


BLOCK_TABLE_SLACK = Relation(
    registry.BLOCK_TABLE_SLACK,
    _applies,
    one_by_one(_further),
    weight=_weight,
    further=_further,
    cases=PagedDecodeCase,
    of_any_problem=True,
)
