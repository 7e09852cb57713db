"""Paged decode attention with nothing but the algorithm: the kernel to read first.

One query token per sequence. Its K and V lie in pages of a cache, and the block table says in which: token ``t`` is row
``t % block_size`` of page ``block_table[t // block_size]``. One program per (sequence, query head) walks the tokens a
tile at a time and keeps a running softmax, so that no score leaves the program:

    m' = max(m, max s)      sum' = sum · exp(m - m') + Σ exp(s - m')      acc' = acc · exp(m - m') + Σ exp(s - m') · v

(FlashAttention, Dao et al., arXiv 2205.14135, with one query row). At the end ``out = acc / sum`` and ``lse = m + log
sum``. Groups of query heads share a KV head. All tensors are contiguous.

``paged_decode`` is the same with layouts, strides, variants and scales; docs/kernels.md says how to read on.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnfuzz.kernels.common.checks import PAGED, check_tensors, group_size_of
from attnfuzz.kernels.common.device import on_device_of


@triton.jit(do_not_specialize=["max_blocks_per_seq"])  # else compiled again where it is 1, and where 16 divides it
def paged_simple_kernel(
    p_q,  # [num_seqs, num_q_heads, head_size]
    p_k,  # [num_blocks, block_size, num_kv_heads, head_size]
    p_v,  # likewise
    p_table,  # [num_seqs, max_blocks_per_seq]
    p_seq_lens,  # [num_seqs]
    p_out,  # [num_seqs, num_q_heads, head_size]
    p_lse,  # [num_seqs, num_q_heads]
    scale,
    num_q_heads,
    num_kv_heads,
    head_size,
    block_size,
    max_blocks_per_seq,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
):
    """Grid ``(num_seqs, num_q_heads)``."""
    i_seq = tl.program_id(0).to(tl.int64)  # offsets into a cache pass 2^31
    i_head = tl.program_id(1).to(tl.int64)
    i_kv_head = i_head // (num_q_heads // num_kv_heads)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < head_size

    i_row = i_seq * num_q_heads + i_head
    seq_len = tl.load(p_seq_lens + i_seq)
    b_q = tl.load(p_q + i_row * head_size + o_d, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK_D]

    row_max = tl.full([], float("-inf"), tl.float32)
    exp_sum = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, seq_len, TILE):
        i_t = start + tl.arange(0, TILE)
        m_t = i_t < seq_len
        m_td = m_t[:, None] & m_d[None, :]
        i_page = tl.load(p_table + i_seq * max_blocks_per_seq + i_t // block_size, mask=m_t, other=0).to(tl.int64)
        i_slot = i_page * block_size + i_t % block_size  # [TILE]
        o_td = ((i_slot * num_kv_heads + i_kv_head) * head_size)[:, None] + o_d[None, :]
        b_k = tl.load(p_k + o_td, mask=m_td, other=0.0).to(tl.float32)  # [TILE, BLOCK_D]
        b_v = tl.load(p_v + o_td, mask=m_td, other=0.0).to(tl.float32)  # [TILE, BLOCK_D]

        b_s = tl.where(m_t, tl.sum(b_q[None, :] * b_k, axis=1) * scale, float("-inf"))  # [TILE]
        new_max = tl.maximum(row_max, tl.max(b_s, axis=0))
        ref = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
        alpha = tl.exp(row_max - ref)
        b_p = tl.exp(b_s - ref)  # [TILE]
        exp_sum = exp_sum * alpha + tl.sum(b_p, axis=0)
        acc = acc * alpha + tl.sum(b_p[:, None] * b_v, axis=0)
        row_max = new_max

    divisor = tl.where(exp_sum == 0.0, 1.0, exp_sum)  # a sequence without tokens: 0 and -inf
    tl.store(p_out + i_row * head_size + o_d, (acc / divisor).to(p_out.dtype.element_ty), mask=m_d)
    tl.store(p_lse + i_row, row_max + tl.log(divisor))


def paged_simple(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of one query token per sequence over a paged KV cache in the NHD layout, all tensors contiguous.

    Shapes as in the kernel; ``block_table`` and ``seq_lens`` int32 or int64. Returns ``out`` in q's dtype and ``lse``
    float32, natural log: 0 and -inf for an empty sequence. Raises ValueError.
    """
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    sizes = check_tensors(tensors, PAGED["interleaved"])  # the NHD layout with heads of one size
    group_size_of(sizes["num_q_heads"], sizes["num_kv_heads"])
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} of strides {tensor.stride()} must be contiguous; use paged_decode, or copy it")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    with on_device_of(q):
        paged_simple_kernel[(sizes["num_seqs"], sizes["num_q_heads"])](
            q, k_cache, v_cache, block_table, seq_lens, out, lse,
            float(scale), sizes["num_q_heads"], sizes["num_kv_heads"], sizes["head_size"], sizes["block_size"],
            sizes["max_blocks_per_seq"], TILE=32, BLOCK_D=triton.next_power_of_2(sizes["head_size"]),
        )  # fmt: skip
    return out, lse
