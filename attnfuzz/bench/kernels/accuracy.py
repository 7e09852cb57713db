"""Whether a contender's result is right, before it gets a time: some rows against float64, within derived bounds."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from attnfuzz.bench.kernels.tensors import AttentionTensors, MergeTensors
from attnfuzz.numerics import attention_bound, error_ratio, merge_bound
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.reference import merge_all

__all__ = ["largest_error_ratio"]

_MOST_ROWS = 6
_MOST_MERGED = 512


def largest_error_ratio(
    tensors: AttentionTensors | MergeTensors,
    out: Float[Tensor, "num_tokens num_q_heads head_size"],
    lse: Float32[Tensor, "num_tokens num_q_heads"] | None,
    *,
    numerics: Numerics,
    num_partials: int,
    one_copy: bool,
) -> float:
    """Error over bound, the largest of the rows that are looked at; above 1 the result is wrong.

    ``num_partials``: into how many parts the kernel may have cut a sequence. ``one_copy``: as for `attention_bound`.
    """
    if isinstance(tensors, MergeTensors):
        return _of_merge(tensors, out, lse)
    worst = 0.0
    scale, dtype = tensors.shape.scale, tensors.q.dtype
    for seq, token, visible in _rows(tensors):
        k, v = (part.double() for part in tensors.sequence(seq, visible))
        q = tensors.q[token].double()
        bound = attention_bound(
            q, k, v, scale, in_dtype=dtype, out_dtype=out.dtype,
            numerics=numerics, num_partials=num_partials, one_copy=one_copy,
        )  # fmt: skip
        expected_out, expected_lse = _attention(q, k, v, scale)
        worst = max(worst, float(error_ratio(out[token], expected_out, bound.out).max()))
        if lse is not None:
            worst = max(worst, float(error_ratio(lse[token], expected_lse, bound.lse).max()))
    return worst


def _rows(tensors: AttentionTensors) -> list[tuple[int, int, int]]:
    """Some queries: their sequence, their place among all queries, and how many keys they see.

    The first and the last query of sequences from the first to the last.
    """
    shape = tensors.shape
    num_seqs = len(shape.seq_lens)
    step = max(1, (num_seqs - 1) // (_MOST_ROWS // 2))
    rows = []
    for seq in sorted({*range(0, num_seqs, step), num_seqs - 1}):
        queries, start = shape.queries[seq], sum(shape.queries[:seq])
        for query in sorted({0, queries - 1} if queries else ()):
            rows.append((seq, start + query, shape.seq_lens[seq] - queries + query + 1))
    return rows


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    grouped = q.view(k.shape[1], -1, q.shape[-1])
    scores = scale * (grouped @ k.permute(1, 2, 0))  # [num_kv_heads, group, num_tokens]
    return (scores.softmax(-1) @ v.transpose(0, 1)).flatten(0, 1), scores.logsumexp(-1).flatten()


def _of_merge(tensors: MergeTensors, out: Tensor, lse: Tensor | None) -> float:
    step = max(1, tensors.shape.num_tokens // _MOST_MERGED)
    outputs = [part[::step].double() for part in (tensors.prefix_output, tensors.suffix_output)]
    lses = [part[::step].double() for part in (tensors.prefix_lse, tensors.suffix_lse)]
    bound = merge_bound(*outputs, *lses, out_dtype=out.dtype)
    expected_out, expected_lse = merge_all(torch.stack(outputs, -2), torch.stack(lses, -1))
    worst = float(error_ratio(out[::step], expected_out, bound.out).max())
    if lse is None:
        return worst
    return max(worst, float(error_ratio(lse[::step], expected_lse, bound.lse).max()))
