"""Q-Block attention with nothing but the algorithm: the kernel to read before ``q_block``.

Sequences have several new query tokens each, packed one after the other; those of sequence i begin at row
``cu_seqlens_q[i]`` of q. Query token j of n sees its sequence up to itself: ``seq_len - n + j + 1`` tokens. They lie in
pages, as in ``paged_simple``.

A program takes ``BLOCK_Q`` neighbouring query tokens times the ``GROUP`` query heads that share a KV head, flattened
to ``BLOCK_M`` rows: row ``m`` is token ``m // GROUP`` and head ``m % GROUP``. Each tile of K and V is loaded once for
all of them, and both products are matrix products (arXiv 2511.11581, §4.4). ``find_sequence`` says which sequence a
block belongs to. Tiles that all rows see are not told from those that need a mask.

``q_block`` is the same with layouts, strides, variants, scales, groups of any size, segments and a static grid.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnfuzz.kernels.common.checks import ATTENTION, check_tensors, group_size_of
from attnfuzz.kernels.common.device import on_device_of
from attnfuzz.kernels.common.matrix_units import LEAST_FOR_DOT, block_columns
from attnfuzz.kernels.q_block.q_block import find_sequence


@triton.jit(do_not_specialize=["num_seqs", "num_kv_heads", "max_blocks_per_seq"])
def q_block_simple_kernel(
    p_q,  # [num_tokens, num_q_heads, head_size]
    p_k,  # [num_blocks, block_size, num_kv_heads, head_size]
    p_v,  # likewise
    p_table,  # [num_seqs, max_blocks_per_seq]
    p_seq_lens,  # [num_seqs], with the new tokens
    p_cu_seqlens,  # [num_seqs + 1]
    p_out,  # [num_tokens, num_q_heads, head_size]
    p_lse,  # [num_tokens, num_q_heads]
    scale,
    num_seqs,
    num_kv_heads,
    head_size,
    block_size,
    max_blocks_per_seq,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_M: tl.constexpr,  # a power of two of at least GROUP and 16
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two of at least 16
):
    """Grid ``(num_tokens // BLOCK_Q + num_seqs, num_kv_heads)``, of which some programs have nothing to do."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    i_block = tl.program_id(0)
    i_kv_head = tl.program_id(1).to(tl.int64)  # offsets into a cache pass 2^31
    i_seq = find_sequence(p_cu_seqlens, 1, i_block, num_seqs, BLOCK_Q)
    query_start = tl.load(p_cu_seqlens + i_seq).to(tl.int32)
    query_len = tl.load(p_cu_seqlens + i_seq + 1).to(tl.int32) - query_start
    first = (i_block - (query_start // BLOCK_Q + i_seq.to(tl.int32))) * BLOCK_Q
    if first >= query_len:
        return
    context_len = tl.load(p_seq_lens + i_seq).to(tl.int32) - query_len

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    i_query = first + o_m // GROUP
    m_row = (o_m < BLOCK_Q * GROUP) & (i_query < query_len)
    m_md = m_row[:, None] & (o_d < head_size)[None, :]
    limits = context_len + i_query + 1  # [BLOCK_M], how many tokens each row sees
    end = context_len + tl.minimum(first + BLOCK_Q, query_len)
    i_row = (query_start + i_query).to(tl.int64) * (num_kv_heads * GROUP) + i_kv_head * GROUP + o_m % GROUP
    o_md = i_row[:, None] * head_size + o_d[None, :]
    b_q = tl.load(p_q + o_md, mask=m_md, other=0.0)  # [BLOCK_M, BLOCK_D]

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    exp_sum = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, end, TILE):
        i_t = start + tl.arange(0, TILE)
        m_t = i_t < end
        m_td = m_t[:, None] & (o_d < head_size)[None, :]
        i_page = tl.load(p_table + i_seq * max_blocks_per_seq + i_t // block_size, mask=m_t, other=0).to(tl.int64)
        i_slot = i_page * block_size + i_t % block_size  # [TILE]
        o_td = ((i_slot * num_kv_heads + i_kv_head) * head_size)[:, None] + o_d[None, :]
        b_k = tl.load(p_k + o_td, mask=m_td, other=0.0)  # [TILE, BLOCK_D]
        b_v = tl.load(p_v + o_td, mask=m_td, other=0.0)  # [TILE, BLOCK_D]

        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale  # [BLOCK_M, TILE]
        b_s = tl.where(i_t[None, :] < limits[:, None], b_s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, axis=1))
        ref = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
        alpha = tl.exp(row_max - ref)
        b_p = tl.exp(b_s - ref[:, None])
        exp_sum = exp_sum * alpha + tl.sum(b_p, axis=1)
        acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * alpha[:, None], input_precision="ieee")
        row_max = new_max

    divisor = tl.where(exp_sum == 0.0, 1.0, exp_sum)  # a row that sees no token: 0 and -inf
    tl.store(p_out + o_md, (acc / divisor[:, None]).to(p_out.dtype.element_ty), mask=m_md)
    tl.store(p_lse + i_row, row_max + tl.log(divisor), mask=m_row)


def q_block_simple(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the new tokens of each sequence over a paged KV cache, NHD, all tensors contiguous.

    Shapes as in the kernel; indices int32 or int64. Returns ``out`` in q's dtype and ``lse`` float32, natural log: 0
    and -inf for a query that sees nothing. Raises ValueError.
    """
    tensors = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens,
        "cu_seqlens_q": cu_seqlens_q,
    }  # fmt: skip
    sizes = check_tensors(tensors, ATTENTION["interleaved"])  # the NHD layout with heads of one size
    if sizes["num_seqs_plus_1"] != sizes["num_seqs"] + 1:
        raise ValueError(f"cu_seqlens_q.shape={list(cu_seqlens_q.shape)} must be [{sizes['num_seqs'] + 1}]")
    group = group_size_of(sizes["num_q_heads"], sizes["num_kv_heads"])
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} of strides {tensor.stride()} must be contiguous; use q_block_attention, or copy it"
            )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    block_m = max(LEAST_FOR_DOT, triton.next_power_of_2(group))
    blocks = sizes["num_tokens"] // (block_m // group) + sizes["num_seqs"]
    if sizes["num_seqs"] > 0:
        with on_device_of(q):
            q_block_simple_kernel[(blocks, sizes["num_kv_heads"])](
                q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out, lse,
                float(scale), sizes["num_seqs"], sizes["num_kv_heads"], sizes["head_size"], sizes["block_size"],
                sizes["max_blocks_per_seq"], GROUP=group, BLOCK_M=block_m, TILE=16,
                BLOCK_D=block_columns(sizes["head_size"], block_m),
            )  # fmt: skip
    return out, lse
