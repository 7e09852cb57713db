"""Kernels of users' problems that read what is none of their business, with a weight of 0, and right ones."""

from __future__ import annotations

from typing import Any

import torch

import attnfuzz
from attnfuzz.families import HybridDecode, SparseDecode

PAGED = HybridDecode(chunk=attnfuzz.Choice((0,)), kernel_blocks=attnfuzz.Choice((1,)))


def _decode(inputs: Any, *, of_next: bool = False, of_heads: bool = False) -> None:
    """``of_next``: places behind a sequence's end are filled up with the next one's first token."""
    inputs.out.zero_()
    lengths = inputs.seq_lens.tolist()
    for seq, length in enumerate(lengths):
        beside = (seq + 1) % len(lengths)
        tokens = torch.arange(length, device=inputs.q.device)
        pages, offsets = inputs.block_table[seq, tokens // inputs.block_size].long(), tokens % inputs.block_size
        if of_next and lengths[beside] and length:
            pages = torch.cat((pages, inputs.block_table[beside, :1].long()))
            offsets = torch.cat((offsets, offsets.new_zeros(1)))
        k, v = (cache[pages, 0, offsets].float() for cache in (inputs.k_cache, inputs.v_cache))
        if of_heads:
            v = v + 0 * v.flip(1)
        k, v = (rows.repeat_interleave(inputs.gqa_ratio, 1) for rows in (k, v))
        scores = torch.einsum("hd,thd->ht", inputs.q[seq].float(), k) * inputs.head_size**-0.5
        scores[:, length:] = -torch.inf
        inputs.out[seq] = torch.einsum("ht,thd->hd", scores.softmax(-1), v).to(inputs.out.dtype)


@attnfuzz.kernel(PAGED)
def right(inputs: Any) -> None:
    _decode(inputs)


@attnfuzz.kernel(PAGED)
def reads_the_next_sequence(inputs: Any) -> None:
    _decode(inputs, of_next=True)


@attnfuzz.kernel(PAGED)
def reads_other_heads(inputs: Any) -> None:
    _decode(inputs, of_heads=True)


@attnfuzz.kernel(
    SparseDecode(
        lse=attnfuzz.Choice((False,)),
        spare_slots=attnfuzz.Choice((0,)),
        has_lengths=attnfuzz.Choice((False,)),
        cache=attnfuzz.Choice(("same",)),
    )
)
def reads_slot_0(inputs: Any) -> None:
    """A sentinel is read as slot 0, with a weight of 0; harmless unless that slot holds what is not finite."""
    for token, row in enumerate(inputs.indices.long()):
        is_slot = (row >= 0) & (row < len(inputs.kv_cache))
        keys = inputs.kv_cache[torch.where(is_slot, row, 0), 0].float()
        scores = (inputs.q[token].float() @ keys.mT * inputs.head_size**-0.5).masked_fill(~is_slot, -torch.inf)
        weights = scores.softmax(-1) if bool(is_slot.any()) else torch.zeros_like(scores)
        inputs.out[token] = (weights @ keys[:, : inputs.out.shape[-1]]).to(inputs.out.dtype)
