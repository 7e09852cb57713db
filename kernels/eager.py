"""The bundled kernels once more, in plain PyTorch: loops over sequences, float32 arithmetic, no Triton.

Same arguments, results and errors as the wrappers in ``launch`` and ``launch_paged``, less the tile. Lengths are read
on the host, so these wait for the device. Products are multiply-and-sum, because matrix products follow the process's
TF32 and reduced-precision switches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnfuzz.kernels.layouts import gather_pages
from attnfuzz.kernels.prepare import (
    empty_partials,
    prepare_dense,
    prepare_merge,
    prepare_paged,
    prepare_reduce,
    prepare_split,
)

__all__ = ["dense_decode", "merge_states", "paged_decode", "reduce_splits", "split_decode", "split_paged_decode"]


def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``launch.dense_decode``."""
    out, lse, _ = prepare_dense(q, k, v, seq_lens, out, lse)
    for i, seq_len in enumerate(seq_lens.tolist()):
        out[i], lse[i] = _attend(q[i], k[i, :seq_len], v[i, :seq_len], scale)
    return out, lse


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int,
    layout: str,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``launch_paged.paged_decode``."""
    inputs = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    out, lse, _ = prepare_paged(inputs, layout, block_size, out, lse)
    for i, seq_len in enumerate(seq_lens.tolist()):
        k, v = gather_pages(k_cache, v_cache, layout, block_table[i, : -(-seq_len // block_size)])
        out[i], lse[i] = _attend(q[i], k[:seq_len], v[:seq_len], scale)
    return out, lse


def split_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int,
    layout: str,
    num_splits: int,
    *,
    partial_out: Tensor | None = None,
    partial_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``launch_paged.split_decode``."""
    inputs = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    partial_out, partial_lse, _ = prepare_split(inputs, layout, block_size, num_splits, partial_out, partial_lse)
    for i, seq_len in enumerate(seq_lens.tolist()):
        k, v = gather_pages(k_cache, v_cache, layout, block_table[i, : -(-seq_len // block_size)])
        per_split = -(-seq_len // num_splits)
        for split in range(num_splits):
            tokens = slice(split * per_split, min((split + 1) * per_split, seq_len))
            partial_out[i, :, split], partial_lse[i, :, split] = _attend(q[i], k[tokens], v[tokens], scale)
    return partial_out, partial_lse


def reduce_splits(
    partial_out: Tensor, partial_lse: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ``launch_paged.reduce_splits``."""
    out, lse, _ = prepare_reduce(partial_out, partial_lse, out, lse)
    merged, merged_lse = _merge(partial_out, partial_lse)
    return out.copy_(merged), lse.copy_(merged_lse)


def split_paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int,
    layout: str,
    num_splits: int,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    partial_dtype: str = "float32",
) -> tuple[Tensor, Tensor]:
    """See ``launch_paged.split_paged_decode``."""
    partial_out = empty_partials(q, num_splits, partial_dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    partial_out, partial_lse = split_decode(
        q, k_cache, v_cache, block_table, seq_lens, scale, block_size, layout, num_splits, partial_out=partial_out
    )
    return reduce_splits(partial_out, partial_lse, out=out, lse=lse)


def merge_states(
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    *,
    lse_layout: str = "HT",
    output: Tensor | None = None,
    output_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``launch.merge_states``."""
    inputs = {"prefix_output": prefix_output, "prefix_lse": prefix_lse}
    inputs |= {"suffix_output": suffix_output, "suffix_lse": suffix_lse}
    output, output_lse, _ = prepare_merge(inputs, lse_layout, output, output_lse)
    lses = torch.stack((prefix_lse, suffix_lse), dim=-1)
    lses = lses.transpose(0, 1) if lse_layout == "HT" else lses  # [num_tokens, num_q_heads, 2]
    lses = lses.masked_fill(lses == math.inf, -math.inf)
    merged, merged_lse = _merge(torch.stack((prefix_output, suffix_output), dim=-2), lses)
    return output.copy_(merged), output_lse.copy_(merged_lse.t() if lse_layout == "HT" else merged_lse)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``out [num_q_heads, head_size]`` and ``lse [num_q_heads]`` in float32.

    Shapes: ``q [num_q_heads, head_size]``, ``k, v [num_tokens, num_kv_heads, head_size]``.
    """
    group_size = q.shape[0] // k.shape[1]
    k, v = (x.float().repeat_interleave(group_size, dim=1) for x in (k, v))
    scores = (q.float() * k).sum(-1) * scale  # [num_tokens, num_q_heads]
    p = scores.softmax(0)
    return (p[..., None] * v).sum(0), scores.logsumexp(0)


def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the states ``outs [..., num_states, head_size]``, ``lses [..., num_states]`` into one, in float32."""
    empty = lses == -math.inf
    row_max = lses.amax(-1, keepdim=True)
    ref = row_max.masked_fill(row_max == -math.inf, 0.0)  # so that no exponent is -inf - -inf
    weights = (lses - ref).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights[..., None] * outs.float().masked_fill(empty[..., None], 0.0)).sum(-2)
    return out / total.masked_fill(total == 0.0, 1.0), (ref + total.log()).squeeze(-1)
