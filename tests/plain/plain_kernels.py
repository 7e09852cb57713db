"""Kernels as engineers write them for one model and one cache, declared with nothing: correct, and with a bug.

Each rests on what it never says: contiguous tensors, one layout, one page size, no log-sum-exp, no empty sequence. The
bugs are those that ship. They are in several styles on purpose, so no two share code.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
import triton
import triton.language as tl
from torch import Tensor

import attnfuzz

LOG2E = math.log2(math.e)
NUM_SPLITS = 4


# Flash decoding in Triton: partial results of splits, then their reduction.


@triton.jit
def _split_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, part_ptr, lse_ptr, qk_scale, table_width, num_kv_heads,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = num_kv_heads * GROUP
    seq_len = tl.load(lens_ptr + seq)
    pages_per_split = tl.cdiv(tl.cdiv(seq_len, PAGE), SPLITS)
    first, last = split * pages_per_split, min((split + 1) * pages_per_split, tl.cdiv(seq_len, PAGE))
    h, d, n = tl.arange(0, BLOCK_H), tl.arange(0, HEAD_DIM), tl.arange(0, PAGE)
    heads = kv_head * GROUP + h
    in_group = h < GROUP
    q = tl.load(q_ptr + (seq * num_heads + heads[:, None]) * HEAD_DIM + d[None, :], mask=in_group[:, None], other=0.0)
    q = q.to(tl.float32)
    m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, HEAD_DIM], tl.float32)
    for page in range(first, last):
        block = tl.load(table_ptr + seq * table_width + page).to(tl.int64)
        live = page * PAGE + n < seq_len
        offs = ((block * PAGE + n[:, None]) * num_kv_heads + kv_head) * HEAD_DIM + d[None, :]
        k = tl.load(k_ptr + offs, mask=live[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_ptr + offs, mask=live[:, None], other=0.0).to(tl.float32)
        s = tl.sum(q[:, None, :] * k[None, :, :], axis=2) * qk_scale
        s = tl.where(live[None, :], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.sum(p[:, :, None] * v[None, :, :], axis=1)
        m_i = m_new
    at = (seq * num_heads + heads) * SPLITS + split
    if first < last:
        tl.store(part_ptr + at[:, None] * HEAD_DIM + d[None, :], acc / l_i[:, None], mask=in_group[:, None])
        tl.store(lse_ptr + at, m_i + tl.log2(l_i), mask=in_group)
    else:
        tl.store(part_ptr + at[:, None] * HEAD_DIM + d[None, :], acc, mask=in_group[:, None])
        tl.store(lse_ptr + at, m_i, mask=in_group)


@triton.jit
def _reduce_kernel(part_ptr, lse_ptr, out_ptr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, MIXES: tl.constexpr):
    row = tl.program_id(0)
    s, d = tl.arange(0, SPLITS), tl.arange(0, HEAD_DIM)
    lse = tl.load(lse_ptr + row * SPLITS + s)
    part = tl.load(part_ptr + (row * SPLITS + s[:, None]) * HEAD_DIM + d[None, :])
    lse -= tl.max(lse, axis=0)
    w = tl.exp(lse) if MIXES else tl.exp2(lse)
    out = tl.sum(w[:, None] * part, axis=0) / tl.sum(w, axis=0)
    tl.store(out_ptr + row * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty))


def flash_decode(inputs: Any, *, mixes_bases: bool = False) -> Tensor:
    batch, num_heads, head_dim = inputs.q.shape
    _, page_size, num_kv_heads, _ = inputs.k_cache.shape
    if page_size != 16:
        raise ValueError(f"page_size must be 16, got {page_size}")
    group = num_heads // num_kv_heads
    part = torch.empty((batch, num_heads, NUM_SPLITS, head_dim), dtype=torch.float32, device=inputs.q.device)
    lse = torch.empty((batch, num_heads, NUM_SPLITS), dtype=torch.float32, device=inputs.q.device)
    out = torch.empty_like(inputs.q)
    _split_kernel[(batch, num_kv_heads, NUM_SPLITS)](
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_lens, part, lse,
        inputs.scale * LOG2E, inputs.block_table.shape[1], num_kv_heads,
        GROUP=group, BLOCK_H=triton.next_power_of_2(group), HEAD_DIM=head_dim, PAGE=16, SPLITS=NUM_SPLITS,
    )  # fmt: skip
    _reduce_kernel[(batch * num_heads,)](part, lse, out, HEAD_DIM=head_dim, SPLITS=NUM_SPLITS, MIXES=mixes_bases)
    return out


@attnfuzz.kernel("paged_decode")
def triton_flash_decode(inputs: Any) -> Tensor:
    return flash_decode(inputs)


@attnfuzz.kernel("paged_decode")
def triton_flash_decode_mixes_bases(inputs: Any) -> Tensor:
    """The splits keep base-2 logarithms, and the reduction takes exp of them."""
    return flash_decode(inputs, mixes_bases=True)


# A padded batch through torch's scaled_dot_product_attention.


def sdpa(inputs: Any, *, one_too_many: bool = False) -> Tensor:
    q = inputs.q.float()[:, :, None]
    k, v = inputs.k.float().transpose(1, 2), inputs.v.float().transpose(1, 2)
    positions, lens = torch.arange(k.shape[2], device=q.device), inputs.seq_lens[:, None]
    mask = positions <= lens if one_too_many else positions < lens
    k, v = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None], scale=inputs.scale)
    return out[:, :, 0].to(inputs.q.dtype)


@attnfuzz.kernel("dense_decode")
def sdpa_decode(inputs: Any) -> Tensor:
    return sdpa(inputs)


@attnfuzz.kernel("dense_decode")
def sdpa_decode_masks_one_less(inputs: Any) -> Tensor:
    """`<=` for `<`: the first slot behind each sequence counts."""
    return sdpa(inputs, one_too_many=True)


# The merge of two partial results, one program for each token and head, as vLLM has it.


@triton.jit
def _merge_kernel(
    out_ptr, out_lse_ptr, prefix_ptr, prefix_lse_ptr, suffix_ptr, suffix_lse_ptr,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, NO_MAX: tl.constexpr,
):  # fmt: skip
    token, num_tokens = tl.program_id(0), tl.num_programs(0)
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    p_lse = tl.load(prefix_lse_ptr + head * num_tokens + token)
    s_lse = tl.load(suffix_lse_ptr + head * num_tokens + token)
    max_lse = tl.maximum(p_lse, s_lse)
    max_lse = 0.0 if max_lse == float("-inf") else max_lse
    p_se, s_se = tl.exp(p_lse - max_lse), tl.exp(s_lse - max_lse)
    out_se = p_se + s_se
    out_lse = tl.log(out_se) if NO_MAX else tl.log(out_se) + max_lse
    tl.store(out_lse_ptr + head * num_tokens + token, out_lse)
    d = tl.arange(0, PADDED)
    at = (token * num_heads + head) * HEAD_DIM + d
    prefix = tl.load(prefix_ptr + at, mask=d < HEAD_DIM).to(tl.float32)
    suffix = tl.load(suffix_ptr + at, mask=d < HEAD_DIM).to(tl.float32)
    norm = 1.0 / out_se if out_se > 0.0 else 0.0
    out = prefix * (p_se * norm) + suffix * (s_se * norm)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def merge_attn_states(inputs: Any, *, no_max: bool = False) -> None:
    num_tokens, num_heads, head_dim = inputs.output.shape
    _merge_kernel[(num_tokens, num_heads)](
        inputs.output, inputs.output_lse, inputs.prefix_output, inputs.prefix_lse, inputs.suffix_output,
        inputs.suffix_lse, HEAD_DIM=head_dim, PADDED=triton.next_power_of_2(head_dim), NO_MAX=no_max,
    )  # fmt: skip


@attnfuzz.kernel("merge_states")
def triton_merge(inputs: Any) -> None:
    merge_attn_states(inputs)


@attnfuzz.kernel("merge_states")
def triton_merge_loses_max(inputs: Any) -> None:
    """The log-sum-exp is that of what was shifted by the larger of both."""
    merge_attn_states(inputs, no_max=True)


# Chunked prefill over a paged cache in plain torch.


def ragged_attention(inputs: Any, *, top_left: bool = False) -> Tensor:
    out = torch.empty_like(inputs.q)
    starts, lens = inputs.cu_seqlens_q.tolist(), inputs.seq_lens.tolist()
    for i, kv_len in enumerate(lens):
        q = inputs.q[starts[i] : starts[i + 1]].float()
        q_len, num_heads, _ = q.shape
        pages = inputs.block_table[i, : -(-kv_len // inputs.block_size)].long()
        k = inputs.k_cache[pages].flatten(0, 1)[:kv_len].float()
        v = inputs.v_cache[pages].flatten(0, 1)[:kv_len].float()
        group = num_heads // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        attn = torch.einsum("qhd,khd->hqk", q, k) * inputs.scale
        ones = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device)
        causal = torch.triu(ones, diagonal=1 if top_left else kv_len - q_len + 1)
        attn = attn.masked_fill(causal, float("-inf")).softmax(dim=-1)
        out[starts[i] : starts[i + 1]] = torch.einsum("hqk,khd->qhd", attn, v).to(out.dtype)
    return out


@attnfuzz.kernel("paged_attention")
def torch_prefill(inputs: Any) -> Tensor:
    return ragged_attention(inputs)


@attnfuzz.kernel("paged_attention")
def torch_prefill_aligned_top_left(inputs: Any) -> Tensor:
    """The causal mask of a square: with context, a query sees only as many keys as if there were none."""
    return ragged_attention(inputs, top_left=True)


# A cache of heads first, gathered for the whole batch at once.


def gathered_decode(inputs: Any, *, tiles_heads: bool = False) -> Tensor:
    q = inputs.q
    batch, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = inputs.k_cache.shape
    table = inputs.block_table.long()
    live = torch.arange(table.shape[1] * page_size, device=q.device) < inputs.seq_lens[:, None]
    k, v = (
        cache[table].transpose(1, 2).reshape(batch, num_kv_heads, -1, head_dim).float()
        for cache in (inputs.k_cache, inputs.v_cache)
    )
    k, v = (torch.where(live[:, None, :, None], x, 0.0) for x in (k, v))
    group = num_heads // num_kv_heads
    if tiles_heads:
        k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)
    else:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (k @ q.float().unsqueeze(-1)).squeeze(-1) * inputs.scale
    probs = scores.masked_fill(~live[:, None], float("-inf")).softmax(-1)
    out: Tensor = (probs.unsqueeze(-2) @ v).squeeze(-2)
    return out.to(q.dtype)


@attnfuzz.kernel("paged_decode")
def hnd_decode(inputs: Any) -> Tensor:
    return gathered_decode(inputs)


@attnfuzz.kernel("paged_decode")
def hnd_decode_tiles_heads(inputs: Any) -> Tensor:
    """`repeat` for `repeat_interleave`: query head h reads KV head h % num_kv_heads."""
    return gathered_decode(inputs, tiles_heads=True)


# One state for each split, for somebody else to merge.


def partial_states(inputs: Any, *, drops_rest: bool = False) -> tuple[Tensor, Tensor]:
    q, splits = inputs.q.float(), inputs.num_splits
    out = torch.zeros(*q.shape[:2], splits, q.shape[2], dtype=torch.float32, device=q.device)
    lse = torch.full(out.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    num_kv_heads = inputs.k_cache.shape[2]
    for i, length in enumerate(inputs.seq_lens.tolist()):
        positions = torch.arange(length, device=q.device)
        blocks, offsets = inputs.block_table[i, positions // inputs.block_size], positions % inputs.block_size
        keys, values = inputs.k_cache[blocks, offsets].float(), inputs.v_cache[blocks, offsets].float()
        grouped = q[i].unflatten(0, (num_kv_heads, -1))
        chunk = length // splits if drops_rest and length >= splits else -(-length // splits)
        for split in range(splits):
            k, v = keys[split * chunk : (split + 1) * chunk], values[split * chunk : (split + 1) * chunk]
            if len(k) == 0:
                continue
            scores = torch.einsum("kgd,nkd->kgn", grouped, k) * inputs.scale
            lse[i, :, split] = scores.logsumexp(-1).flatten()
            out[i, :, split] = torch.einsum("kgn,nkd->kgd", scores.softmax(-1), v).flatten(0, 1)
    return out, lse


@attnfuzz.kernel("split_decode")
def eager_partials(inputs: Any) -> tuple[Tensor, Tensor]:
    return partial_states(inputs)


@attnfuzz.kernel("split_decode")
def eager_partials_drop_the_rest(inputs: Any) -> tuple[Tensor, Tensor]:
    """The size of a split is rounded down: what is left over belongs to none."""
    return partial_states(inputs, drops_rest=True)


# One set of strides for both caches, which must agree, as FlashInfer has it.


@triton.jit
def _strided_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, out_ptr, scale,
    q_stride_n, q_stride_h, kv_stride_page, kv_stride_n, kv_stride_h, table_stride, out_stride_n, out_stride_h, group,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, KEEPS_OLD: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, n = tl.arange(0, PADDED), tl.arange(0, PAGE)
    q = tl.load(q_ptr + seq * q_stride_n + head * q_stride_h + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    seq_len = tl.load(lens_ptr + seq)
    m, l = -float("inf"), 0.0  # noqa: E741 - as in the paper
    acc = tl.zeros([PADDED], tl.float32)
    for start in range(0, seq_len, PAGE):
        page = tl.load(table_ptr + seq * table_stride + start // PAGE).to(tl.int64)
        mask = (start + n < seq_len)[:, None] & (d < HEAD_DIM)[None, :]
        offs = page * kv_stride_page + n[:, None] * kv_stride_n + (head // group) * kv_stride_h + d[None, :]
        k = tl.load(k_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        qk = tl.where(start + n < seq_len, tl.sum(q[None, :] * k, axis=1) * scale, -float("inf"))
        m_new = tl.maximum(m, tl.max(qk, axis=0))
        p, alpha = tl.exp(qk - m_new), tl.exp(m - m_new)
        l = l * alpha + tl.sum(p, axis=0)  # noqa: E741
        acc = (acc if KEEPS_OLD else acc * alpha) + tl.sum(p[:, None] * v, axis=0)
        m = m_new
    l = tl.where(l == 0.0, 1.0, l)  # noqa: E741
    out = (acc / l).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + seq * out_stride_n + head * out_stride_h + d, out, mask=d < HEAD_DIM)


def decode_of_equal_strides(inputs: Any, *, keeps_old: bool = False) -> Tensor:
    q, k_cache, v_cache = inputs.q, inputs.k_cache, inputs.v_cache
    for i in range(k_cache.dim()):
        if k_cache.stride(i) != v_cache.stride(i):
            raise RuntimeError(f"k_strides[{i}] must be equal to v_strides[{i}]")
    out = torch.empty_like(q)
    _strided_kernel[(q.shape[0], q.shape[1])](
        q, k_cache, v_cache, inputs.block_table, inputs.seq_lens, out, inputs.scale,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], inputs.block_table.stride(0), out.stride(0), out.stride(1),
        q.shape[1] // k_cache.shape[2],
        PAGE=inputs.block_size, HEAD_DIM=q.shape[2], PADDED=triton.next_power_of_2(q.shape[2]), KEEPS_OLD=keeps_old,
    )  # fmt: skip
    return out


@attnfuzz.kernel("paged_decode")
def equal_strides(inputs: Any) -> Tensor:
    return decode_of_equal_strides(inputs)


@attnfuzz.kernel("paged_decode")
def equal_strides_without_rescaling(inputs: Any) -> Tensor:
    """What earlier pages added keeps the weight that it had when a larger score comes."""
    return decode_of_equal_strides(inputs, keeps_old=True)
