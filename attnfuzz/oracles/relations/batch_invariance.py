"""A row alone and among others: the same bits, for kernels that promise it.

`Supports(batch_invariant=True)` says that a row does not depend on its batch. Then each row by itself must give the
bits that it gives in the batch, whatever the longest sequence, the width of the table or the size of the grid. No
oracle that looks at one batch can see this. Without the promise there is nothing to compare: the number of splits may
follow the batch, and the bits with it.

A batch of fewer than four sequences is made a larger one by repeating them, so that it differs from each of them. Sums
in another order differ in their last digits of float32, which a result of 16 bits hardly ever shows, and not at all
where one token has all the weight. So both runs have other numbers: scores are of the order of 1, and V is moved by
what it is on average, by the weights of one query head in each dimension. Its sums nearly cancel, and the last digits
of their parts are among the first ones of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import msgspec
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.reference import row_weights
from attnfuzz.inputs.registry import Contents
from attnfuzz.oracles import registry
from attnfuzz.oracles.relations.relation import Changed, FurtherRuns, Relation, Results, one_by_one, unequal_bits
from attnfuzz.problems.cases import AttentionCase, BundledCase
from attnfuzz.problems.repeated import plain_values
from attnfuzz.problems.variants import PLAIN_VARIANT
from attnfuzz.trials.comparison import axes_of
from attnfuzz.values import LogicalAttention, LogicalStates, attention_values
from attnfuzz.verdict import Failure

_MOST_ROWS = 4
_FEWEST_SEQS = 4
_ENLARGED = 256.0
"""Times V, so that what is left of its sums is a normal number in float16."""
_LIGHT = 2.0**-8
"""Least part of the largest weight: with less, a token's V would have to be far larger than others."""


def _applies(declaration: Declaration, case: BundledCase) -> bool:
    supports = declaration.supports
    return supports.deterministic and supports.batch_invariant and (case.num_parts > 1 or _is_attention(case))


def _further(_: Declaration, case: BundledCase, contents: Contents) -> FurtherRuns:
    words = f"with that {case.part_noun} alone in the batch"
    rows = _rows(case)
    batch, values = _crowd(case, contents.values.v.device) if _is_attention(case) else (case, contents.values)
    crowd = [] if batch is case else [Changed("with other numbers", batch, values)]

    def compare(together: Results, others: Sequence[Results]) -> Failure | None:
        if crowd:
            together, *others = others
        alone = {name: result.clone() for name, result in together.items()}
        for row, found in zip(rows, others, strict=True):
            for name, part in found.items():
                _row(alone, name, row, batch).copy_(part)
        details = ("the kernel declares Supports(batch_invariant=True): a row does not depend on its batch",)
        return unequal_bits(
            registry.BATCH_INVARIANCE, batch, together, alone, words, details=details, as_it_was="among others"
        )

    runs = [Changed(words, batch.alone(row), _values_of_row(batch, values, row)) for row in rows]
    return FurtherRuns([*crowd, *runs], compare)


def _is_attention(case: BundledCase) -> TypeGuard[AttentionCase]:
    return isinstance(case, AttentionCase)


def _crowd(case: AttentionCase, device: torch.device) -> tuple[AttentionCase, LogicalAttention]:
    """At least four sequences, of which the first are those of the case, with numbers whose sums nearly cancel."""
    seqs = [seq % case.num_seqs for seq in range(max(_FEWEST_SEQS, case.num_seqs))]
    plain = msgspec.structs.replace(
        case, values=plain_values(case, case.seed), **{**case.of_sequences(seqs), **case.with_own_pages()}
    )
    values = attention_values(plain, device)
    if case.kv is None and not case.values_in_keys:
        values.v.mul_(_ENLARGED)
        for seq in _rows(case):
            _cancel_in_last_row(plain, values, seq)
    return plain, values


def _cancel_in_last_row(case: AttentionCase, values: LogicalAttention, seq: int) -> None:
    """Change V of a sequence so that each dimension of a query head of its last token is about 0."""
    last = case.rows_of(seq)[-1]
    k, v = (part[: case.row_lens[last]] for part in values.sequence(seq))
    queries = values.q[last].double().view(case.num_kv_heads, case.gqa_ratio, -1)
    dots = case.scale * torch.einsum("hgd,thd->hgt", queries, k.double()).flatten(0, 1)
    for head in range(case.num_q_heads if len(k) else 0):
        weights, _ = row_weights(case, last, head, dots[head])
        _cancel(v[:, head // case.gqa_ratio, head % case.gqa_ratio :: case.gqa_ratio], weights)


def _cancel(v: Float[Tensor, "length dims"], weights: Float64[Tensor, " length"]) -> None:
    """Change `v` so that its sums with these weights are about 0: by their average, and the rest by one light token."""
    v -= weights @ v.double()
    light = int(weights.masked_fill(weights < _LIGHT * weights.max(), 2.0).argmin())
    v[light] -= weights @ v.double() / weights[light].clamp(min=_LIGHT)


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


def _weight(_: Declaration, case: BundledCase) -> int:
    """How often it is drawn: what depends on the batch shows nowhere else, and kernels take other ways where a variant
    is asked for."""
    return 9 if _is_attention(case) and case.variant != PLAIN_VARIANT else 3


BATCH_INVARIANCE = Relation(
    registry.BATCH_INVARIANCE,
    _applies,
    one_by_one(_further),
    further=_further,
    weight=_weight,
)
