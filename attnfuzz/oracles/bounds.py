"""The error bound of a case, from what its kernel declares about its arithmetic."""

import math
from typing import Any

import torch

from attnfuzz.declaration import Declaration
from attnfuzz.numerics import Bound, attention_bound, merge_bound
from attnfuzz.problems.cases import AttentionCase, Case, MergeStatesCase, SplitDecodeCase
from attnfuzz.values import LogicalAttention, LogicalStates

__all__ = ["bound_of"]


def bound_of(declaration: Declaration, case: Case, values: Any, *, interpreted: bool) -> Bound:
    """Axes as the reference's: `out [rows num_q_heads head_size]`, `lse [rows num_q_heads]`.

    `interpreted`: by Triton's interpreter, which converts to bfloat16 by dropping bits.
    """
    truncates = interpreted and case.dtype == "bfloat16"
    if isinstance(case, MergeStatesCase):
        return _merge(case, values, truncates_bfloat16=truncates)
    rows = [_sequence(declaration, case, values, seq, truncates_bfloat16=truncates) for seq in range(case.num_seqs)]
    return Bound(out=torch.stack([row.out for row in rows]), lse=torch.stack([row.lse for row in rows]))


def _sequence(
    declaration: Declaration, case: AttentionCase, values: LogicalAttention, seq: int, *, truncates_bfloat16: bool
) -> Bound:
    k, v = values.sequence(seq)
    dtype = getattr(torch, case.dtype)
    return attention_bound(
        values.q[seq].double(), k.double(), v.double(), case.scale,
        in_dtype=dtype,
        out_dtype=dtype,
        numerics=declaration.numerics,
        num_partials=_num_partials(declaration, case),
        partial_merge=isinstance(case, SplitDecodeCase),
        truncates_bfloat16=truncates_bfloat16,
    )  # fmt: skip


def _num_partials(declaration: Declaration, case: AttentionCase) -> int:
    """A kernel that does not say into how many parts it splits a sequence may split it: the looser bound."""
    if isinstance(case, SplitDecodeCase):
        return case.num_splits
    choices = declaration.options.get("num_splits")
    num_splits = case.options.get("num_splits", choices[0] if choices else 2)
    return num_splits if isinstance(num_splits, int) and num_splits >= 1 else 2


def _merge(case: MergeStatesCase, values: LogicalStates, *, truncates_bfloat16: bool) -> Bound:
    unit = math.log(2) if values.lse_base2 else 1.0
    prefix, suffix = (
        torch.where(lse == math.inf, -math.inf, lse.double() * unit) for lse in (values.prefix_lse, values.suffix_lse)
    )
    return merge_bound(
        values.prefix_output.double(), values.suffix_output.double(), prefix, suffix,
        out_dtype=getattr(torch, case.dtype),
        truncates_bfloat16=truncates_bfloat16,
    )  # fmt: skip
