"""Checked wrappers of the dense decode kernel and of the plain merge.

Those on a paged cache are in ``launch_paged``, other ways to merge in ``launch_merge``.

Results are allocated unless given. Strides are honoured, those of results included. No call waits for the device, so
values that live there are not checked: a length beyond the cache reads out of bounds.
"""

from __future__ import annotations

import triton
from torch import Tensor

from attnfuzz.kernels.common.checks import check_launch, check_power_of_two
from attnfuzz.kernels.common.device import on_device_of
from attnfuzz.kernels.common.prepare import prepare_dense, prepare_merge
from attnfuzz.kernels.dense.dense_decode import dense_decode_kernel
from attnfuzz.kernels.merge.merge_blocks import takes_place_of
from attnfuzz.kernels.merge.merge_states import merge_states_kernel

__all__ = ["dense_decode", "merge_states"]


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
            q, k, v, seq_lens, out, lse,
            float(scale), sizes["group_size"], sizes["head_size"], sizes["v_head_size"],
            *q.stride(), *k.stride(), *v.stride(), *seq_lens.stride(), *out.stride(), *lse.stride(),
            TILE=tile, BLOCK_D=triton.next_power_of_2(sizes["head_size"]),
            BLOCK_DV=triton.next_power_of_2(sizes["v_head_size"]), **launch,
        )  # fmt: skip
    return out, lse


def merge_states(
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    *,
    lse_layout: str = "HT",
    output: Tensor | None = None,
    output_lse: Tensor | None = None,
    num_warps: int = 4,
) -> tuple[Tensor, Tensor]:
    """Merge two attention states of the same queries over disjoint keys.

    Shapes: outputs ``[num_tokens, num_q_heads, head_size]`` in float16, bfloat16 or float32; LSEs float32, natural log,
    ``[num_q_heads, num_tokens]`` for ``lse_layout="HT"``, ``[num_tokens, num_q_heads]`` for ``"TH"``. An LSE of -inf or
    +inf marks an empty side, whose output is not used. ``num_warps`` as for ``dense_decode``.

    Returns ``(output, output_lse)`` in the same shapes: 0 and -inf where both sides are empty. They may be given as
    tensors of either side, which are then replaced; otherwise they must not overlap with any. Raises ValueError.
    """
    inputs = {"prefix_output": prefix_output, "prefix_lse": prefix_lse}
    inputs |= {"suffix_output": suffix_output, "suffix_lse": suffix_lse}
    output, output_lse, sizes = prepare_merge(inputs, lse_layout, output, output_lse)
    launch = check_launch(num_warps, 1)
    in_place = takes_place_of({"output": output, "output_lse": output_lse}, inputs)
    tokens_first = [lse.t() if lse_layout == "HT" else lse for lse in (prefix_lse, suffix_lse, output_lse)]
    with on_device_of(output):
        merge_states_kernel[(sizes["num_tokens"], sizes["num_q_heads"])](
            prefix_output, suffix_output, prefix_lse, suffix_lse, output, output_lse,
            sizes["head_size"],
            *prefix_output.stride(), *suffix_output.stride(), *tokens_first[0].stride(), *tokens_first[1].stride(),
            *output.stride(), *tokens_first[2].stride(),
            BLOCK_D=triton.next_power_of_2(sizes["head_size"]), IN_PLACE=in_place, **launch,
        )  # fmt: skip
    return output, output_lse
