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

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.oracles.relations.relation import Changed, FurtherRuns, Relation, Results, one_by_one, unequal_bits
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import Case, MergeStatesCase
from attnfuzz.problems.registry import Contents
from attnfuzz.values import LogicalAttention, LogicalStates

__all__ = ["BATCH_INVARIANCE"]

_MOST_ROWS = 4


def _applies(declaration: Declaration, case: Case) -> bool:
    supports = declaration.supports
    return supports.deterministic and supports.batch_invariant and _num_rows(case) > 1


def _further(declaration: Declaration, case: Case, contents: Contents) -> FurtherRuns:
    del declaration
    noun = "token" if isinstance(case, MergeStatesCase) else "sequence"
    words = f"with that {noun} alone in the batch"
    rows = _rows(case)

    def compare(together: Results, others: Sequence[Results]) -> Failure | None:
        alone = {name: result.clone() for name, result in together.items()}
        for row, found in zip(rows, others, strict=True):
            for name, part in found.items():
                _row(alone, name, row, case).copy_(part)
        details = ("the kernel declares Supports(batch_invariant=True): a row does not depend on its batch",)
        return unequal_bits("batch_invariance", case, together, alone, words, details=details)

    runs = [Changed(words, _case_of_row(case, row), _values_of_row(case, contents.values, row)) for row in rows]
    return FurtherRuns(runs, compare)


def _num_rows(case: Case) -> int:
    return case.num_tokens if isinstance(case, MergeStatesCase) else case.num_seqs


def _results_of(case: Case, row: int) -> range:
    """Where those of a row are: several for a sequence with several query tokens."""
    return range(row, row + 1) if isinstance(case, MergeStatesCase) else case.rows_of(row)


def _rows(case: Case) -> list[int]:
    """Rows to run alone: the first and the last, the shortest and the longest that is not empty, or all.

    Of those that have results: a sequence without query tokens is no call.
    """
    rows = [row for row in range(_num_rows(case)) if _results_of(case, row)]
    count = len(rows)
    if count <= _MOST_ROWS:
        return rows
    if isinstance(case, MergeStatesCase):
        return [0, count // 3, 2 * count // 3, count - 1]
    by_length = sorted(rows, key=lambda row: case.seq_lens[row])
    shortest = next((row for row in by_length if case.seq_lens[row]), rows[0])
    return sorted({rows[0], shortest, by_length[-1], rows[-1]})


def _case_of_row(case: Case, row: int) -> Case:
    if isinstance(case, MergeStatesCase):
        return msgspec.structs.replace(case, num_tokens=1)
    return _sequence(case, row)


def _sequence(case: Any, row: int) -> Case:
    values = msgspec.structs.replace(case.values, needles=())
    alone: Case = msgspec.structs.replace(case, **case.of_sequences([row]), values=values)
    return alone


def _values_of_row(case: Case, values: LogicalAttention | LogicalStates, row: int) -> LogicalAttention | LogicalStates:
    results = _results_of(case, row)
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


def _row(results: Results, name: str, row: int, case: Case) -> Any:
    """The part of a result that belongs to `row`, as a view."""
    heads_first = name == "output_lse" and isinstance(case, MergeStatesCase) and case.lse_layout == "HT"
    rows = _results_of(case, row)
    return results[name].narrow(1 if heads_first else 0, rows.start, len(rows))


BATCH_INVARIANCE = Relation(
    "batch_invariance",
    _applies,
    one_by_one(_further),
    further=_further,
    weight=3,  # a cut that depends on the batch shows nowhere else, and few batches tell
)
