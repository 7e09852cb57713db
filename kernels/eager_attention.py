"""``paged_attention`` once more, in plain PyTorch: every query token is a row of a decode batch.

A query token is a decode step over the keys up to itself, so its row has its sequence's pages and its own length. That
reads a sequence's pages once for each of its query tokens; see ``eager`` for the rest.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from attnfuzz.kernels import eager
from attnfuzz.kernels.common.checks import check_positive
from attnfuzz.kernels.common.prepare import prepare_paged
from attnfuzz.kernels.common.variants import Variants

__all__ = ["paged_attention"]


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
