"""Decode of the gated delta rule: a few new tokens of each sequence, and the state that stands for all past ones.

    S <- exp(g) S        S <- S + beta (v - S k) k^T        out = scale S q

S ``[v_head_size, head_size]`` is read once, kept in registers for all tokens of a call, and written where the caller
wants it. Its rows do not know of each other, so that a program holds a tile of them: one program per sequence, head and
tile. A row asks for two dot products of length head_size for each token, and that is all the arithmetic; the states are
what takes the time (float32, 64 KiB a head).

The rule is that of Gated DeltaNet (Yang et al., arXiv 2412.06464); with a gate for each channel it is KDA (Kimi Linear,
arXiv 2510.26692). Slots and what is kept of speculative tokens are as vLLM and SGLang have them.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Device code has no Python types.

import triton
import triton.language as tl

_EPSILON = tl.constexpr(1e-6)


@triton.jit
def _normalised(b_x):
    """``b_x [BLOCK_D]`` by its length; a row of zeros stays one."""
    return b_x / tl.sqrt(tl.sum(b_x * b_x, axis=0) + _EPSILON)


@triton.jit
def _raw_decay(b_a, log_rate):
    """exp(g) of g = -exp(A_log) softplus(a + dt_bias); softplus(x) = x for large x, whose exponential may overflow."""
    b_softplus = tl.where(b_a > 20.0, b_a, tl.log(1.0 + tl.exp(tl.minimum(b_a, 20.0))))
    return tl.exp(-tl.exp(log_rate) * b_softplus)


# Strides that only place a program's base pointer are not specialised on (== 1, divisible by 16): that buys nothing
# and would compile the kernel again for each combination. Neither are choices that a program makes once for a token.
@triton.jit(
    do_not_specialize=[
        "stride_qt", "stride_qh", "stride_kt", "stride_kh", "stride_vt", "stride_vh", "stride_gt", "stride_gh",
        "stride_gd", "stride_bt", "stride_bias", "stride_ss", "stride_sh", "stride_sv", "stride_slots", "stride_ps",
        "stride_pt", "stride_ph", "stride_pv", "stride_parents", "stride_ot", "stride_oh", "values_per_key",
        "first_slot", "normalised",
    ]
)  # fmt: skip
def recurrent_decode_kernel(
    # tensors, each followed by its strides in elements; last dimensions are contiguous
    p_q, stride_qt, stride_qh,  # [tokens, num_heads, head_size]
    p_k, stride_kt, stride_kh,  # [tokens, num_heads, head_size]
    p_v, stride_vt, stride_vh,  # [tokens, num_v_heads, v_head_size]
    p_gate, stride_gt, stride_gh, stride_gd,  # g or a: [tokens, num_v_heads, head_size]; one number a head: stride 0
    p_beta, stride_bt,  # beta or b: [tokens, num_v_heads]
    p_log_rate,  # A_log [num_v_heads], or None: gates are given
    p_bias, stride_bias,  # dt_bias: [num_v_heads, head_size], of which the last stride is that of p_gate
    p_cu_seqlens,  # [sequences + 1]
    p_state, stride_ss, stride_sh, stride_sv,  # [slots, num_v_heads, v_head_size, head_size]
    p_slots, stride_slots,  # [sequences], or [sequences, tokens] of EACH
    p_accepted,  # [sequences], or None
    p_steps, stride_ps, stride_pt, stride_ph, stride_pv,  # [steps_slots, tokens, num_v_heads, v_head_size, head_size]
    p_steps_slots,  # [sequences], or None
    p_parents, stride_parents,  # [sequences, tokens], or None
    p_out, stride_ot, stride_oh,  # [tokens, num_v_heads, v_head_size]
    # scalars
    scale,
    values_per_key,  # heads of v, and of states, per head of q and k
    head_size, v_head_size,
    first_slot,  # slots below this one are sentinels
    normalised,  # whether q and k are to be divided by their lengths
    # constants
    TILE_V: tl.constexpr,  # rows of a state per program, a power of two
    BLOCK_D: tl.constexpr,  # head_size rounded up to a power of two
):  # fmt: skip
    """Grid ``(ceil(v_head_size / TILE_V), sequences, num_v_heads)``."""
    # Indices are int64 from the start: a pool of states passes 2^31 elements, 16384 bytes a slot and head.
    i_seq = tl.program_id(1).to(tl.int64)
    i_head = tl.program_id(2).to(tl.int64)
    i_key_head = i_head // values_per_key
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)
    o_v = tl.program_id(0).to(tl.int64) * TILE_V + tl.arange(0, TILE_V)
    m_d = o_d < head_size
    m_v = o_v < v_head_size
    m_s = m_v[:, None] & m_d[None, :]

    first = tl.load(p_cu_seqlens + i_seq).to(tl.int64)
    end = tl.load(p_cu_seqlens + i_seq + 1).to(tl.int64)
    p_slots += i_seq * stride_slots
    i_slot = tl.load(p_slots + (tl.load(p_accepted + i_seq) - 1 if p_accepted is not None else 0)).to(tl.int64)
    if i_slot < first_slot or end <= first:  # a padded row, or nothing new
        return

    o_s = i_head * stride_sh + (o_v * stride_sv)[:, None] + o_d[None, :]
    b_s = tl.load(p_state + i_slot * stride_ss + o_s, mask=m_s, other=0.0).to(tl.float32)  # [TILE_V, BLOCK_D]
    if p_steps_slots is not None:
        i_steps = tl.load(p_steps_slots + i_seq).to(tl.int64)
        o_p = i_steps * stride_ps + i_head * stride_ph + (o_v * stride_pv)[:, None] + o_d[None, :]
    if p_log_rate is not None:
        log_rate = tl.load(p_log_rate + i_head).to(tl.float32)

    for i_t in range(first, end):
        if p_parents is not None and i_t > first:  # the branch of a tree: on from the state after another token
            i_parent = tl.load(p_parents + i_seq * stride_parents + (i_t - first)).to(tl.int64)
            b_s = tl.load(p_steps + i_parent * stride_pt + o_p, mask=m_s, other=0.0).to(tl.float32)

        b_q = tl.load(p_q + i_t * stride_qt + i_key_head * stride_qh + o_d, mask=m_d, other=0.0).to(
            tl.float32
        )  # [BLOCK_D]
        b_k = tl.load(p_k + i_t * stride_kt + i_key_head * stride_kh + o_d, mask=m_d, other=0.0).to(
            tl.float32
        )  # [BLOCK_D]
        b_v = tl.load(p_v + i_t * stride_vt + i_head * stride_vh + o_v, mask=m_v, other=0.0).to(tl.float32)  # [TILE_V]
        beta = tl.load(p_beta + i_t * stride_bt + i_head).to(tl.float32)
        p_gate_t = p_gate + i_t * stride_gt + i_head * stride_gh
        b_gate = tl.load(p_gate_t + o_d * stride_gd, mask=m_d, other=0.0).to(tl.float32)  # [BLOCK_D]
        if p_log_rate is not None:
            b_gate += tl.load(p_bias + i_head * stride_bias + o_d * stride_gd, mask=m_d, other=0.0)
            b_decay = _raw_decay(b_gate, log_rate)
            beta = 1.0 / (1.0 + tl.exp(-beta))
        else:
            b_decay = tl.exp(b_gate)
        if normalised:
            b_q, b_k = _normalised(b_q), _normalised(b_k)

        b_s *= b_decay[None, :]
        b_v -= tl.sum(b_s * b_k[None, :], axis=1)  # what the state has of this key already
        b_s += (b_v * beta)[:, None] * b_k[None, :]
        b_o = tl.sum(b_s * (b_q * scale)[None, :], axis=1)  # [TILE_V]
        tl.store(p_out + i_t * stride_ot + i_head * stride_oh + o_v, b_o.to(p_out.dtype.element_ty), mask=m_v)

        if p_steps_slots is not None:
            tl.store(p_steps + (i_t - first) * stride_pt + o_p, b_s.to(p_steps.dtype.element_ty), mask=m_s)
            if p_parents is not None:
                tl.debug_barrier()  # what one thread has stored another may load for the next token
        elif p_accepted is not None:
            i_slot = tl.load(p_slots + (i_t - first)).to(tl.int64)
            tl.store(p_state + i_slot * stride_ss + o_s, b_s.to(p_state.dtype.element_ty), mask=m_s)
    if p_steps_slots is None and p_accepted is None:
        tl.store(p_state + i_slot * stride_ss + o_s, b_s.to(p_state.dtype.element_ty), mask=m_s)
