"""``paged_attention`` and ``masked_attention`` once more, in plain PyTorch: query tokens are rows of a decode batch.

A query token is a decode step over the keys up to itself, so its row has its sequence's pages and its own length. That
reads a sequence's pages once for each of its query tokens; see ``eager`` for the rest. Under a mask it is a step over
all keys of the sequence, less those that the mask hides from it.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from attnfuzz.kernels import eager
from attnfuzz.kernels.common.checks import check_positive
from attnfuzz.kernels.common.prepare import prepare_paged
from attnfuzz.kernels.common.variants import MaskedVariants, Variants


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    block_size: int,
    layout: str,
    *,
    max_query_len: int,
    max_seq_len: int,
    causal: bool = True,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **variants: Unpack[Variants],
) -> tuple[Tensor, Tensor]:
    """See ``paged.launch_attention.paged_attention``."""
    out, lse = prepare_paged(
        q, k_cache, v_cache, block_table, seq_lens, block_size, layout, out, lse, variants, cu_seqlens_q
    ).results
    check_positive("max_query_len", max_query_len)
    check_positive("max_seq_len", max_seq_len)
    seq, row_lens = _rows(seq_lens, cu_seqlens_q, len(q), causal)
    return eager.paged_decode(
        q,
        k_cache,
        v_cache,
        block_table[seq],
        row_lens,
        scale,
        block_size,
        layout,
        out=out,
        lse=lse,
        **variants,
    )


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
    **variants: Unpack[MaskedVariants],
) -> tuple[Tensor, Tensor]:
    """See ``masked.launch.masked_attention``."""
    call = prepare_paged(
        q, k_cache, v_cache, block_table, seq_lens, block_size, layout, out, lse, variants, cu_seqlens_q,
        {"mask": mask, "mask_indptr": mask_indptr},
    )  # fmt: skip
    seq, row_lens = _rows(seq_lens, cu_seqlens_q, len(q), causal=False)
    key = torch.arange(block_table.shape[1] * block_size, device=q.device)
    query = torch.arange(len(q), device=q.device) - cu_seqlens_q.long()[seq]
    row = mask_indptr.long()[seq] + query * row_lens
    is_live = key < row_lens[:, None]
    table = torch.cat((mask, mask.new_zeros(1)))  # whose last entry stands for keys that are not there
    sees = table[torch.where(is_live, row[:, None] + key, len(mask))]
    return eager.attend_rows(call, q, k_cache, v_cache, block_table[seq], row_lens, scale, layout, sees)


def _rows(seq_lens: Tensor, cu_seqlens_q: Tensor, num_tokens: int, causal: bool) -> tuple[Tensor, Tensor]:
    """The sequence of each query token, and how many keys it attends to; any and 0 for a row that no sequence has."""
    token = torch.arange(num_tokens, device=seq_lens.device)
    ends = cu_seqlens_q[1:].long()
    # The first end above the token: sequences without query tokens end where they begin, and have none.
    seq = torch.searchsorted(ends.contiguous(), token, right=True)
    is_found = seq < len(ends)
    seq = seq.clamp(max=len(ends) - 1)
    behind = ends[seq] - token - 1 if causal else 0  # query tokens of its sequence that it does not see
    return seq, (seq_lens.long()[seq] - behind) * is_found
