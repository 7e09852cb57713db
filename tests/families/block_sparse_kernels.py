"""Kernels of `attnfuzz.families.BlockSparse` with a bug each, of the kinds that such kernels had."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families import BlockSparse

PLANTED = {
    "not_cut": "a block is seen to its end, behind the row's position too",
    "cut_at_the_end": "a row sees all tokens of its sequence that its blocks have",
    "last_is_whole": "a block counts only if all of it lies before the row's position",
    "minus_one": "-1 names the first block",
    "up_to_the_first": "a list ends at its first sentinel",
    "one_head": "the first KV head's list is that of all",
    "first_row": "the first query token's list is that of all of its sequence",
    "pages": "blocks are taken to have as many tokens as pages",
    "no_table": "blocks are looked for where they would lie with one page after the other",
    "always_last": "the block of the row's position is seen, named or not",
    "empty_is_nan": "a row whose list names none is divided by 0",
}


def _attend(i: Any, bug: str = "") -> Tensor:
    out = torch.zeros_like(i.out)
    group, size = i.gqa_ratio, i.block_size
    k_cache, v_cache = (cache.transpose(1, 2) if i.layout == "HND" else cache for cache in (i.k_cache, i.v_cache))
    length_of = {"pages": size}.get(bug, i.sparse_block)
    of_block = torch.arange(length_of, device=i.q.device)
    for row, q in enumerate(i.q.float()):
        seq, token = divmod(row, i.query_len)
        length = int(i.seq_lens[seq])
        limit = max(0, length - i.query_len + token + 1)
        for head in range(i.num_kv_heads):
            listed = seq * i.query_len if bug == "first_row" else row
            blocks = i.block_lists[0 if bug == "one_head" else head, listed].long()
            if bug == "minus_one":
                blocks = blocks.clamp(min=0)
            if bug == "up_to_the_first":
                blocks = blocks[(blocks >= 0).long().cumprod(0).bool()]
            if bug == "always_last" and limit:
                blocks = torch.unique(torch.cat((blocks, blocks.new_tensor([(limit - 1) // i.sparse_block]))))
            blocks = blocks[blocks >= 0]
            if bug == "last_is_whole":
                blocks = blocks[(blocks + 1) * i.sparse_block <= limit]
            tokens = (blocks[:, None] * length_of + of_block).flatten()
            if bug == "not_cut":
                tokens = tokens[tokens < size * i.block_table.shape[1]]
            else:
                tokens = tokens[tokens < (length if bug == "cut_at_the_end" else limit)]
            pages = i.block_table[seq, tokens // size].long() % len(k_cache)
            if bug == "no_table":
                pages = (i.block_table[seq, :1].long() + tokens // size) % len(k_cache)
            k, v = (cache[pages, tokens % size, head].float() for cache in (k_cache, v_cache))
            heads = slice(head * group, (head + 1) * group)
            if len(tokens) or bug == "empty_is_nan":
                scores = q[heads] @ k.mT * i.head_size**-0.5
                out[row, heads] = scores.softmax(-1) @ v if len(tokens) else torch.nan
    return out


@attnfuzz.kernel(BlockSparse())
def right(inputs: Any) -> Tensor:
    return _attend(inputs)


def _planted(bug: str) -> Any:
    def attend(inputs: Any) -> Tensor:
        return _attend(inputs, bug)

    attend.__name__ = attend.__qualname__ = bug
    return attnfuzz.kernel(BlockSparse())(attend)


for _bug in PLANTED:
    globals()[_bug] = _planted(_bug)
