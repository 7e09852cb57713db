"""The roundings of a case, from what its kernel declares about its arithmetic."""

import torch

from attnfuzz.declaration import Declaration
from attnfuzz.numerics.arithmetic import Arithmetic, attention_arithmetic, merge_arithmetic
from attnfuzz.problems.cases import AttentionCase, MergeStatesCase, SplitDecodeCase
from attnfuzz.problems.quantised_kv import smallest_magnitudes

__all__ = ["arithmetic_of"]


def arithmetic_of(declaration: Declaration, case: AttentionCase | MergeStatesCase, *, one_copy: bool) -> Arithmetic:
    """Units of what the kernel may round. `one_copy`: see `attention_bound`.

    A kernel may add sinks in a stage of its own, as it combines splits.
    """
    dtype = getattr(torch, case.dtype)
    if not isinstance(case, AttentionCase):
        return merge_arithmetic(dtype)
    num_partials = _num_partials(declaration, case)
    return attention_arithmetic(
        declaration.numerics,
        in_dtype=dtype,
        out_dtype=dtype,
        is_split=num_partials > 1 or case.variant.sinks is not None,
        partial_merge=isinstance(case, SplitDecodeCase),
        one_copy=one_copy,
        num_partials=num_partials,
        smallest_kv=_smallest_kv(case),
    )


def _smallest_kv(case: AttentionCase) -> tuple[float, float] | None:
    if case.kv is None:
        return None
    return smallest_magnitudes(case.kv, case.kv.head_scales(case.num_kv_heads, case.values.seed))


def _num_partials(declaration: Declaration, case: AttentionCase) -> int:
    """A kernel that does not say into how many parts it splits a sequence may split it: the looser bound."""
    if isinstance(case, SplitDecodeCase):
        return case.num_splits
    choices = declaration.options.get("num_splits")
    num_splits = case.options.get("num_splits", choices[0] if choices else 2)
    return num_splits if isinstance(num_splits, int) and num_splits >= 1 else 2
