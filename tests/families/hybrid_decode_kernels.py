"""Kernels of `attnfuzz.families.HybridDecode` with a bug each, of the kinds that hybrid caches and local layers had."""

from __future__ import annotations

from typing import Any

import torch

import attnfuzz
from attnfuzz.families import HybridDecode


def _decode(inputs: Any, bug: str = "") -> None:
    inputs.out.zero_()
    size = inputs.block_size
    blocks, block = inputs.k_cache.shape[1:3]
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        first = (length - 1) // inputs.chunk * inputs.chunk if inputs.chunk and length else 0
        if bug == "window":
            first = max(0, length - inputs.chunk) if inputs.chunk else 0
        elif bug == "next_chunk":
            first = length // inputs.chunk * inputs.chunk if inputs.chunk and length % inputs.chunk else first
            first = max(0, length - 1) if inputs.chunk and length and length % inputs.chunk == 0 else first
        elif bug == "after_the_last":
            first = length // inputs.chunk * inputs.chunk if inputs.chunk else 0
        elif bug == "whole_pages":
            first = first // size * size
        elif bug == "everything":
            first = 0
        tokens = torch.arange(first, length, device=inputs.q.device)
        pages = inputs.block_table[seq, (tokens - first if bug == "relative_pages" else tokens) // size].long()
        places = pages, tokens % size // block, tokens % size % block
        if bug == "offset_in_page":
            places = pages, tokens // block % blocks, tokens % size % max(1, block - 1)
        gathered = []
        for cache in (inputs.k_cache, inputs.v_cache):
            if bug == "names_blocks":  # an entry of the table is taken for a block of the kernel
                flat = pages + tokens % size // block
                gathered.append(cache[flat // blocks, flat % blocks, places[2]])
                continue
            if bug == "packed" or (bug == "stride_of_k" and cache is inputs.v_cache):
                page = size * cache.shape[3] * cache.shape[4] if bug == "packed" else inputs.k_cache.stride(0)
                strides = (page, *cache.stride()[1:])
                cache = cache.as_strided(cache.shape, strides)
            gathered.append(cache[places])
        k, v = (rows.float().repeat_interleave(inputs.gqa_ratio, 1) for rows in gathered)
        scores = torch.einsum("hd,thd->ht", inputs.q[seq].float(), k) * inputs.head_size**-0.5
        inputs.out[seq] = torch.einsum("ht,thd->hd", scores.softmax(-1), v).to(inputs.out.dtype)


PLANTED = {
    "names_blocks": "an entry of the table is taken for a block of the kernel, and not for a page of the manager",
    "packed": "pages are taken to lie without gaps",
    "stride_of_k": "V is read with the gaps of K",
    "offset_in_page": "the last place of a block is never read",
    "window": "a chunk is taken for a sliding window",
    "next_chunk": "the last token of a chunk is taken for the first of the next",
    "after_the_last": "a chunk is that of the token after the last one, and is empty where that begins one",
    "whole_pages": "a chunk begins with its page",
    "everything": "chunks are ignored",
    "relative_pages": "pages are those of positions in the chunk, not in the sequence",
}


def _planted(bug: str) -> Any:
    def decode(inputs: Any) -> None:
        _decode(inputs, bug)

    decode.__name__ = decode.__qualname__ = bug
    return attnfuzz.kernel(HybridDecode())(decode)


@attnfuzz.kernel(HybridDecode())
def right(inputs: Any) -> None:
    _decode(inputs)


for _bug in PLANTED:
    globals()[_bug] = _planted(_bug)
