"""Checked wrapper of the kernel for attention under a mask.

As in ``dense.launch``: results are allocated unless given, strides are honoured, nothing waits for the device.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from attnfuzz.kernels.common.checks import check_launch, check_power_of_two
from attnfuzz.kernels.common.device import on_device_of
from attnfuzz.kernels.common.prepare import prepare_paged
from attnfuzz.kernels.common.variants import MaskedVariants
from attnfuzz.kernels.masked.masked_attention import masked_attention_kernel


def masked_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    mask: Tensor,
    mask_indptr: Tensor,
    scale: float,
    block_size: int,
    layout: str,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    tile: int = 32,
    num_warps: int = 4,
    num_stages: int = 3,
    **variants: Unpack[MaskedVariants],
) -> tuple[Tensor, Tensor]:
    """Attention of each query token to those keys of its sequence that a mask lets it see.

    Shapes: as for ``paged.launch_attention.paged_attention``, and ``mask [mask_size]``, bool, the tables of all
    sequences one after another; ``mask_indptr [num_seqs + 1]``, int32 or int64, where each begins. With n query tokens
    in a sequence of length L its table is ``[n, L]``: query token j sees key t where ``mask[mask_indptr[s] + j L + t]``
    is True. A table of another length is not noticed: lengths are on the device. ``variants``: as for
    ``paged_decode``, but for those that go by the distance of a key.

    Returns ``out [num_tokens, num_q_heads, v_head_size]`` in q's dtype and ``lse [num_tokens, num_q_heads]`` float32,
    natural log: 0 and -inf (or the sink) for a query token that sees no key, and for a row of q that no sequence has.
    Raises ValueError.
    """
    call = prepare_paged(
        q, k_cache, v_cache, block_table, seq_lens, block_size, layout, out, lse, variants, cu_seqlens_q,
        {"mask": mask, "mask_indptr": mask_indptr},
    )  # fmt: skip
    (out, lse), sizes = call.results, call.sizes
    check_power_of_two("tile", tile)
    launch = check_launch(num_warps, num_stages)
    if sizes["num_tokens"] == 0:
        return out, lse
    variant = call.variant.of_rows
    others = {name: value for name, value in variant.items() if name not in _OF_DISTANCES}
    with on_device_of(q):
        masked_attention_kernel[(sizes["num_tokens"], sizes["num_q_heads"])](
            q, *q.stride(), k_cache, *call.strides.k, v_cache, *call.strides.v,
            block_table, *block_table.stride(), seq_lens, *seq_lens.stride(), cu_seqlens_q, *cu_seqlens_q.stride(),
            mask, *mask.stride(), mask_indptr, *mask_indptr.stride(), out, *out.stride(), lse, *lse.stride(),
            float(scale), sizes["num_seqs"], block_size, sizes["group_size"], *call.head_sizes,
            TILE=tile, **call.constants, **launch, **others,
        )  # fmt: skip
    return out, lse


_OF_DISTANCES = ("p_slopes", "stride_slope", "window")
