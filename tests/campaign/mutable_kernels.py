"""A project of a user's to mutate: a Triton kernel in one file, its declaration in another."""

from __future__ import annotations

from pathlib import Path

_CODE = """
import triton
import triton.language as tl


@triton.jit
def combine(p_a, p_b, p_lse_a, p_lse_b, p_out, p_lse, head_size, stride_at, stride_ah, stride_bt, stride_bh,
            stride_lat, stride_lah, stride_lbt, stride_lbh, stride_ot, stride_oh, stride_lt, stride_lh,
            BLOCK_D: tl.constexpr):
    i_token = tl.program_id(0)
    i_head = tl.program_id(1)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < head_size
    lse_a = tl.load(p_lse_a + i_token * stride_lat + i_head * stride_lah)
    lse_b = tl.load(p_lse_b + i_token * stride_lbt + i_head * stride_lbh)
    a = tl.load(p_a + i_token * stride_at + i_head * stride_ah + o_d, mask=m_d, other=0.0).to(tl.float32)
    b = tl.load(p_b + i_token * stride_bt + i_head * stride_bh + o_d, mask=m_d, other=0.0).to(tl.float32)
    row_max = tl.maximum(lse_a, lse_b)
    w_a = tl.exp(lse_a - row_max)
    w_b = tl.exp(lse_b - row_max)
    total = tl.sum(w_a + tl.zeros([1], tl.float32), axis=0) + w_b
    out = (w_a * a + w_b * b) / total
    tl.store(p_out + i_token * stride_ot + i_head * stride_oh + o_d, out.to(p_out.dtype.element_ty), mask=m_d)
    tl.store(p_lse + i_token * stride_lt + i_head * stride_lh, row_max + tl.log(total))
"""

_DECLARATION = """
import attnfuzz
import triton
from combining import combine

SUPPORTS = attnfuzz.Supports(
    dtypes=("float32",), head_sizes=(16, 24), strides="contiguous", empty_sequences=False, lse_layout="TH"
)


@attnfuzz.kernel("merge_states", supports=SUPPORTS)
def mine(inputs):
    prefix, suffix = inputs.prefix_output, inputs.suffix_output
    tokens, heads, head_size = prefix.shape
    combine[(tokens, heads)](
        prefix, suffix, inputs.prefix_lse, inputs.suffix_lse, inputs.output, inputs.output_lse, head_size,
        prefix.stride(0), prefix.stride(1), suffix.stride(0), suffix.stride(1), *inputs.prefix_lse.stride(),
        *inputs.suffix_lse.stride(), inputs.output.stride(0), inputs.output.stride(1), *inputs.output_lse.stride(),
        BLOCK_D=triton.next_power_of_2(head_size),
    )
    return inputs.output, inputs.output_lse
"""


def write_project(folder: Path) -> Path:
    """Write both files to ``folder``; returns the one that declares the kernel ``mine``."""
    (folder / "combining.py").write_text(_CODE)
    (folder / "declaring.py").write_text(_DECLARATION)
    return folder / "declaring.py"
