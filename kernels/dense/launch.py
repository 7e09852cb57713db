"""Checked wrapper of the dense decode kernel.

Results are allocated unless given. Strides are honoured, those of results included. No call waits for the device, so
values that live there are not checked: a length beyond the cache reads out of bounds.
"""

from __future__ import annotations

import triton
from torch import Tensor

from attnfuzz.kernels.common.checks import check_launch, check_power_of_two
from attnfuzz.kernels.common.device import on_device_of
from attnfuzz.kernels.common.prepare import prepare_dense
from attnfuzz.kernels.dense.dense_decode import dense_decode_kernel


def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    tile: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
) -> tuple[Tensor, Tensor]:
    """Attention of one query token per sequence over dense K and V.

    Shapes: ``q [num_seqs, num_q_heads, head_size]``, ``k [num_seqs, max_seq_len, num_kv_heads, head_size]``,
    ``v [num_seqs, max_seq_len, num_kv_heads, v_head_size]``, all in float16, bfloat16 or float32; ``seq_lens
    [num_seqs]`` int32 or int64. ``tile``: keys per step, a power of two. ``num_warps`` and ``num_stages``: of the
    launch, as in ``triton.Config``; they change the speed only.

    Returns ``out [num_seqs, num_q_heads, v_head_size]`` in q's dtype and ``lse [num_seqs, num_q_heads]`` float32,
    natural log: 0 and -inf for an empty sequence. Raises ValueError.
    """
    out, lse, sizes = prepare_dense(q, k, v, seq_lens, out, lse)
    check_power_of_two("tile", tile)
    launch = check_launch(num_warps, num_stages)
    with on_device_of(q):
        dense_decode_kernel[(sizes["num_seqs"], sizes["num_q_heads"])](
            q, *q.stride(), k, *k.stride(), v, *v.stride(), seq_lens, *seq_lens.stride(),
            out, *out.stride(), lse, *lse.stride(),
            float(scale), sizes["group_size"], sizes["head_size"], sizes["v_head_size"],
            TILE=tile, BLOCK_D=triton.next_power_of_2(sizes["head_size"]),
            BLOCK_DV=triton.next_power_of_2(sizes["v_head_size"]), **launch,
        )  # fmt: skip
    return out, lse
