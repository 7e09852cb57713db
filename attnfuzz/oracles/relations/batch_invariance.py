"""A row alone and among others: the same bits, for kernels that promise it.

`Supports(batch_invariant=True)` says that a row does not depend on its batch. Then each row by itself must give the
bits that it gives in the batch, whatever the longest sequence, the width of the table or the size of the grid. No
oracle that looks at one batch can see this. Without the promise there is nothing to compare: the number of splits may
follow the batch, and the bits with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from attnfuzz.declaration import Declaration
from attnfuzz.oracles import registry
from attnfuzz.oracles.relations.relation import Changed, FurtherRuns, Relation, Results, one_by_one, unequal_bits
from attnfuzz.problems.cases import BundledCase
from attnfuzz.problems.registry import Contents
from attnfuzz.trials.comparison import axes_of
from attnfuzz.values import LogicalAttention, LogicalStates
from attnfuzz.verdict import Failure

__all__ = ["BATCH_INVARIANCE"]

_MOST_ROWS = 4


def _applies(declaration: Declaration, case: BundledCase) -> bool:
    supports = declaration.supports
    return supports.deterministic and supports.batch_invariant and case.num_parts > 1


def _further(declaration: Declaration, case: BundledCase, contents: Contents) -> FurtherRuns:
    del declaration
    words = f"with that {case.part_noun} alone in the batch"
    rows = _rows(case)

    def compare(together: Results, others: Sequence[Results]) -> Failure | None:
        alone = {name: result.clone() for name, result in together.items()}
        for row, found in zip(rows, others, strict=True):
            for name, part in found.items():
                _row(alone, name, row, case).copy_(part)
        details = ("the kernel declares Supports(batch_invariant=True): a row does not depend on its batch",)
        return unequal_bits(registry.BATCH_INVARIANCE, case, together, alone, words, details=details)

    runs = [Changed(words, case.alone(row), _values_of_row(case, contents.values, row)) for row in rows]
    return FurtherRuns(runs, compare)


def _rows(case: BundledCase) -> list[int]:
    """Rows to run alone: the first and the last, the shortest and the longest that is not empty, or all.

    Of those that have results: a sequence without query tokens is no call.
    """
    rows = [row for row in range(case.num_parts) if case.rows_of(row)]
    count = len(rows)
    if count <= _MOST_ROWS:
        return rows
    lens = getattr(case, "seq_lens", None)
    if lens is None:  # all alike
        return [0, count // 3, 2 * count // 3, count - 1]
    by_length = sorted(rows, key=lens.__getitem__)
    shortest = next((row for row in by_length if lens[row]), rows[0])
    return sorted({rows[0], shortest, by_length[-1], rows[-1]})


def _values_of_row(
    case: BundledCase, values: LogicalAttention | LogicalStates, row: int
) -> LogicalAttention | LogicalStates:
    results = case.rows_of(row)
    one = slice(results.start, results.stop)
    if isinstance(values, LogicalStates):
        return replace(
            values,
            prefix_output=values.prefix_output[one],
            suffix_output=values.suffix_output[one],
            prefix_lse=values.prefix_lse[one],
            suffix_lse=values.suffix_lse[one],
        )
    k, v = values.sequence(row)
    return LogicalAttention(values.q[one], k, v, (0, len(k)), values.kv_scales)


def _row(results: Results, name: str, row: int, case: BundledCase) -> Any:
    """The part of a result that belongs to `row`, as a view."""
    rows = case.rows_of(row)
    return results[name].narrow(1 if axes_of(name, case)[0] == "head" else 0, rows.start, len(rows))


BATCH_INVARIANCE = Relation(
    registry.BATCH_INVARIANCE,
    _applies,
    one_by_one(_further),
    further=_further,
    weight=3,  # a cut that depends on the batch shows nowhere else, and few batches tell
)
