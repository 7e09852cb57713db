"""The tokens of a paged cache in the forms in which engines take them where they take no block table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def slots_of(i: Any, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Where each sequence begins in a row of the tokens from ``starts`` to ``ends`` of all, and of each of these tokens
    its slot of the cache."""
    positions = torch.arange(i.block_table.shape[1] * i.block_size, device=i.q.device)
    slots = i.block_table.long().repeat_interleave(i.block_size, 1) * i.block_size + positions % i.block_size
    indptr = torch.nn.functional.pad((ends - starts).cumsum(0, dtype=torch.int32), (1, 0))
    return indptr, slots[(positions >= starts[:, None]) & (positions < ends[:, None])]


def flat(cache: Tensor) -> Tensor:
    """A cache of slots rather than pages, from ``[blocks, block_size, ...]``."""
    return cache.reshape(-1, *cache.shape[2:])


def with_room(i: Any, starts: Tensor) -> tuple[Tensor, Tensor | slice]:
    """q for sequences that begin at ``starts`` in a row of more query tokens: those in front of its own hold zeros.

    Also which of the rows are its own.
    """
    if int(starts[-1]) == len(i.q):
        return i.q, slice(None)
    counts = i.cu_seqlens_q.diff().long()
    before = (starts[1:] - i.cu_seqlens_q[1:]).repeat_interleave(counts)
    own = before + torch.arange(len(before), device=i.q.device)
    q = i.q.new_zeros(int(starts[-1]), *i.q.shape[1:])
    q[own] = i.q
    return q, own


def whole_prompts(i: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | slice]:
    """q, k and v of all tokens in a row, for kernels without a cache; where each sequence begins in it, and which rows
    are asked for."""
    starts, slots = slots_of(i, torch.zeros_like(i.seq_lens), i.seq_lens)
    q, own = with_room(i, starts)
    return q, flat(i.k_cache)[slots], flat(i.v_cache)[slots], starts, own
